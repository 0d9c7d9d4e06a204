"""Evaluation: the average, its interval, and the command line."""

import json
import math
import subprocess
import sys

import pytest
import torch

import eval as evaluation
import rollout
from data import InputError, Problem

nan = math.nan


def test_average_is_over_completions_then_problems():
    """Kills: pooling all completions (then 4/7), counting an unscorable one as wrong."""
    rewards = torch.tensor([[1.0, 1, 1, 0], [0, nan, nan, nan], [1, 0, nan, nan], [nan] * 4])
    assert evaluation.avg_at_k(rewards) == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert math.isnan(evaluation.avg_at_k(torch.full((2, 2), nan)))
    assert math.isnan(evaluation.as_number(None))
    with pytest.raises(ValueError, match="finite number or None, got inf"):
        evaluation.as_number(math.inf)


def test_interval_is_of_the_problems():
    """200 problems solved always or never: the interval is 1.96 binomial standard errors, k does not narrow it. Kills:
    resampling completions instead of problems."""
    solved = (torch.arange(200) % 4 == 0).double()
    low, high = evaluation.bootstrap_interval(solved[:, None].expand(200, 8))
    error = 1.96 * math.sqrt(0.25 * 0.75 / 200)
    assert low == pytest.approx(0.25 - error, abs=0.01)
    assert high == pytest.approx(0.25 + error, abs=0.01)
    assert all(map(math.isnan, evaluation.bootstrap_interval(torch.full((2, 2), nan))))


def test_batches_do_not_change_what_is_asked(make_policy):
    """Every problem gets its own gold, whatever the batch. Kills: golds repeated per batch, a lost last batch."""
    model, tokenizer = make_policy()
    problems = [Problem(str(i), str(i), "test") for i in range(7)]
    prompt_ids = [tokenizer.encode(problem.text) for problem in problems]
    asked = []

    def reward(_completion, gold):
        asked.append(gold)
        return float(gold)

    for batch_size in (1, 4, 100):
        asked.clear()
        rewards, truncated = evaluation.sample_rewards(
            model, tokenizer, problems, prompt_ids, reward, rollout.Sampling(3, [256], 257, batch_size=batch_size),
            k=2, seed=0,
        )  # fmt: skip
        assert rewards.tolist() == [[float(i)] * 2 for i in range(7)]
        assert asked == [str(i) for i in range(7) for _ in range(2)]
        assert truncated.shape == (7, 2)


def test_command_line(policy_folder):
    """Text, then one line of JSON; --prompt answers; bad values end in one line."""

    def run(*flags):
        return subprocess.run(
            [sys.executable, "eval.py", "--model", policy_folder, *flags], capture_output=True, text=True, check=False
        )

    done = run("--data", "arithmetic-longer", "--k", "2", "--problems", "5", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    text, row = done.stdout.splitlines()[-2:]
    assert "avg@2 0.000" in text
    row = json.loads(row)
    assert (row["problems"], row["avg@2"], row["ci95"], row["max_new_tokens"]) == (5, 0.0, [0.0, 0.0], 4)
    assert run("--prompt", "7+9+5?", "--max-new-tokens", "4").returncode == 0
    bad = run("--data", "nothing.jsonl")
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: data nothing.jsonl: no such file")


def test_every_flag_reaches_the_sampler(policy_folder, monkeypatch):
    """Kills: a flag of eval.py that does nothing."""
    asked, sample = [], rollout.sample

    def record(model, prompt_ids, sampling, **options):
        asked.append(sampling)
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "repetition_penalty": 1.2, "engine": "hf", "batch_size": 7}
    row = evaluation.main(evaluation.EvalConfig(policy_folder, problems=2, max_new_tokens=3, **given))
    assert given.items() <= vars(asked[0]).items()
    assert all(row[name] == given[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty"))


def test_bad_values_are_named():
    with pytest.raises(InputError, match="--k 0: must be at least 1"):
        evaluation.main(evaluation.EvalConfig("m", k=0))
    with pytest.raises(InputError, match="--max-new-tokens 0: must be at least 1"):
        evaluation.main(evaluation.EvalConfig("m", max_new_tokens=0))
    for name, value in (
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
    ):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {value}: must be"):
            evaluation.main(evaluation.EvalConfig("m", **{name: value}))
    with pytest.raises(InputError, match="--model /nowhere cannot be loaded"):
        evaluation.main(evaluation.EvalConfig("/nowhere"))
