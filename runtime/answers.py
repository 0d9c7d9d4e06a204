r"""
Whether two mathematical answers are equal: first spelling, then math-verify (see math_judge.py).
In doubt an answer is wrong, because a model learns whatever earns a reward.

>>> equal("3/2", "1½"), equal("3 cm", "3"), equal("3 cm", "3 km"), equal("72", "48/2+48")
(True, True, False, False)
"""

# ruff: noqa: RUF001, because the tables have such signs
import contextlib
import re
import unicodedata
from collections import namedtuple
from decimal import Context, Decimal

from runtime import math_judge

LONGEST = 500  # characters; anything longer is not an answer
OR = " (or) "  # between alternatives, in a reference answer
SYMBOLS = {
    "‐‑‒–—―−": "-", "·⋅∙": r"\\cdot ", "×": r"\\times ", "÷⁄": "/", "π": r"\\pi ", "٫": ".",
    "∞": r"\\infty ", "∪": r"\\cup ", "∅Ø": r"\\emptyset ", "º˚": "°", "،、": ",",
}  # fmt: skip
LETTER = r"(?:(?![\d_])[\w\u0300-\u036f\u0900-\u0fff])"  # with the marks of Hindi, Thai, ...
FOREIGN = rf"(?=[^\x00-\x7fα-ω]){LETTER}"  # not Greek: 3α is algebra, as 3ab is
BRACED = r"\{\s*((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
SPELLINGS = [  # (pattern, replacement), in this order, without regard to case
    # Unicode: NFKC, except where it would spoil something (x² to x2, 1½ to 11⁄2, 90º to 90o)
    (r"[⁰¹²³⁴-⁾ⁿ]+", r"^{\g<0>}"),
    (r"[¼-¾⅐-⅞]", r" \g<0>"),
    (r"[a-z]?[^\x00-\x7fº˚₀-ₜ]+", lambda match: unicodedata.normalize("NFKC", match[0])),
    *((f"[{signs}]", spelling) for signs, spelling in SYMBOLS.items()),
    # LaTeX. From here on, "~" marks a word of \text{...}.
    (r"(?<!\\)\$((?:\\.|[^$\\])*)\$", r"\1"),
    (r",\\!\s*", "{,}"),
    (r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[()[\]!]|\*\*|`", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\varnothing", r"\\emptyset"),
    (rf"\\(?:boldsymbol|bm|mathbf|mathrm(?=\{{[ei]\}}))\s*{BRACED}", r"\1"),
    *[(rf"\\(?:mbox|text(?:bf|rm|it|normal)?|mathrm)\s*{BRACED}", r" ~\1 ")] * 2,  # also nested
    (r"(\\[dtc]?frac) ?(\d) ?(\d)", r"\1{\2}{\3}"),
    (r"(?:√|(?<![\\a-z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-z]))", r"\\sqrt{\1\2\3}"),
    (r"(?<![\\a-z])(pi|sin|cos|tan|log|ln)(?![a-z])", r"\\\1 "),
    # around an answer, and between the parts of a list
    (r"^(?:[\s*_:~=≈]|\\approx\b)+|(?:[\s.,;:*_。~]|\\\\)+$", ""),
    (r"[\s~,]*\b(?:and|or)\b[\s~]*|(?<=\d)(?:\s(?:und|et|и)\s|[和と])(?=[\d\\-])", ", "),
    (r"\s+", " "),
    # numbers
    (r"(?<=\d)(?<!\d{4})(?:\{,\}| )(?=\d{3}(?![\d/]))", ""),
    (r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d/.])", r"\1\\frac{\2}{\3}"),
    (r"^(-?\d(?:\.\d+)?) ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?([+-]?\d+) ?\}?", r"\1e\2"),
    (r"(?:\\times|\\cdot|\*) ?(?=\\sqrt|\\pi)", ""),
    # units, of which the base of a number is one
    (r"(?<=\d) ?_ ?\{?(\d+)\}?$", r" ~base\1"),
    (r" ?(?:°|\^ ?(?:\{ ?\\circ ?\}|\\circ\b))(?= ?(?:[,)\]}~a-z]|$))", " ~degree"),
    (r" ?(?:\\?%|~?\bper ?cent\b)", " ~percent"),
    (r"~?\bdollars?\b|\\\$", "$"),
    (r"([$¢-¥₠-⃏])(.*)", r"\2 ~\1"),
]
SPELLINGS = [(re.compile(pattern, re.IGNORECASE), to) for pattern, to in SPELLINGS]
SPACES = re.compile(r"(?<![\da-z,])\s+|\s+(?![\da-z\s])|(?<=\d) (?=[a-z]\b)", re.IGNORECASE)

LABEL = re.compile(r"\(?([A-Z])(?:(?:\)|[.:] )(?! ?[-,+*/=^(])(.+)|\)?)")  # the letter of a choice
CHANGES = (  # words that change the number before them: 2 million, 5 thousandths
    r"(?:plus|minus|times|squared|cubed|half|halves|dozen|(?:third|quarter|fif|six|seven|eigh|nin|ten|"
    r"hundred|thousand|\w+illion)(?:ths?|s)?|over|by|divided|multiplied|raised|power|factorial|choose|"
    r"mod(?:ulo)?|less|more|below|above|add|then|upon|nor|through|eleven(?:th)?|twel\w+|\w+teen|"
    r"(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b|[百千万億亿억](?![克米])|тысяч|миллион"
)
UNIT = re.compile(  # a word after a number; few letters, or without a space, may be algebra
    rf"(?:(?<=[\d)}}\]])|(?<=\\pi)|(?<=\d[a-z]))[ ~]*(?!{CHANGES})"
    rf"(?:(?<=~)(?:base\d+|{LETTER}|[$¢-¥₠-⃏])|(?<=[ ~]){LETTER}{{3}}|{FOREIGN}|[cm]m|"
    rf" (?:k[mg]|ft|m/s))"
    rf"(?:{LETTER}|[ ~/.*'-]|\\cdot|\^ ?\{{?-?\d\}}?)*(?=$|[,)\]}}]|\\\}})", re.IGNORECASE,
)  # fmt: skip
ENDINGS = re.compile(r"[\s~.{}]|(?<=\w\w)(?:ies|y|es|e|s)\b")  # what may differ in a unit

# A value, as opposed to algebra, words, and a sum, difference or product to compute
VALUE = re.compile(
    r"(?:(?<!\))\d|(?<![)}])\\[dtc]?frac ?|(?<![\w)}\]])(?:[-+]|\\pm ?)|(?<![\d)}])\(|"
    r"\\(?:sqrt|pi|infty|cup|emptyset) ?|\\?[{}]|[).,\[\]/^:;ei]|, |\b[a-z]=)+"
)
PAIR = re.compile(r"(\\{|\(|\[)[^()[\]|:]*,[^()[\]|:]*(?:\\}|\)|\])")  # or a set, or an interval
# What is compared as text: words, and what math-verify misreads: 2:3:5, and 1^\circ 30'
WORDS = rf"(?=.*(?:{LETTER}{{3}}|{FOREIGN}))(?:{LETTER}|[ ,.'-])+"
WORDS = re.compile(rf"{WORDS}|[\d.]+(?::[\d.]+){{2,}}|.*\\circ(?![a-z]).*")
WHOLE = r"\d+|\d{1,3}(?:,\d{2,3})*,\d{3}"  # 1,234,567 or, in India, 12,34,567
NUMBER = re.compile(rf"-?(?:(?:{WHOLE})(?:\.\d*)?|\.\d+)(?:e[+-]?\d{{1,3}})?", re.IGNORECASE)

Answer = namedtuple("Answer", "value share label units bracket")  # share: of 50 %, 50/100


def read(text: str) -> Answer:
    """The value of an answer, after SPELLINGS, and what was taken off around it."""
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    label = ""
    if match := LABEL.fullmatch(text):
        label, text = match[1], match[2] or match[1]
    units = [ENDINGS.sub("", unit) for unit in UNIT.findall(text.casefold())]
    text = SPACES.sub("", UNIT.sub("", text).replace("~", ""))
    name, equals, number = text.rpartition("=")
    if NUMBER.fullmatch(number):  # 27.0 becomes 27, and -0 becomes 0; prec: keep every digit
        exact = Decimal(number.replace(",", "")).normalize(Context(prec=len(number)))
        text = f"{name}{equals}{exact or Decimal():f}"
    text = re.sub(r", |,(?!\d{3}(?!\d))", ", ", text)  # "3, 200" are two numbers
    share = rf"\frac{{{text}}}{{100}}" if "percent" in units else text
    bracket = PAIR.fullmatch(text)
    return Answer(text, share, label, units, bracket[1] if bracket else "")


def equal(answer: str, given: str) -> bool:
    """Whether what was given equals the reference answer, or one of its alternatives."""
    if OR in answer:
        return any(equal(gold, given) for gold in answer.split(OR))
    gold, given = read(answer), read(given)
    if gold.label and given.label:
        return gold.label == given.label
    for own, other in ((gold.units, given.units), (gold.bracket, given.bracket)):
        if own and other and own != other:  # 3 cm is 3, but not 3 km
            return False
    return same(gold.value, given.value) or same(gold.share, given.share)


def same(answer: str, given: str) -> bool:
    """Whether two values are equal, in the form that `read` gives them."""
    if answer == given:
        return True
    if VALUE.fullmatch(answer) and not VALUE.fullmatch(given):
        return False  # 48/2+48 is not 72: whoever repeats a sum has not computed it
    if WORDS.fullmatch(answer) or WORDS.fullmatch(given):
        return answer.casefold() == given.casefold()
    rounded = "." in answer and len(answer.strip("-0.")) > 14  # such as 0.333333333333333
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(given) and not rounded:
        return False
    with contextlib.suppress(TimeoutError):
        return math_judge.ask(answer, given)
    return False


def has_value(answer: str) -> bool:
    """Whether a reference answer can be read. If not, all completions would earn the same."""
    values = [read(gold).value for gold in answer.split(OR) if len(gold) <= LONGEST]
    plain = any(NUMBER.fullmatch(value) or WORDS.fullmatch(value) for value in values)
    return plain or any(value and math_judge.ask(value, value) for value in values)
