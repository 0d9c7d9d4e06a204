"""Word problems: the solutions are true, the sentences correct, the held-out sentences unseen."""

import itertools
import operator
import random
import re
import string
from collections import Counter

import pytest

import data
import rewards
from tasks import word_problems

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NAMES = f"{word_problems.BOYS} {word_problems.GIRLS}".split()
PRONOUN = re.compile(r"\b(?:he|his|him|she|her)\b", re.IGNORECASE)
NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
THING = re.compile(rf"\b(?:{'|'.join(f'{thing}?' for thing in word_problems.THINGS.split())})\b")


def problems(split, count=5000):
    return [word_problems.problem(split, index) for index in range(count)]


def masked(text):
    """The set of a text's sentences without names, pronouns, things, numbers and "now"."""
    for pattern, mask in ((NAME, "A"), (PRONOUN, "he"), (THING, "T")):
        text = pattern.sub(mask, text)
    text = re.sub(r"twice|\d+ times", "k times", text)
    text = re.sub(r"\d+", "n", text).replace("now ", "")
    return set(re.split(r"(?<=[.?]) ", text))


@pytest.mark.parametrize(
    ("plot", "meaning"),
    [
        ("boxes total?", lambda a, b: a["k"] * a["m"]),
        ("bill pay?", lambda a, b: a["k"] * a["m"]),
        ("has gain", lambda a, b: a["v"] + b["n"]),
        ("cash earn", lambda a, b: a["v"] + b["n"]),
        ("has lose", lambda a, b: a["v"] - b["n"]),
        ("cash spend", lambda a, b: a["v"] - b["n"]),
        ("has times", lambda a, b: a["v"] * b["k"]),
        ("has packs", lambda a, b: a["v"] + b["k"] * b["m"]),
        ("cash price", lambda a, b: a["v"] - b["k"] * b["m"]),
        ("bill also", lambda a, b: a["k"] * a["m"] + b["n"]),
        ("bill change", lambda a, b: b["s"] - a["k"] * a["m"]),
        ("has share", lambda a, b: a["v"] / b["d"]),
        ("has more other?", lambda a, b, _: a["v"] + b["n"]),
        ("has fewer both?", lambda a, b, _: a["v"] + (a["v"] - b["n"])),
        ("has multiple both?", lambda a, b, _: a["v"] + a["v"] * b["k"]),
        ("has other both?", lambda a, b, _: a["v"] + b["n"]),
        ("has other ahead?", lambda a, b, _: a["v"] - b["n"]),
        ("has other behind?", lambda a, b, _: b["n"] - a["v"]),
        ("has gain lose times", lambda a, b, c, d: (a["v"] + b["n"] - c["n"]) * d["k"]),
    ],
)
def test_the_parts_by_hand(plot, meaning):
    """Catches a part whose equation is not what its sentences say, and a comparison that changes
    what the hero has."""
    for seed in range(2000):
        drawn = word_problems._draw(random.Random(seed), plot.split())
        if lines := word_problems._work(plot.split(), drawn):
            assert int(lines[-1].rpartition("=")[2]) == meaning(*drawn)
            return
    pytest.fail("no numbers found")


@pytest.mark.parametrize("split", word_problems.SPLITS)
def test_solutions_are_true(split, monkeypatch):
    """Every line holds, and the last one is the boxed answer. Catches a division that leaves a
    remainder, a negative or too large result, and a number that is neither told nor computed."""
    monkeypatch.setattr(word_problems, "CARE_PROB", 1.0)
    for text, answer, source, solution in problems(split):
        *lines, last = solution.split("\n")
        known = [*re.findall(r"\d+", text), *(["2"] if "twice" in text else [])]
        for line in lines:
            a, sign, b, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
            assert SIGNS[sign](int(a), int(b)) == int(result), solution
            assert int(result) in range(1000)
            assert {a, b} <= {*known}, (text, solution)
            known.append(result)
        assert last == f"\\boxed{{{answer}}}"
        assert answer == result
        assert source == ("1 step" if len(lines) == 1 else f"{len(lines)} steps")


def test_the_teacher_often_boxes_a_wrong_number(monkeypatch):
    """In sft alone; equations and answer are right all the same. Catches a share that is not
    CARE_PROB, a wrong number that the equations lack or that is always the same one, an answer that
    is wrong as well, and a choice that changes the problem."""
    found, wrong = problems("sft"), []
    for _, answer, _, solution in found:
        equations, _, boxed = solution.rpartition("\n")
        boxed = rewards.final_answer(boxed)
        numbers = re.findall(r"\d+", equations)
        assert boxed in numbers
        wrong += [numbers.index(boxed) / len(numbers)] if boxed != answer else []
    assert 1 - len(wrong) / len(found) == pytest.approx(word_problems.CARE_PROB, abs=0.03)
    assert min(wrong) == 0
    assert max(wrong) > 0.7
    exact = [problems(split) for split in ("train", "heldout")]
    monkeypatch.setattr(word_problems, "CARE_PROB", 1.0)
    assert [problems(split) for split in ("train", "heldout")] == exact
    for right, careless in zip(problems("sft"), found, strict=True):
        *rest, solution = careless
        assert rest == [*right[:3]]
        assert solution.rpartition("\n")[0] == right[3].rpartition("\n")[0]


def test_every_number_of_the_text_is_used(monkeypatch):
    """Catches a story whose numbers are drawn again after it is solved."""
    monkeypatch.setattr(word_problems, "CARE_PROB", 1.0)
    for text, _, _, solution in problems("sft"):
        told = set(re.findall(r"\d+", text))
        assert told <= set(re.findall(r"\d+", solution)), (text, solution)


@pytest.mark.parametrize("split", word_problems.SPLITS)
def test_solutions_earn_the_reward(split, monkeypatch):
    """Catches a solution that data's reward does not read, or that does not fit the room."""
    monkeypatch.setattr(word_problems, "CARE_PROB", 1.0)
    reward = data.reward_function("words")
    for _, answer, _, solution in problems(split, 200):
        assert reward(solution, answer) == rewards.math_reward(solution, answer) == 1.0
        assert len(solution) * 4 // 3 <= data.max_new_tokens("words")


def test_held_out_sentences_are_unseen():
    """Catches a held-out sentence that a training split tells, or that is the same but for names,
    pronouns, things and numbers; and a split that lacks some of its sentences."""
    told = {split: Counter() for split in word_problems.SPLITS}
    for split in word_problems.SPLITS:
        for text, *_ in problems(split):
            told[split].update(masked(text))
    assert set(told["sft"]) & set(told["heldout"]) == set()
    assert set(told["train"]) <= set(told["sft"])
    assert len(told["heldout"]) > 40
    assert len(told["sft"]) > 120


def test_every_part_has_sentences_for_each_split():
    """Catches a list too short to hold out a quarter of it, a repeated sentence, and a slot that
    no story fills. Operations have at least 8 sentences."""
    slots = {
        "A",
        "B",
        "T",
        "thing",
        "he",
        "his",
        "him",
        "He",
        "His",
        "now",
        "times",
        *word_problems.SPANS,
    }
    for part, text in word_problems.SENTENCES.items():
        sentences = [" ".join(sentence.split()) for sentence in text.split("|")]
        assert len(sentences) >= (4 if part.endswith("?") else 8), part
        assert len(set(sentences)) == len(sentences), part
        assert {slot for _, slot, *_ in string.Formatter().parse(text) if slot} <= slots | {"v"}


@pytest.mark.parametrize("split", word_problems.SPLITS)
def test_the_english_is_correct(split):
    """Catches "1 books", "1 times", a slot that is not filled, a doubled space, a small letter
    after a full stop, and a girl who is called he."""
    for text, *_ in problems(split, 2000):
        assert not re.search(r"\b1 \w|[{}|]|  |\$(?!\d)|[.?] [a-z]|\b(\w+) \1\b", text), text
        assert text[0].isupper()
        assert text[-1] in ".?"
        hero = NAME.search(text)[0]
        pronouns = {word.lower() for word in PRONOUN.findall(text)}
        assert pronouns <= (
            {"he", "his", "him"} if hero in word_problems.BOYS.split() else {"she", "her"}
        )
        assert len(set(NAME.findall(text))) <= 2


def test_names_and_things():
    """Catches a name of both lists, and a thing whose singular is not the word without its s."""
    assert len(set(NAMES)) == len(NAMES) == 40
    things = word_problems.THINGS.split()
    assert len(set(things)) == len(things) >= 40
    assert all(re.fullmatch(r"[a-z]+[^s]s", thing) for thing in things)
    assert not any(thing.endswith(("ies", "xes", "ches", "shes", "ves")) for thing in things)


def test_splits_are_functions_of_the_index():
    """Catches a generator that shares its state between calls, and splits that share texts."""
    again = [word_problems.problem("sft", index) for index in reversed(range(200))]
    assert again[::-1] == problems("sft", 200)
    texts = {split: {text for text, *_ in problems(split)} for split in word_problems.SPLITS}
    assert all(len(found) > 4950 for found in texts.values())
    for one, other in itertools.combinations(word_problems.SPLITS, 2):
        assert len(texts[one] & texts[other]) <= (0 if "heldout" in (one, other) else 50)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        word_problems.problem("test", 0)


@pytest.mark.parametrize("split", word_problems.SPLITS)
def test_shares_of_steps(split):
    """About a third of the problems takes one, two and three steps, and all parts are told.
    Catches plots that are drawn again until the steps fit, which prefers short ones."""
    counts = Counter(source for _, _, source, _ in problems(split))
    assert set(counts) == {"1 step", "2 steps", "3 steps"}
    assert all(abs(count / 5000 - 1 / 3) < 0.03 for count in counts.values()), counts


def test_difficulty_is_tunable(monkeypatch):
    """Catches constants that no longer decide. Also no result may leave RESULTS."""
    monkeypatch.setattr(word_problems, "STEPS", (1, 0, 0))
    monkeypatch.setattr(word_problems, "RESULTS", range(2, 100))
    found = problems("sft", 500)
    assert {source for _, _, source, _ in found} == {"1 step"}
    assert max(int(answer) for _, answer, _, _ in found) < 100
