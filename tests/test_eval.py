"""Evaluation: the average, its interval, and the command line."""

import itertools
import json
import math
import subprocess
import sys

import pytest
import torch

import data
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


def test_pass_at_k_by_enumeration():
    """The share of all choices of k among n with a right one. Kills: 1 - (1 - c/n)^k, counting an unscorable one."""
    rewards = torch.tensor([[1.0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, nan, nan]])
    for k in (1, 2, 3, 4, 5):
        shares = []
        for row in rewards.tolist():
            choices = list(itertools.combinations([score for score in row if not math.isnan(score)], k))
            if choices:
                shares.append(sum(any(choice) for choice in choices) / len(choices))
        assert evaluation.pass_at_k(rewards, k) == pytest.approx(sum(shares) / len(shares))
    assert math.isnan(evaluation.pass_at_k(rewards, 6))


def test_majority():
    """One spelling of many, ties shared, no vote for no answer. Kills: the first answer, None that wins."""
    answers = [["1,000", "7", "$1000$", "7.5"], ["3", "4", None, None], [None] * 4, ["a b", "ab", "c", "d"]]
    rewards = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [nan] * 4])
    assert evaluation.maj_at_k(rewards, answers) == pytest.approx((1 + 0.5 + 0) / 3)
    assert evaluation.maj_at_k(rewards[:1], [["7", "7", "1000", "7.0"]]) == 1.0  # the reward of the one first named


def run(*flags):
    return subprocess.run([sys.executable, "eval.py", *flags], capture_output=True, text=True, check=False)


def test_command_line(policy_folder):
    """A line of JSON a set, then the table; --prompt answers; bad values end in one line."""
    model = ("--model", policy_folder, "--max-new-tokens", "4")
    done = run(*model, "--data", "arithmetic-longer", "arithmetic", "--k", "2", "--problems", "5")
    assert done.returncode == 0, done.stderr
    first, second, head, *table = done.stdout.splitlines()
    assert [json.loads(line)["data"] for line in (first, second)] == ["arithmetic-longer", "arithmetic"]
    row = json.loads(first)
    assert (row["problems"], row["avg@2"], row["ci95"], row["max_new_tokens"]) == (5, 0.0, [0.0, 0.0], 4)
    assert head.split()[:3] == ["set", "problems", "avg@2"]
    assert [line.split()[0] for line in table] == ["arithmetic-longer", "arithmetic", "average"]
    assert run(*model, "--prompt", "7+9+5?").returncode == 0
    bad = run(*model, "--data", "nothing.jsonl")
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: data nothing.jsonl: no such file")


def test_check_golds(tmp_path):
    """Lists what fails, counts the others, exits 0. Kills: a check that a gold's own text passes."""
    golds = ["\\frac{1}{2}", "", None, "1,200", " ", "so $x$ is \\boxed{7}"]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"problem": f"p{n}", "answer": gold}) + "\n" for n, gold in enumerate(golds)))
    done = run("--check-golds", "--data", str(path))
    assert done.returncode == 0, done.stderr
    *listed, last = done.stdout.splitlines()
    assert last == "verified 3 of 6"
    assert [line.split("row ")[1][0] for line in listed] == ["2", "3", "5"]


def test_a_stopped_evaluation_goes_on(policy_folder, tmp_path, monkeypatch):
    """Killed within the second of three batches: the same rows as without, the first not drawn again. Kills: a seed
    by how much is left, half a batch that is kept, completions of another model taken for this one's."""
    flags = {"k": 2, "problems": 5, "max_new_tokens": 3, "batch_size": 4}

    def go(folder, **changes):
        return evaluation.main(evaluation.EvalConfig(policy_folder, out_dir=str(tmp_path / folder), **flags | changes))

    whole = go("whole")
    text = (tmp_path / "whole" / "arithmetic.jsonl").read_text()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "part" / "arithmetic.jsonl").write_text("\n".join(text.split("\n")[:3]) + '\n{"index": 3, "pro')
    drawn, seeds, sample = [], [], rollout.sample

    def record(model, prompt_ids, sampling, **options):
        drawn.append(len(prompt_ids))
        seeds.append(options["seed"])
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    assert go("part") == whole
    assert len(set(seeds)) == 2, "two batches are not two draws of the same"
    assert (tmp_path / "part" / "arithmetic.jsonl").read_text() == text
    assert drawn == [2, 1]
    assert go("part") == whole
    assert go("part", problems=3)[0]["problems"] == 3
    assert drawn == [2, 1]
    assert (tmp_path / "part" / "arithmetic.jsonl").read_text() == text
    with pytest.raises(InputError, match=r"has temperature 1\.0, not 0\.5: give what it has, or another folder"):
        go("part", temperature=0.5)
    problems = [Problem(json.loads(line)["problem"], "another gold", "other") for line in text.splitlines()]
    monkeypatch.setattr(data, "eval_problems", lambda *words, **kw: problems)
    with pytest.raises(InputError, match="holds other problems or golds than arithmetic: use another --out-dir"):
        go("part")


def test_paired_comparison(tmp_path, capsys):
    """The interval is that of the differences. Kills: two intervals instead of one, pairs of different problems."""
    for folder, shift in (("old", 0), ("new", 1)):
        rows = [
            {"index": n, "problem": f"p{n}", "gold": "1", "rewards": [float(n % 10 < 5 + shift), float(n % 10 < 5)]}
            for n in range(100)
        ]
        (tmp_path / folder).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows[:: 1 if shift else -1][shift:]]
        (tmp_path / folder / "mine.jsonl").write_text("".join(lines))
    (row,) = evaluation.compare(str(tmp_path / "old"), str(tmp_path / "new"))
    assert row["problems"] == 99
    assert row["difference"] == pytest.approx(10 / 2 / 99)
    assert 0 < row["ci95"][0] < row["difference"] < row["ci95"][1] < 0.1
    assert "+0.051" in capsys.readouterr().out
    with pytest.raises(InputError, match="no set in common"):
        evaluation.compare(str(tmp_path / "old"), str(tmp_path))


def test_every_flag_reaches_the_sampler(policy_folder, monkeypatch):
    """Kills: a flag of eval.py that does nothing."""
    asked, sample = [], rollout.sample

    def record(model, prompt_ids, sampling, **options):
        asked.append(sampling)
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "repetition_penalty": 1.2, "engine": "hf", "batch_size": 7}
    (row,) = evaluation.main(evaluation.EvalConfig(policy_folder, problems=2, max_new_tokens=3, **given))
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
