"""
Word problems of our own, for a real language model such as SmolLM2-135M.

    text      Tom has 16 books. He buys 25 more books. He gives 5 books to a friend.
              How many books does Tom have now?
    solution  16+25=41
              41-5=36
              \\boxed{36}

No data are stored: a problem is a function of (split, index).

"heldout" problems are told in sentences of their own, the last quarter of each list below. So a
model that trained on the other splits has never seen their wording.

The teacher of the supervised start is careless: it often boxes a number of its equations that is
not the result. As in arithmetic.py, this leaves reinforcement learning something to improve.
"""

import operator
import random
import re

SPANS = {  # of a problem's numbers
    "n": range(3, 31),  # gained, lost, compared, earned or spent
    "k": range(2, 6),  # times as many, packs, things bought
    "m": range(2, 13),  # things in a pack, or the price of a thing
    "d": range(2, 6),  # children or piles to share among
    "s": range(20, 101, 10),  # the sum that is paid with
    "v": range(3, 31),  # what the hero has at first
}
RESULTS = range(2, 1000)  # the results that a step may have
CARE_PROB = 0.4  # the probability that the teacher boxes the result

TRAIN_PROBLEMS = 512
SFT_PROBLEMS = 10_000  # for supervised training
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
BOYS = """Tom Ben Sam Leo Max Adam Noah Liam Omar Paul Hugo Ivan Jonas Karim Lucas Peter Ravi Simon
Victor David"""
GIRLS = """Mia Emma Anna Lily Zoe Nina Sara Lucy Ella Maria Olga Priya Julia Laura Clara Aisha Helen
Diana Eva Yuki"""
THINGS = """books notebooks posters puzzles dolls kites mugs plates bowls vases caps belts pillows
towels blankets magnets badges rings bracelets albums calendars paintings plants clocks bells
whistles flags cups candles balls stamps forks marbles pens pencils comics shells pans pots jars"""

# The parts of a story, each with the sentences that can tell it. A is the hero, B another child,
# T the things that they have; small letters are numbers, see SPANS and EQUATIONS. {now} is "now ",
# or empty if nothing has changed since the start.
SENTENCES = {
    "has": """{A} has {v} {T}. | {A} owns {v} {T}. | {A} has collected {v} {T}. | {A} has a
collection of {v} {T}. | {A} has {v} {T} at home. | {A} has exactly {v} {T}. | {A} counts {his} {T},
and there are {v} of them. | {A} is the proud owner of {v} {T}.""",
    "boxes": """{A} has {k} boxes with {m} {T} each. | {A} has {k} boxes, and each box contains {m}
{T}. | {A} has {k} packs of {m} {T}. | {A} fills {k} bags with {m} {T} each. | {A} lays out {k} rows
of {m} {T}. | {A} owns {k} sets of {m} {T}. | {A} has {k} crates, and there are {m} {T} in every
crate. | {A} gets {k} baskets, each of them with {m} {T}.""",
    "cash": """{A} has ${v}. | {A} has saved ${v}. | There is ${v} in {A}'s wallet. | {A} starts
with ${v}. | {A} has ${v} in cash. | {A}'s savings are ${v}. | {A}'s purse contains ${v}. | {A}
begins with ${v}.""",
    "bill": """{A} buys {k} {T} for ${m} each. | One {thing} costs ${m}. {A} buys {k} of them. | {A}
buys {k} {T} that cost ${m} each. | {A} buys {k} {T} at a price of ${m} each. | Each {thing} costs
${m}, and {A} buys {k} {T}. | The price of one {thing} is ${m}, and {A} pays for {k} of them. | {A}
orders {k} {T} online at ${m} per {thing}. | At the market, {A} buys {k} {T}, and every one costs
${m}.""",
    "gain": """{He} buys {n} more {T}. | {He} finds {n} more {T}. | A friend gives {him} {n} more
{T}. | Then {he} gets another {n} {T}. | {He} receives {n} {T} as a gift. | {A} adds {n} new {T} to
{his} collection. | {His} aunt sends {him} {n} {T}. | {He} comes home with {n} extra {T}.""",
    "lose": """{He} gives {n} {T} to a friend. | {He} loses {n} {T}. | {He} sells {n} of {his} {T}.
| Then {n} of {his} {T} get lost. | {He} gives away {n} {T}. | {A} hands {n} of {his} {T} to a
teacher. | {He} donates {n} of {his} {T} to the school. | {He} mails {n} {T} to {his} cousin.""",
    "times": """Then {his} collection becomes {times} as large. | Then the number of {his} {T} is
multiplied by {k}. | {A} then makes {his} collection {times} as big. | After that, {he} collects {T}
until {he} has {times} as many. | Then the number of {his} {T} becomes {times} what it was. | Then
{he} gets so many {T} that {he} has {times} as many as just before. | Thanks to {his} uncle, {his}
stock of {T} is soon {times} as large. | With some help, {he} comes to own {times} as many {T}.""",
    "packs": """{He} buys {k} packs of {m} {T}. | Then {he} gets {k} boxes with {m} {T} each. | {He}
finds {k} bags, each with {m} {T}. | Each of {his} {k} cousins gives {him} {m} {T}. | {His} parents
buy {him} {k} sets of {m} {T}. | {He} brings home {k} bundles of {m} {T} each. | The mail brings
{him} {k} parcels that contain {m} {T} each. | {He} picks up {k} trays of {m} {T}.""",
    "earn": """{He} earns ${n}. | {He} gets ${n} for {his} birthday. | {His} grandmother gives {him}
${n}. | {He} is paid ${n} for washing cars. | {He} finds ${n} in an old coat. | {A} sells an old
bike for ${n}. | Mowing lawns brings {him} ${n}. | {He} wins a prize of ${n}.""",
    "spend": """{He} spends ${n}. | {He} buys a shirt for ${n}. | {He} pays ${n} for a ticket. |
{He} gives ${n} to {his} sister. | {He} loses ${n}. | {A} pays back ${n} that {he} owes. | A dinner
costs {him} ${n}. | {He} donates ${n} to an animal shelter.""",
    "also": """{He} also buys a lamp for ${n}. | {He} takes a jacket for ${n} as well. | Shipping
costs another ${n}. | {He} adds a game that costs ${n}. | {He} also pays ${n} for a cake. | {A} buys
shoes for ${n}, too. | In addition, {he} picks a hat for ${n}. | A chair costs {him} ${n} on
top.""",
    "now?": """How many {T} does {A} have now? | How many {T} does {he} have in the end? | What is
the number of {T} that {A} has now? | How many {T} does {A} have after that? | How many {T} are
there now in {A}'s collection? | Now how many {T} does {he} have? | How many {T} does that leave {A}
with? | {A} ends up with how many {T}?""",
    "total?": """How many {T} does {A} have altogether? | How many {T} are there in total? | What is
the total number of {T}? | How many {T} does that make?""",
    "money?": """How many dollars does {A} have now? | How much money does {he} have now? | How many
dollars does {A} have in the end? | With how much money does {A} end up?""",
    "pay?": """How many dollars does {A} pay? | How many dollars does {he} have to pay? | How much
money does {he} spend? | How many dollars must {A} hand over?""",
    "share": """{He} shares the {T} equally among {d} friends. How many does each friend get? | {He}
puts all the {T} into {d} new boxes, the same number into each. How many are in each new box? | {A}
gives all the {T} to {d} children so that each gets the same number. How many does each child get? |
{He} arranges the {T} in {d} equal rows. How many are in one row? | {A} divides the {T} into {d}
equal piles. How many are in each pile? | {He} spreads all the {T} evenly over {d} shelves. How many
are on each shelf? | {A} packs the {T} into {d} suitcases, the same number into each. What number
goes into each suitcase? | {He} hands all the {T} out fairly to {d} classmates. How many can each
take home?""",
    "change": """{He} pays with ${s}. How many dollars does {he} get back? | {He} gives the cashier
${s}. How much change does {he} get? | {A} came with ${s}. How many dollars does {he} have left? |
{He} hands over ${s}. How many dollars does the cashier return? | {He} takes ${s} out of {his}
wallet to pay. How much change does {he} receive? | {His} budget is ${s}. How many dollars of it
remain? | {A} puts ${s} on the counter. What is the change in dollars? | {He} pays out of savings of
${s}. How many dollars of the savings are left?""",
    "other": """{B} has {n} {T}. | {B} owns {n} {T}. | {A}'s friend {B} has {n} {T}. | {B}'s
collection consists of {n} {T}. | Meanwhile, {B} has {n} {T}. | {B}, a classmate, has {n} {T}. |
{A}'s neighbor {B} possesses {n} {T}. | {B} has managed to gather {n} {T}.""",
    "more": """{B} {now}has {n} more {T} than {A}. | {A} {now}has {n} fewer {T} than {B}. | {B}
{now}owns {n} more {T} than {A}. | {B} {now}has as many {T} as {A} and {n} more. | {B}'s collection
is {now}larger than {A}'s by {n} {T}. | With {n} more {T}, {A} would have as many as {B}. | {A} is
{now}{n} {T} short of what {B} has. | {B} {now}beats {A} by {n} {T}.""",
    "fewer": """{B} {now}has {n} fewer {T} than {A}. | {A} {now}has {n} more {T} than {B}. | {B}
{now}owns {n} fewer {T} than {A}. | {B}'s collection is {now}smaller than {A}'s by {n} {T}. | With
{n} more {T}, {B} would have as many as {A}. | If {A} lost {n} {T}, {he} would have as many as {B}.
| {B} is {now}{n} {T} behind {A}. | {A} is {now}ahead of {B} by {n} {T}.""",
    "multiple": """{B} {now}has {times} as many {T} as {A}. | {B} {now}owns {times} as many {T} as
{A}. | {B}'s collection is {now}{times} as large as {A}'s. | For each of {A}'s {T}, {B} {now}has
{k}. | {B} {now}has {times} the number of {T} that {A} has. | If {A} had {times} as many {T}, {he}
would have as many as {B}. | {B} {now}possesses {times} as many {T} as {A} does. | It {now}takes {k}
collections like {A}'s to equal {B}'s collection of {T}.""",
    "other?": """How many {T} does {B} have? | What is the number of {B}'s {T}? | How many {T}
belong to {B}? | Work out how many {T} {B} has.""",
    "both?": """How many {T} do they have together? | How many {T} do {A} and {B} have altogether? |
How many {T} do the two of them have in total? | What is the total number of their {T}? | How many
{T} would the two have if they combined them? | What is the sum of {A}'s {T} and {B}'s {T}?""",
    "ahead?": """How many more {T} does {A} {now}have than {B}? | How many fewer {T} does {B}
{now}have than {A}? | By how many {T} is {A} ahead of {B}? | What is {A}'s lead over {B} in {T}?""",
    "behind?": """How many more {T} does {B} {now}have than {A}? | How many fewer {T} does {A}
{now}have than {B}? | By how many {T} is {B} ahead of {A}? | What is {B}'s lead over {A} in {T}?""",
}
SENTENCES["price"] = SENTENCES["bill"]
# What each part computes. v: what the hero has; p: the previous result; other letters: SPANS.
EQUATIONS = {
    "boxes": "k*m", "bill": "k*m", "gain": "v+n", "earn": "v+n", "also": "v+n", "lose": "v-n",
    "spend": "v-n", "times": "v*k", "packs": "k*m v+p", "price": "k*m v-p", "share": "v/d",
    "change": "s-v", "more": "v+n", "fewer": "v-n", "multiple": "v*k", "both?": "v+p",
    "ahead?": "v-p", "behind?": "p-v",
}  # fmt: skip
# The kinds of stories: (openings, events, endings). An entry listed twice is drawn twice as often.
PLOTS = (
    ("has has boxes", "gain lose times packs", "now? now? now? now? share share other+both?"
     " other+ahead? other+behind? more+other? fewer+other? multiple+other? more+both? fewer+both?"
     " multiple+both?"),
    ("cash", "earn spend price", "money?"),
    ("bill", "also", "pay? change"),
)  # fmt: skip


def problem(split: str, index: int) -> tuple[str, str, str, str]:
    """Problem number `index` of a split, as (text, answer, source, solution).

    sft is for supervised training, and most of its solutions box a wrong number. train is for
    reinforcement learning and uses the same sentences. heldout is for evaluation and uses others.
    """
    rng = random.Random(f"{split}/{index}")
    plot = _plot(rng)
    lines = None
    while not lines:
        drawn = [{letter: rng.choice(span) for letter, span in SPANS.items()} for _ in plot]
        lines = _work(plot, drawn)
    answer = lines[-1].rpartition("=")[2]
    text = _tell(rng, plot, drawn, held_out=split == "heldout")
    boxed = answer
    if split == "sft" and rng.random() >= CARE_PROB:
        boxed = rng.choice([n for n in re.findall(r"\d+", " ".join(lines)) if n != answer])
    solution = "\n".join([*lines, f"\\boxed{{{boxed}}}"])
    source = f"{len(lines)} step" + "s" * (len(lines) > 1)
    return text, answer, source, solution


def _plot(rng: random.Random) -> list[str]:
    """The parts of a story: an opening, events, and an ending with a question."""
    (steps,) = rng.choices((1, 2, 3))
    (plot,) = rng.choices(PLOTS, (3, 1, 1))
    openings, possible, endings = (part.split() for part in plot)
    while True:
        events = rng.sample(possible, rng.randint(0, min(steps, len(possible))))
        plot = [rng.choice(openings), *events, *rng.choice(endings).split("+")]
        plot = ["boxes", "total?"] if plot == ["boxes", "now?"] else plot
        if sum(char in SIGNS for part in plot for char in EQUATIONS.get(part, "")) == steps:
            return plot


def _work(plot: list[str], drawn: list[dict[str, int]]) -> list[str] | None:
    """The solution's equations; None if a division is not exact or a result is not in RESULTS."""
    value = result = drawn[0]["v"]
    lines = []
    for part, numbers in zip(plot, drawn, strict=True):
        result = numbers["n"] if part == "other" else result
        for first, sign, second in EQUATIONS.get(part, "").split():
            a, b = ({"v": value, "p": result}.get(x, numbers.get(x)) for x in (first, second))
            if sign == "/" and a % b:
                return None
            result = SIGNS[sign](a, b)
            if result not in RESULTS:
                return None
            lines.append(f"{a}{sign}{b}={result}")
        if part not in ("more", "fewer", "multiple", "other"):  # their results are B's, not A's
            value = result
    return lines


def _tell(rng: random.Random, plot: list[str], drawn: list[dict], *, held_out: bool) -> str:
    """The text: one of the sentences of each part, with names and numbers filled in."""
    hero, other = rng.sample(f"{BOYS} {GIRLS}".split(), 2)
    things = rng.choice(THINGS.split())
    he = "he his him He His" if hero in BOYS.split() else "she her her She Her"
    words = dict(zip(("he", "his", "him", "He", "His"), he.split(), strict=True))
    words |= {"A": hero, "B": other, "T": things, "thing": things.removesuffix("s")}
    words["now"] = "now " if set(plot) & set(PLOTS[0][1].split()) else ""

    told = []
    for part, numbers in zip(plot, drawn, strict=True):
        sentences = SENTENCES[part].split("|")
        seen = len(sentences) * 3 // 4
        sentence = rng.choice(sentences[seen:] if held_out else sentences[:seen])
        times = "twice" if numbers["k"] == 2 else f"{numbers['k']} times"
        told.append(sentence.format(**words, **numbers, times=times))
    return " ".join(" ".join(told).split())
