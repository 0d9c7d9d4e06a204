r"""
Whether two mathematical answers are equal: first spelling, then meaning, then math-verify.

SPELLINGS turns the ways to write an answer into one. `read` then takes off what stands around the
value: what both answers have there, such as a unit, must agree. Values that are plain numbers or
words are compared here; others go to math-verify, in a process of its own: math_judge.py.

>>> equal("3/2", "1½"), equal("3 cm", "3"), equal("3 cm", "3 km"), equal("3", "at least 3")
(True, True, False, False)
"""

# ruff: noqa: RUF001, because the table has such signs
import re
import unicodedata
from decimal import Context, Decimal
from functools import lru_cache
from typing import NamedTuple

from runtime import math_judge

SYMBOLS = dict.fromkeys("‐‒–—―−", "-") | dict.fromkeys("·⋅∙", r"\cdot ")
SYMBOLS |= dict.fromkeys("≤⩽", r"\leq ") | dict.fromkeys("≥⩾", r"\geq ") | {"≠": r"\neq "}
SYMBOLS |= {"×": r"\times ", "÷": "/", "±": r"\pm ", "π": r"\pi ", "∛": "√[3]", "∜": "√[4]"}
SYMBOLS |= {"∞": r"\infty ", "∪": r"\cup ", "∅": r"\emptyset ", "Ø": r"\emptyset ", "∶": ":"}
SYMBOLS |= {"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "′": "'"}
FACTORS = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}"}
FACTORS |= {"billion": "10^{9}", "trillion": "10^{12}"}
SPELLINGS = [  # (pattern, replacement), in this order, without regard to case
    # Unicode: NFKC, after what it would spoil (x² to x2, 1½ to 11⁄2, 90º to 90o)
    (r"[º˚]", "°"),
    (r"[⁰¹²³⁴-⁾ⁿ]+", r"^{\g<0>}"),
    (r"[₀-₎ₐ-ₜ]+", r"_{\g<0>}"),
    (r"[ℝℤℕℚℂ]", lambda match: rf"\mathbb{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (r"[¼-¾⅐-⅞]", r" \g<0>"),
    (r"[^\x00-\x7f]+", lambda match: unicodedata.normalize("NFKC", match[0])),
    (r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}"),
    (f"[{''.join(SYMBOLS)}]", lambda match: SYMBOLS[match[0]]),
    (r"(?<![\\a-z])sqrt\b", "√"),
    (r"√(\[\d\])?\s*(?:\(([^()]*)\)|([\d.]+|[a-z]|\\frac\{\d+\}\{\d+\}))", r"\\sqrt\1{\2\3}"),
    (r"√", r"\\sqrt"),
    (r"(?<![\\a-z])(pi|sin|cos|tan|log|ln)(?![a-z])", r"\\\1 "),
    (r"\binfinity\b", r"\\infty "),
    # LaTeX
    (r",\\!\s*", "{,}"),
    (r"\\\\\[[\d.]+ ?(?:pt|em|ex)\]", r"\\\\"),  # space between the rows of a matrix
    (r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[()[\]!]|\*\*|`", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\(?:boldsymbol|bm)(?![a-z])", r"\\mathbf"),
    (r"\\(?:mbox|emph|underline|(?:text|math)(?:bf|rm|it|normal)?)\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<!\\)\$([^$]*)(?<!\\)\$", r"\1"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\\[a-z]+|[^\\{\s])\s*(\\[a-z]+|[^\\{\s])", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\[[^]]*\])?\s*([^\W_])", r"\\sqrt\1{\2}"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"\\varnothing|\\\{\s*\\\}|\b(?:the )?empty set\b", r"\\emptyset "),
    (r"\\colon(?![a-z])|(?<=\d)\s+to\s+(?=\d)", ":"),
    # relations
    (r"<=|\\(?:le|leqslant)(?![a-z])|\b(?:at most|no more than)\b", r"\\leq "),
    (r">=|\\(?:ge|geqslant)(?![a-z])|\b(?:at least|no (?:less|fewer) than)\b", r"\\geq "),
    (r"!=|\\not\s*=|\\ne(?![a-z])|^\s*not(?: equal to)?\b", r"\\neq "),
    (r"\\lt(?![a-z])|\b(?:less|fewer|smaller) than\b", "<"),
    (r"\\gt(?![a-z])|\b(?:more|greater|larger) than\b", ">"),
    (r"^(.*\d.*) or (?:more|greater|above)\s*$", r"\\geq \1"),
    (r"^(.*\d.*) or (?:less|fewer|below)\s*$", r"\\leq \1"),
    # around an answer
    (r"^\s*(?:=|≈|\\approx\b|\\sim\b|about\b|approximately\b|[a-z]\s*(?:∈|\\in\b))", ""),
    (r"^[\s*_:]+|(?:[\s.,;:*_。]|\\\\)+$", ""),
    (r"^(?:the )?(?:correct |final )?(?=(?:option|choice|answer)\b)", ""),
    (r"^(?:option|choice|answer)\b(?: is)?[\s:]*(?=\(?(?:[a-z]\b|[\d\\-]))", ""),
    (r"^an? (?=[a-z]{3})", ""),
    (r"\s+", " "),
    (r",? and ", ", "),
    # numbers
    (r"(?<=\d) ?\^?\{? ?(?:st|nd|rd|th)\b ?\}?", ""),
    (r"(?<=\d)(?<!\d{4})(?:\{,\}| )(?=\d{3}(?![\d/]))", ""),
    (r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d/.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.^_])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    *((rf"(?<=[\d)}}]) ?{word}s?\b", rf"\\times{factor}") for word, factor in FACTORS.items()),
    (r"(?<![\w.])(\d+\.?\d*|\.\d+)e([+-]?\d+)(?!\w)", r"\1\\times10^{\2}"),
    (r"^(-?[\d.]+) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{? ?([+-]?\d+) ?\}?", r"\1e\2"),
    (r"\(([\da-f]+)\) ?(?=_)", r"\1"),
    (r"(?<=\d) ?(?:in )?\(?base[ -]?(\w+)\)?$", r"_{\1}"),
    # units
    (r"\^ ?(?:\{ ?(?:\\circ|o) ?\}|\\circ|o\b)|\\(?:text)?degree(?![a-z])", "°"),
    (r"(?:°|\bdegrees?\b) ?(?:([cf])(?:elsius|ahrenheit)?\b)?", r" degree\1 "),
    (r"\\?%|\bper ?cent(?:age)?\b|\bpct\b", " percent "),
    (r"(?:\\?\$|\busd\b|\bu\.?s\.? (?=dollar))(.*)", r"\1 dollar"),
    (r"¢", " cent"),
    (r"€(.*)", r"\1 euro"),
    (r"£(.*)", r"\1 pound"),
    (r"\b(units?) ?\^ ?\{?[23]\}?", r"\1"),
    (r"\bmph\b", " mile/hour"),
    (r"\bkm?ph\b|\bkmh\b", " km/hour"),
]
SPELLINGS = [(re.compile(pattern, re.IGNORECASE), to) for pattern, to in SPELLINGS]
SPACES = re.compile(r"(?<![\da-z,])\s+|\s+(?![\da-z\s])|(?<=\d) (?=[a-z]\b)", re.IGNORECASE)

LABEL = re.compile(  # the letter of a choice
    r"\(?([A-Z]|[a-z](?= ?\)))(?: ?\)(?! ?(?:and|or)\b)(?=$| ?[\w\\]| [-.])|[.:](?= )|$) ?(.*)"
)
RELATION = re.compile(r"(\\neq|\\leq|\\geq|\\ll|\\gg|<|>)(.*)")  # without a left side
BASE = re.compile(r"(\d[\dA-F]*)_\{?(\w+)\}?")
BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASES = {name: str(base) for base, name in enumerate(BASES, 2)}
UNITS = """
    mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre,
    in inch, ft foot feet, yd yard, mi mile, s sec second, min minute, h hr hour, day, week, month,
    yr year, decade, century centuries, mg milligram, g gram, kg kilogram, oz ounce, lb pound, ton,
    ml milliliter, l liter litre, gal gallon, quart qt, pint pt, cup, tablespoon tbsp, teaspoon tsp,
    acre, hectare, dollar buck, cent, dime, nickel, quarter, penny pennies, euro, percent,
    deg degree, degreec, degreef, rad radian, sq square, cu cubic, am a.m, pm p.m"""
UNITS = {name: names.split()[0] for names in UNITS.split(",") for name in names.split()}
LONG = "|".join(sorted((name for name in UNITS if len(name) > 1), key=len, reverse=True))
SHORT = "|".join(name for name in UNITS if len(name) == 1)  # only at the end: 3m + 1 is algebra
UNIT = re.compile(
    rf"(?:/|\bper )?(?<=[\d}}). /])(?<!, )"
    rf"({LONG}|(?:{SHORT})(?=[\^{{}}23]*(?:/|$)))(?:e?s)?(?![a-z])\.?"
    r"(?:\^\{?([23])\}?)?", re.IGNORECASE,
)  # fmt: skip
CHANGES = (  # words that change the number before them: 2 or three, 5 thousandths
    "or|nor|plus|minus|power|squared|cubed|factorial|half|halves|thirds?|"
    "(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?|"
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
)
COUNTED = re.compile(  # other words after a number
    rf"(?:(?<=\d) +|(?<=[}})]))(?![a-z' -]*\b(?:{CHANGES})\b)(?=[a-z' -]*[a-z]{{3}})[a-z' -]+$",
    re.IGNORECASE,
)

# A set, an open or a closed interval. Not a union, not a set that a condition describes, and not a
# list of pairs.
BRACKETS = re.compile(r"(\\{|\(|\[)(?!.*(?:[|:]|\\mid|\\c[au]p|[)\]], ?[(\[])).*,.*(?:\\}|\)|\])")
RATIO = re.compile(r"[\d.]+(?::[\d.]+){2,}")  # math-verify would read 2:3:5 as 2/(3*5)
WORDS = re.compile(r"(?=.*[a-z]{3})[a-z ,.'-]+|0[xob][\da-f]+", re.IGNORECASE)
NUMBER = re.compile(r"-?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
ROUNDED = re.compile(r"(?=.*\.)-?[0.]*[1-9]\.?(?:\d\.?){14,}")  # such as 0.333333333333333


class Answer(NamedTuple):
    """An answer in parts; those that it lacks are empty."""

    value: str
    relation: str
    label: str
    units: set[str]
    bases: list[str]  # of numbers such as 101_2
    bracket: str  # that opens a set or a tuple


@lru_cache
def read(text: str) -> Answer:
    """The parts of an answer, after SPELLINGS."""
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    label = relation = ""
    if match := LABEL.fullmatch(text):
        label, text = match[1].upper(), match[2]
    text = SPACES.sub("", text)
    if match := RELATION.fullmatch(text):
        relation, text = match.groups()
    units = set()
    if not WORDS.fullmatch(text):
        for name, power in UNIT.findall(text):
            units |= {UNITS[name.lower()], *{"": [], "2": ["sq"], "3": ["cu"]}[power]}
        text = UNIT.sub("", text).strip() or text
        text = COUNTED.sub("", text)
    bases = [BASES.get(base.lower(), base) for _digits, base in BASE.findall(text)]
    text = BASE.sub(r"\1", text) or label
    if NUMBER.fullmatch(text):  # 27.0 becomes 27, and -0 becomes 0; prec: keep every digit
        number = Decimal(text.replace(",", "")).normalize(Context(prec=len(text)))
        text = f"{number or Decimal():f}"
    text = re.sub(r", |,(?!\d{3}(?!\d))", ", ", text)  # "3, 200" are two numbers
    bracket = BRACKETS.fullmatch(text)
    return Answer(text, relation, label, units, bases, bracket[1] if bracket else "")


def equal(answer: str, given: str) -> bool:
    """Whether what was given equals the reference answer."""
    gold, given = read(answer), read(given)
    if gold.label and given.label:
        return gold.label == given.label
    both = ((gold.units, given.units), (gold.bases, given.bases), (gold.bracket, given.bracket))
    if gold.relation != given.relation or any(a and b and a != b for a, b in both):
        return False
    if same(gold.value, given.value):  # 50 % and 50, too
        return True
    values = (
        rf"\frac{{{part.value}}}{{100}}" if "percent" in part.units else part.value
        for part in (gold, given)
    )
    return same(*values)


def same(answer: str, given: str) -> bool:
    """Whether two values are equal, in the form that `read` gives them."""
    if answer == given:
        return True
    if WORDS.fullmatch(answer) or WORDS.fullmatch(given):
        return answer.lower() == given.lower()
    if RATIO.fullmatch(answer) and RATIO.fullmatch(given):
        return False
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(given) and not ROUNDED.fullmatch(answer):
        return False
    return math_judge.ask(answer, given)


def is_readable(answer: str) -> bool:
    """Whether a reference answer has a value to compare with."""
    value = read(answer).value
    return bool(NUMBER.fullmatch(value) or (value and math_judge.ask(value, None)))
