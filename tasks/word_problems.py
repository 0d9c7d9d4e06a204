"""
Word problems of our own, for a real language model such as SmolLM2-135M.

    text      Tom has 16 books. He buys 25 more books. He gives 5 books to a friend.
              How many books does Tom have now?
    solution  16+25=41
              41-5=36
              \\boxed{36}

No problem is stored: each is a function of (split, index).

"heldout" problems are told in sentences of their own, the last quarter of each list in
sentences.json. So a model that trained on the other splits has never seen their wording.

The teacher of the supervised start is careless: it often boxes a number of its equations that is
not the result. As in arithmetic.py, this leaves reinforcement learning something to improve.
"""

import json
import operator
import random
import re
from pathlib import Path

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
SENTENCES = json.loads(Path(__file__).with_name("sentences.json").read_text("utf-8"))
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
        sentences = SENTENCES[part]
        seen = len(sentences) * 3 // 4
        sentence = rng.choice(sentences[seen:] if held_out else sentences[:seen])
        times = "twice" if numbers["k"] == 2 else f"{numbers['k']} times"
        told.append(sentence.format(**words, **numbers, times=times))
    return " ".join(told)
