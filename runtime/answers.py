r"""
Whether two mathematical answers are equal: first spelling, then meaning, then math-verify.

SPELLINGS turns the ways to write an answer into one. `read` takes off what stands around the value,
such as a unit: either answer may lack it, but what both have must agree. Numbers and words are
compared here, other values by math-verify: see math_judge.py.

>>> equal("3/2", "1½"), equal("3 cm", "3"), equal("3 cm", "3 km"), equal("3", "at least 3")
(True, True, False, False)
"""

# ruff: noqa: RUF001, because the table has such signs
import contextlib
import re
import unicodedata
from collections import namedtuple
from decimal import Context, Decimal
from functools import lru_cache

from runtime import math_judge

LONGEST = 500  # characters; anything longer is not an answer
OR = " (or) "  # between alternatives, in a reference answer
SYMBOLS = {
    "‐‑‒–—―−": "-", "·⋅∙": r"\\cdot ", "×": r"\\times ", "÷": "/", "±": r"\\pm ", "π": r"\\pi ",
    "∛": "√[3]", "∜": "√[4]", "∪": r"\\cup ", "⌊": r"\\lfloor ", "⌋": r"\\rfloor ",
    "⌈": r"\\lceil ", "⌉": r"\\rceil ", "′": "'", "٫": ".", "،、": ",",
}  # fmt: skip
FACTORS = {"dozen": "12", "hundred|百": "10^{2}", "thousand|千|тысяч[аи]?": "10^{3}"}
FACTORS |= {"[万萬만]": "10^{4}", "million|миллион(?:а|ов)?": "10^{6}", "[億亿억]": "10^{8}"}
FACTORS |= {"billion": "10^{9}", "trillion": "10^{12}"}
LETTER = r"(?:(?![\d_])[\w\u0300-\u036f\u0900-\u0fff])"  # with the marks of Hindi, Thai, ...
TEXT = r"\\(?:mbox|emph|underline|(?:text|math)(?:bf|rm|it|normal)?)"
SPELLINGS = [  # (pattern, replacement), in this order, without regard to case
    # Unicode: NFKC, after what it would spoil (x² to x2, 1½ to 11⁄2, 90º to 90o)
    (r"[º˚]", "°"),
    (r"[⁰¹²³⁴-⁾ⁿ]+", r"^{\g<0>}"),
    (r"[₀-₎ₐ-ₜ]+", r"_{\g<0>}"),
    (r"[ℝℤℕℚℂ]", lambda match: rf"\mathbb{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (r"[¼-¾⅐-⅞]", r" \g<0>"),
    (r"[a-z]?[^\x00-\x7f]+", lambda match: unicodedata.normalize("NFKC", match[0])),
    (r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}"),
    *((f"[{signs}]", spelling) for signs, spelling in SYMBOLS.items()),
    (r"(?<![\\a-z])sqrt\b", "√"),
    (r"√(\[\d\])?\s*(?:\(([^()]*)\)|([\d.]+|[a-z]|\\frac\{\d+\}\{\d+\}))", r"\\sqrt\1{\2\3}"),
    (r"√", r"\\sqrt"),
    (r"(?<![\\a-z])(pi|sin|cos|tan|log|ln)(?![a-z])", r"\\\1 "),
    (r"∞|\binfinity\b", r"\\infty "),
    # LaTeX
    (r",\\!\s*", "{,}"),
    (r"\\\\\[[\d.]+ ?(?:pt|em|ex)\]", r"\\\\"),  # space between the rows of a matrix
    (r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[()[\]!]|\*\*|`", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\(?:boldsymbol|bm)(?![a-z])", r"\\mathbf"),
    *[(rf"{TEXT}\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r" \1 ")] * 2,  # one may be in another
    (r"(?<!\\)\$([^$]*)(?<!\\)\$", r"\1"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\\[a-z]+|[^\\{\s])\s*(\\[a-z]+|[^\\{\s])", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\[[^]]*\])?\s*([^\W_])", r"\\sqrt\1{\2}"),
    (r"\\lbrace(?![a-z])", r"\\{"),
    (r"\\rbrace(?![a-z])", r"\\}"),
    (r"[∅Ø]|\\varnothing|\\\{\s*\\\}|\b(?:the )?empty set\b", r"\\emptyset "),
    (r"∶|\\colon(?![a-z])|(?<=\d)\s+to\s+(?=\d)", ":"),
    # relations
    (r"[≤⩽]|<=|\\(?:le|leqslant)(?![a-z])|\b(?:at most|no more than)\b", r"\\leq "),
    (r"[≥⩾]|>=|\\(?:ge|geqslant)(?![a-z])|\b(?:at least|no (?:less|fewer) than)\b", r"\\geq "),
    (r"≠|!=|\\not\s*=|\\ne(?![a-z])|^\s*not(?: equal to)?\b", r"\\neq "),
    (r"\\lt(?![a-z])|\b(?:less|fewer|smaller) than\b", "<"),
    (r"\\gt(?![a-z])|\b(?:more|greater|larger) than\b", ">"),
    (r"^(.*\d.*) or (?:more|greater|above)\s*$", r"\\geq \1"),
    (r"^(.*\d.*) or (?:less|fewer|below)\s*$", r"\\leq \1"),
    # around an answer
    (r"^\s*(?:=|≈|\\approx\b|\\sim\b|about\b|approximately\b|[a-z]\s*(?:∈|\\in\b))", ""),
    (r"^[\s*_:]+|(?:[\s.,;:*_。]|\\\\|\sfor all\s+[a-z])+$", ""),
    (r"^(?:the )?(?:correct |final )?(?=(?:option|choice|answer)\b)", ""),
    (r"^(?:option|choice|answer)\b(?: is)?[\s:]*(?=\(?(?:[a-z]\b|[\d\\-]))", ""),
    (r"^an? (?=[a-z]{3})", ""),
    (r"\s+", " "),
    (r",? and |(?<=\d)(?: (?:und|et|y|e|и) |[和と])(?=[\d\\-])", ", "),
    # numbers
    (r"(?<=\d) ?\^?\{? ?(?:st|nd|rd|th)\b ?\}?", ""),
    (r"(?<=\d)(?<!\d{4})(?:\{,\}| )(?=(?:\d\d\{,\})*\d{3}(?![\d/]))", ""),
    (r"(?<=\d)\{,\}(?=\d)", "."),
    (r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d/.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.^_])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),
    *((rf"(?<=[\d)}}]) ?(?:{word})s?(?![a-z])", rf"\\times{n}") for word, n in FACTORS.items()),
    (r"(?<![\w.])(\d+\.?\d*|\.\d+)e([+-]?\d+)(?!\w)", r"\1\\times10^{\2}"),
    (r"^(-?[\d.]+) ?(?:\\times|\\cdot|\*|x) ?10 ?\^ ?\{? ?([+-]?\d+) ?\}?", r"\1e\2"),
    (r"\(([\da-f]+)\) ?(?=_)", r"\1"),
    (r"(?<=\d) ?(?:in )?\(?base[ -]?(\w+)\)?$", r"_{\1}"),
    # units
    (r"\^ ?(?:\{ ?(?:\\circ|o) ?\}|\\circ|o\b)|\\(?:text)?degree(?![a-z])", "°"),
    (r"° ?c\b", " celsius"),
    (r"° ?f\b", " fahrenheit"),
    (r" ?° ?", " degree "),
    (r" ?(?:\\?%|\b(?:per ?cent(?:age)?|pct|prozent|процент\w*)\b) ?", " percent "),
    (r"\bu\.?s\.? ?(?=dollar|\\?\$)", ""),
    (r"\\?([$¢-¥₠-⃏]|\busd\b)(.*)", r"\2 \1"),
    (r"\bmph\b", " mile/hour"),
    (r"\bkm?ph\b|\bkmh\b", " km/hour"),
    (r" ?\bper\b ?", "/"),
    (r"\b([ap])\.m\b\.?", r"\1m"),
    (rf"\bsq(?:uare)?\b\.? ?(?!root)({LETTER}+)|(?<=[a-z]) squared\b", r"\1^2"),
    (rf"\bcu(?:bic)?\b\.? ?(?!root)({LETTER}+)|(?<=[a-z]) cubed\b", r"\1^3"),
]
SPELLINGS = [(re.compile(pattern, re.IGNORECASE), to) for pattern, to in SPELLINGS]
SPACES = re.compile(r"(?<![\da-z,])\s+|\s+(?![\da-z\s])|(?<=\d) (?=[a-z]\b)", re.IGNORECASE)

LABEL = re.compile(  # the letter of a choice
    r"\(?([A-Z]|[a-z](?= ?\)))(?: ?\)(?! ?(?:and|or)\b)(?=$| ?[\w\\]| [-.])|[.:](?= )|$) ?(.*)"
)
RELATION = re.compile(r"(\\neq|\\leq|\\geq|\\ll|\\gg|<|>)(.*)")  # without a left side
BASE = re.compile(r"(\d[\dA-F]*)_\{?(\w+)\}?")
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve"
BASES = {name: str(base) for base, name in enumerate(NUMBERS.split())}
CHANGES = (  # words that change the number before them: 2 or three, 5 thousandths
    "or|nor|plus|minus|power|squared|cubed|factorial|half|halves|thirds?|[a-z]+teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    rf"(?:{NUMBERS.replace(' ', '|')}|fif|nin|twelf|hundred|thousand|million)(?:h|ths?)?"
)
UNITS = """
    m meter, mm millimeter, cm centimeter, km kilometer, in inch, ft foot, feet foot, yd yard,
    mi mile, s second, sec second, min minute, h hour, hr hour, hrs hour, yr year, g gram,
    mg milligram, kg kilogram, oz ounce, lb pound, lbs pound, l liter, ml milliliter, gal gallon,
    deg degree, rad radian, am am, pm pm, $ dollar, usd dollar, ¢ cent, € euro, £ pound, ¥ yen"""
UNITS = dict(names.split() for names in UNITS.split(","))
SHORT = rf"(?:{'|'.join(map(re.escape, UNITS))})(?!{LETTER})"
OTHER = rf"(?=[^\W\d_a-zα-ω]){LETTER}++|[$¢-¥₠-⃏]"  # not Greek: 3α is algebra, as 3ab is
WORD = rf"(?=(?:{LETTER}{{1,2}} )*{LETTER}{{3}})(?<![\w\\])(?!(?:{CHANGES})\b){LETTER}++"
LONG = rf"(?!.\b){SHORT}|{WORD}|{OTHER}"
AND = rf"[ /*.']|-(?={LETTER}{{3}})|\\cdot|\^ ?\{{?-?\d\}}?"
AFTER = r"(?<=[\d)}\]])|(?<=\\pi)"
UNIT = re.compile(  # m, h and so on only at the end: 3m + 1 is algebra
    rf"(?:{AFTER}) ?/? ?{SHORT}(?:{AND}|{SHORT})*$|"
    rf"(?:{AFTER}|(?<=[^a-z][a-z])(?= )|(?= degree| percent)) ?/? ?(?:{LONG})(?:{AND}|{LONG})*"
    r"(?! ?\w)", re.IGNORECASE,
)  # fmt: skip
NAME = re.compile(rf"(/?) ?(?<![\\\w])({LETTER}+|{OTHER})(?: ?\^ ?\{{?(-?\d))?")
PLURAL = re.compile(r"(?<=..)(?:ies|(?<![aeiou])y|(?:er|re)s?|e?n?s?)$")  # and 1 metre, 2 meters

# A set or an interval; not a union, a set that a condition describes, or a list of pairs.
BRACKETS = re.compile(r"(\\{|\(|\[)(?!.*(?:[|:]|\\mid|\\c[au]p|[)\]], ?[(\[])).*,.*(?:\\}|\)|\])")
# What is compared as text: words, and what math-verify misreads, such as 2:3:5 as 2/(3*5).
WORDS = rf"(?=.*(?:{LETTER}{{3}}|[^\W\d_a-zα-ω]))(?:{LETTER}|[ ,.'-])+"
WORDS = re.compile(rf"{WORDS}|0[xob][\da-f]+|[\d.]+(?::[\d.]+){{2,}}", re.IGNORECASE)
WHOLE = r"\d+|\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d\d)+,\d{3}"  # 1,234,567 or, in India, 12,34,567
NUMBER = re.compile(rf"-?(?:(?:{WHOLE})(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?")
ROUNDED = re.compile(r"(?=.*\.)-?[0.]*[1-9]\.?(?:\d\.?){14,}")  # such as 0.333333333333333


# What an answer lacks is empty. share: of 50 % it is 50/100; bases: of numbers such as 101_2
Answer = namedtuple("Answer", "value share relation label units bases bracket")


@lru_cache
def read(text: str) -> Answer:
    """The parts of an answer, after SPELLINGS."""
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    label = relation = ""
    if match := LABEL.fullmatch(text):
        label, text = match[1].upper(), match[2]
    words = WORDS.fullmatch(text)
    units = set() if words else set().union(*map(names, UNIT.findall(text)))
    text = text.casefold() if words else UNIT.sub("", text)
    text = SPACES.sub("", text)
    if match := RELATION.fullmatch(text):
        relation, text = match.groups()
    bases = [BASES.get(base.lower(), base) for _digits, base in BASE.findall(text)]
    text = BASE.sub(r"\1", text) or label
    if NUMBER.fullmatch(text):  # 27.0 becomes 27, and -0 becomes 0; prec: keep every digit
        number = Decimal(text.replace(",", "")).normalize(Context(prec=len(text)))
        text = f"{number or Decimal():f}"
    text = re.sub(r", |,(?!\d{3}(?!\d))", ", ", text)  # "3, 200" are two numbers
    share = rf"\frac{{{text}}}{{100}}" if "percent" in units else text
    bracket = BRACKETS.fullmatch(text)
    return Answer(text, share, relation, label, units, bases, bracket[1] if bracket else "")


def names(phrase: str) -> set:
    """Such as {"red", "appl"}. With powers they are one thing: m s^{-2} is m/s^2, but not m/s."""
    powers = {}
    for per, name, power in NAME.findall(phrase.casefold()):
        singular = PLURAL.sub("", UNITS.get(name, name))
        powers[singular] = int(power or 1) * (-1 if per else 1)
    powers.pop("unit", None)
    return {*powers} if {*powers.values()} <= {1} else {frozenset(powers.items())}


def equal(answer: str, given: str) -> bool:
    """Whether what was given equals the reference answer, or one of its alternatives."""
    if OR in answer:
        return any(equal(gold, given) for gold in answer.split(OR))
    gold, given = read(answer), read(given)
    if gold.label and given.label:
        return gold.label == given.label
    both = ((gold.bases, given.bases), (gold.bracket, given.bracket))
    if gold.relation != given.relation or any(a and b and a != b for a, b in both):
        return False
    if not (gold.units <= given.units or given.units <= gold.units):
        return False
    return same(gold.value, given.value) or same(gold.share, given.share)


def same(answer: str, given: str) -> bool:
    """Whether two values are equal, in the form that `read` gives them."""
    if answer == given:
        return True
    if WORDS.fullmatch(answer) or WORDS.fullmatch(given):
        return False
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(given) and not ROUNDED.fullmatch(answer):
        return False
    with contextlib.suppress(TimeoutError):
        return math_judge.ask(answer, given)
    return False


def has_value(answer: str) -> bool:
    """Whether a reference answer can be read. If not, all completions would earn the same."""
    values = [read(gold).value for gold in answer.split(OR) if len(gold) <= LONGEST]
    plain = [value for value in values if NUMBER.fullmatch(value) or WORDS.fullmatch(value)]
    return bool(plain) or any(value and math_judge.ask(value, None) for value in values)
