"""The embedded task: problems are functions of (split, index), the teacher errs only at carries."""

import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import eval as evaluation
import models
from tasks import arithmetic


def chains(split, count=400):
    return [arithmetic.problem(split, index) for index in range(count)]


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_problems_match_their_split(split):
    """Catches a wrong answer, chains of other lengths, and a generator that keeps a state."""
    low, high = {"longer": (9, 12), "mixed": (2, 18), "mixed-heldout": (2, 18)}.get(split, (2, 8))
    problems = chains(split)
    assert problems == chains(split)
    numbers = [prompt[:-1].split("+") for prompt, _, _ in problems]
    assert {len(chain) for chain in numbers} <= set(range(low, high + 1))
    assert {low, high} <= {len(chain) for chain in numbers}
    for chain, (_, answer, _) in zip(numbers, problems, strict=True):
        assert str(sum(map(int, chain))) == answer


def test_nothing_held_out_is_trained_on():
    """Catches a held-out split that is just another seed: it would share 16 chains."""

    def prompts(*splits):
        return {prompt for split in splits for prompt, _, _ in chains(split, 4000)}

    assert not prompts("train", "mixed") & prompts("heldout", "mixed-heldout")


def test_mix_has_its_shares():
    """Catches a mix without its 35 % trivial, 30 % unsolved and 35 % learnable problems, within 4
    standard errors of 4,000 draws."""
    problems = chains("mixed", 4000)
    for source, share in (("trivial", 0.35), ("unsolved", 0.30), ("chain", 0.35)):
        found = sum(kind == source for _, _, kind in problems) / 4000
        assert abs(found - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    for prompt, answer, source in problems:
        if source == "trivial":
            assert int(answer) <= 9, "there must be no carry"
        if source == "unsolved":
            assert 13 <= prompt.count("+") + 1 <= 18


def test_teacher_forgets_carries_and_nothing_else():
    """Catches errors without a carry, carries that are always or never remembered, and workings
    that do not add up."""
    rng = random.Random(0)
    carries = forgotten = 0
    for prompt, answer, _ in chains("train"):
        assert arithmetic.worked_answer(prompt).rpartition("=")[2] == answer
        worked = arithmetic.worked_answer(prompt, 0.45, rng)
        for left, right, result in re.findall(r"(\d+)\+(\d+)=(\d+)", worked):
            wrong = int(result) != int(left) + int(right)
            carry = int(left) % 10 + int(right) > 9
            assert carry or not wrong
            assert not wrong or int(result) == int(left) + int(right) - 10
            carries += carry
            forgotten += wrong
    assert abs(forgotten / carries - 0.55) < 4 * (0.55 * 0.45 / carries) ** 0.5


@pytest.mark.parametrize(
    "text", ["7+9+5?", "naïve 你好 🙂\n\t\x00", "costs $18, <b>", " two  spaces "]
)
def test_any_text_encodes(text):
    """Catches a tokenizer that changes text: problems of all kinds are trained with it."""
    tokenizer = arithmetic.make_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids
    assert len(ids) == len(text.encode())


def test_longest_answers_fit():
    """Catches a limit on tokens that cuts the longest right answer or its end token."""
    tokenizer = arithmetic.make_tokenizer()
    for chain, split in (
        (arithmetic.CHAIN, "train"),
        (arithmetic.LONGER, "longer"),
        (arithmetic.UNSOLVED, "mixed"),
    ):
        answers = [arithmetic.worked_answer(prompt) for prompt, _, _ in chains(split)]
        longest = max(len(tokenizer.encode(answer)) + 1 for answer in answers)
        assert longest <= arithmetic.longest_completion(chain) <= longest + 40


def test_every_library_gets_the_base_model_in_float32():
    """Fails if the configuration names the type that the weights are stored in. SkyRL's server
    computes in that type, and refuses float16 on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(arithmetic.BASE)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_base_model_can_be_made_again(tmp_path):
    """Catches a recipe that no longer runs, and a folder that train.py cannot load."""
    arithmetic.make_base(tmp_path, steps=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in arithmetic.BASE.iterdir()
    }
    model, _ = models.load_policy(str(tmp_path), "cpu")
    shipped, _ = models.load_policy(str(arithmetic.BASE), "cpu")
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in shipped.named_parameters()
    }
    assert {p.dtype for p in shipped.parameters()} == {torch.float32}


@pytest.mark.slow
def test_the_made_base_is_as_good_as_the_shipped_one(tmp_path):
    """`pytest -m slow tests/test_arithmetic.py`, two minutes. Catches a shipped model that the
    recipe in the repository does not make."""
    arithmetic.make_base(tmp_path)
    accuracy = {}
    for folder in (tmp_path, arithmetic.BASE):
        options = {"data": ("arithmetic",), "k": 4, "device": "cpu"}
        (row,) = evaluation.main(evaluation.EvalConfig(model=str(folder), **options))
        accuracy[folder] = row["avg@4"]
    assert accuracy[tmp_path] == pytest.approx(accuracy[arithmetic.BASE], abs=0.04)
    assert 0.2 < accuracy[arithmetic.BASE] < 0.4
