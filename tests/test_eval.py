"""Evaluation: averages, their intervals, stored completions, and the command line."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
import models
import rollout
from engines import hf
from eval import EvalConfig
from runtime import InputError, log

nan = math.nan


def write(path, rows):
    log.append_rows(path, rows)
    return str(path)


@pytest.fixture
def sampled(monkeypatch):
    """What each call of rollout.sample gets: model, prompts, how to sample, options."""
    calls, sample = [], rollout.sample

    def record(model, prompt_ids, sampling, **options):
        calls.append((model, prompt_ids, sampling, options))
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    return calls


# ---------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("P", "first", "second"), [(30, 0, 0.05), (300, 0, 0.95), (300, 0.02, 0.05)]
)
def test_intervals_cover(P, first, second):
    """2,000 sets of P problems, of which two models can solve these shares, always or half of the
    time; where the first solves none, the interval is of the second. Catches the percentile
    bootstrap and Student's t (0.69 of 30 problems at 0.05), and completions that are resampled."""
    generator = torch.Generator().manual_seed(P)
    rates = torch.tensor([1.0, 0.5]).double()[torch.randint(2, (2, 2000, P), generator=generator)]
    can = torch.rand(2, 2000, P, generator=generator) < torch.tensor([first, second])[:, None, None]
    chances = (can * rates)[..., None].expand(-1, -1, -1, 8)
    before, after = torch.bernoulli(chances, generator=generator).mean(dim=3)
    truth, low = 0.75 * (second - first), -1.0 if first else 0.0
    ends = torch.tensor([evaluation.wilson_interval(x, low) for x in after - before])
    covered = ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).double().mean()
    assert 0.93 <= covered <= 1.0
    assert P == 30 or covered < 0.97, "too wide"


def test_intervals_by_hand():
    """Fails if a problem without a score counts, or if less spread does not narrow it."""
    interval = evaluation.wilson_interval
    solved = (torch.arange(50) < 7).double()
    assert interval(solved) == pytest.approx((0.0695, 0.2619), abs=1e-4)
    assert interval(torch.cat([solved, torch.full((9,), nan)])) == interval(solved)
    assert interval(torch.zeros(30), low=-1.0) == pytest.approx((-0.1135, 0.1135), abs=1e-4)
    means = 0.5 + 0.01 * solved  # of many completions: within 1.96 standard errors
    error = 1.96 * means.std(correction=0).item() / math.sqrt(50)
    assert interval(means) == pytest.approx((0.5014 - error, 0.5014 + error), abs=1e-5)


def test_pass_at_k_by_enumeration():
    """Of all choices of k out of n. Catches 1 - (1 - c/n)^k."""
    scorable = [[1.0, 0, 0, 0, 1], [0.0] * 5, [1.0] * 5, [1.0, 0, 0]]
    rewards = torch.tensor([row + [nan] * (5 - len(row)) for row in scorable])
    for k in (1, 2, 3, 4, 5):
        chances = []
        for row in scorable:
            if choices := list(itertools.combinations(row, k)):
                chances.append(sum(map(any, choices)) / len(choices))
        assert evaluation.pass_at_k(rewards, k) == pytest.approx(sum(chances) / len(chances))
    assert math.isnan(evaluation.pass_at_k(rewards, 6))
    assert evaluation.pass_at_k(torch.tensor([[0.5, 1.0]]), 1) == 0.5, "half a point is not right"


def test_figures_by_hand():
    """Fails if completions are pooled, or an unscorable one counts as wrong."""
    rows = [
        {"rewards": [1, 0, None], "lengths": [2, 3, 9], "truncated": [False, False, True]},
        {"rewards": [0, 0, 0], "lengths": [9, 9, 4], "truncated": [True, True, False]},
    ]
    found = evaluation.figures(rows)
    low, high = found.pop("wilson95")
    assert 0 <= low < high
    assert found == {
        "problems": 2, "k": 3, "avg@3": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@3": 0.0,
        "unscorable": 1, "truncated_share": 0.5, "mean_length": 6.0,
    }  # fmt: skip
    partial = evaluation.figures([rows[0] | {"rewards": [0.5, 2.0, 2.0]}])
    assert partial["avg@3"] == 1.5
    assert not any(name.startswith("pass@") for name in partial)


def stored(folder, rows):
    """An evaluation's folder with these rows of a set."""
    folder.mkdir()
    evaluation.open_folder(str(folder), {"weights": 1})
    names = ("problem", "answer", "rewards")
    log.write_rows(folder / "mine.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    return str(folder)


# A problem, its answer, rewards. The second model had no room for the first problem.
OLD = [("a", 1, [1, 1]), ("b", 1, [0, 1]), ("b", 1, [0, None]), ("c", 1, [1]), ("d", 1, [None])]
NEW = [("b", 2, [1, 1]), ("b", 1, [1, 1]), ("b", 1, [0, 0]), ("c", 1, [None, 1]), ("d", 1, [1])]


def test_paired_comparison(tmp_path):
    """Catches pairs by row number, chats that end alike but differ in their answers, and an
    interval that is not of the differences."""
    old, new = stored(tmp_path / "old", OLD), stored(tmp_path / "new", NEW)
    (row,) = evaluation.compare(old, new)
    low, high = evaluation.wilson_interval(torch.tensor([0.5, 0.0, 0.0]), low=-1.0)
    assert row == {
        "set": "mine", "problems": 3, "first": old, "second": new, "means": [0.5, 0.6667],
        "difference": 0.1667, "wilson95": [round(low, 4), round(high, 4)],
    }  # fmt: skip
    with pytest.raises(InputError, match="no problem in common"):
        evaluation.compare(old, stored(tmp_path / "other", []))


# ---------------------------------------------------------------------------- the command line


def test_every_flag_reaches_the_sampler(policy_folder, sampled):
    """Catches a flag of eval.py that does nothing, and weights in another type than --dtype."""
    logged = {"temperature": 0.5, "top_k": 3, "top_p": 0.7}
    given = {**logged, "batch_size": 7}
    common = {"problems": 2, "max_new_tokens": 3, "dtype": "bfloat16"}
    (row,) = evaluation.main(EvalConfig(policy_folder, engine="hf", **common, **given))
    model, _prompts, sampling, _options = sampled[0]
    assert given.items() <= vars(sampling).items()
    assert sampling.engine is hf
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logged.items() <= row.items()


def quarter(completion, answer):
    return 0.25


def test_a_program_with_its_own_reward(policy_folder, monkeypatch, capsys):
    """The README's. The table comes before the JSON. Catches a set that is left out in silence."""
    flags = ["--model", policy_folder, "--problems", "2", "--k", "1", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", ["mine.py", *flags])
    evaluation.cli(quarter)
    table, line = capsys.readouterr().out.splitlines()
    assert re.match(r"arithmetic +2 problems +avg@1 0\.250", table)
    assert (json.loads(line)["avg@1"], json.loads(line)["reward"]) == (0.25, "quarter")
    monkeypatch.setattr(sys, "argv", ["mine.py", *flags, "--data", "a", "b", "--data=c"])
    with pytest.raises(SystemExit):
        evaluation.cli(quarter)
    assert capsys.readouterr().err.startswith("error: --data is there twice")


# ---------------------------------------------------------------------------- sample and score


SUMS = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(12)]


@pytest.fixture
def evaluate(policy_folder, tmp_path):
    """Evaluate in a folder, by default five sums; returns the rows of each file there."""

    def go(folder, *files, reward=None, **changes):
        options = {"k": 2, "max_new_tokens": 3, "batch_size": 4}
        options |= {"data": files} if files else {"problems": 5}
        cfg = EvalConfig(policy_folder, out_dir=str(tmp_path / folder), **(options | changes))
        evaluation.main(cfg, reward=reward)
        return {path.name: log.read_rows(path) for path in (tmp_path / folder).glob("*.jsonl")}

    return go


@pytest.mark.parametrize("batch_size", [1, 4])
def test_batches_do_not_mix_up_problems(evaluate, tmp_path, batch_size):
    """Fails if a batch gets another one's answers, or if the last one is lost."""
    rows = [{"problem": "+" * n, "answer": n} for n in range(1, 8)]
    path = write(tmp_path / "mine.jsonl", [*rows, {"problem": "p", "answer": "none"}])
    reward = lambda _completion, answer: None if answer == "none" else float(answer)
    ((*stored, last),) = evaluate("evals", path, reward=reward, batch_size=batch_size).values()
    assert [row["index"] for row in stored] == [*range(7)]
    assert [row["problem"] for row in stored] == ["+" * n for n in range(1, 8)]
    assert [row["rewards"] for row in stored] == [[n, n] for n in range(1, 8)]
    assert last["rewards"] == [None, None]


def test_seeds_and_rooms_of_sets(policy_folder, sampled):
    """Fails if sets or seeds share their draws, or a set gets the room of another one."""
    names = ("arithmetic", "arithmetic-longer")
    rooms = [*map(data.max_new_tokens, names)]
    for seed in (0, 1):
        cfg = EvalConfig(policy_folder, data=names, problems=1, seed=seed)
        table = evaluation.main(replace(cfg, k=3, batch_size=2))
        assert [row["max_new_tokens"] for row in table] == rooms
        evaluation.main(replace(cfg, prompt="7+9+5?", max_new_tokens=2))
    seeds = [options["seed"] for *_, options in sampled]
    assert [options["group_size"] for *_, options in sampled] == [3, 3, 1] * 2
    assert [sampling.max_new_tokens for _, _, sampling, _ in sampled] == [*rooms, 2] * 2
    assert rooms[0] != rooms[1]
    assert len(set(seeds)) == len(seeds) == 6


# ---------------------------------------------------------------------------- stored completions


def test_only_what_a_file_holds_counts(evaluate, tmp_path, monkeypatch):
    """Catches a set that takes over another one's completions, and a draw by the path or by the
    place of a row."""
    (tmp_path / "again").mkdir()
    first = write(tmp_path / "first.jsonl", [*SUMS, SUMS[3]])
    again = write(tmp_path / "again" / "first.jsonl", [SUMS[3], *SUMS[::-1]])
    found = evaluate("both", first, again)
    assert len(found) == 2
    assert all(re.fullmatch(r"first-[0-9a-f]{16}\.jsonl", name) for name in found)
    assert evaluate("both", again, first, problems=3).keys() == found.keys()
    monkeypatch.chdir(tmp_path)
    ((name, rows),) = evaluate("other", "first.jsonl").items()
    assert rows == found[name], "by whatever path"
    said = [sorted((row["problem"], row["completions"]) for row in rows) for rows in found.values()]
    assert said[0] == said[1]
    one, other = (completions for problem, completions in said[0] if problem == "3+1?")
    assert one != other


def test_an_interrupted_evaluation_continues(evaluate, tmp_path, sampled):
    """Killed in the second of three batches, it does not sample the first one again."""
    whole = evaluate("part")
    path = tmp_path / "part" / "arithmetic.jsonl"
    half = path.read_text().split("\n")[:3]
    path.write_text("\n".join(half) + '\n{"index": 3, "pro')
    sampled.clear()
    assert evaluate("part") == whole
    assert [options["keys"] for *_, options in sampled] == [range(3, 4), range(4, 5)]


def test_stored_completions_are_scored_again(evaluate, tmp_path, sampled):
    """Catches scores of another reward, and completions that are lost or sampled again."""
    (rows,) = evaluate("evals", reward=quarter).values()
    sampled.clear()
    (again,) = evaluate("evals", reward=lambda _completion, answer: int(answer)).values()
    for row, scored in zip(rows, again, strict=True):
        assert row["rewards"] == [0.25, 0.25]
        assert scored == row | {"rewards": [int(row["answer"])] * 2}
    (fewer,) = evaluate("evals", reward=quarter, problems=3).values()
    assert [row["rewards"] for row in fewer[3:]] == [[None, None]] * 2
    assert [row["completions"] for row in fewer] == [row["completions"] for row in rows]
    assert log.read_json(tmp_path / "evals" / "config.json")["reward"] == "quarter"
    assert not sampled


def test_a_reward_that_cannot_be_called_samples_nothing(evaluate, sampled):
    """Catches a wrong signature that is found only after an hour of sampling."""
    with pytest.raises(InputError, match=r"the reward .* cannot be called"):
        evaluate("evals", reward=lambda completion: 1.0)
    assert not sampled


def test_a_reward_that_raises_loses_no_completion(evaluate, tmp_path, sampled):
    """Catches a batch that is stored only after it was scored."""
    with pytest.raises(ZeroDivisionError):
        evaluate("evals", reward=lambda *_: 1 / 0)
    stored = log.read_rows(tmp_path / "evals" / "arithmetic.jsonl")
    assert [row["rewards"] for row in stored] == [[None, None]] * 2
    (rows,) = evaluate("evals", reward=quarter).values()
    assert [row["completions"] for row in rows[:2]] == [row["completions"] for row in stored]
    assert [options["keys"] for *_, options in sampled] == [range(2), range(2, 4), range(4, 5)]


def test_completions_of_other_settings_are_refused(evaluate, policy_folder, monkeypatch):
    """Also if the chat template was corrected, because then the prompts are others."""
    evaluate("evals")
    with pytest.raises(InputError, match="evals has seed 0, not 1: use the"):
        evaluate("evals", seed=1)
    template = Path(policy_folder) / "chat_template.jinja"
    template.write_text("{% for m in messages %}9+{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match=r"arithmetic\.jsonl has completions of other prompts"):
        evaluate("evals")
    monkeypatch.setattr(models, "fingerprint", lambda _weights: 1)
    with pytest.raises(InputError, match=r"evals has weights .*, not 1: use"):
        evaluate("evals")
