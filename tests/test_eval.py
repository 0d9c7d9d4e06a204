"""Evaluation: averages, their intervals, and the command line."""

import ast
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
import rollout
from data import Problem
from rewards import as_number
from runtime import InputError

ROOT = Path(__file__).resolve().parents[1]
nan = math.nan


def test_average_is_over_completions_then_problems():
    """Fails if all completions are pooled (then 4/7), or an unscorable one counts as wrong."""
    rewards = torch.tensor([[1.0, 1, 1, 0], [0, nan, nan, nan], [1, 0, nan, nan], [nan] * 4])
    assert evaluation.avg_at_k(rewards) == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert math.isnan(evaluation.avg_at_k(torch.full((2, 2), nan)))
    assert math.isnan(as_number(None))


def test_interval_is_over_problems():
    """200 problems, each solved always or never: the interval is 1.96 binomial standard errors,
    which a larger k does not narrow. Fails if completions are resampled instead of problems."""
    solved = (torch.arange(200) % 4 == 0).double()
    low, high = evaluation.bootstrap_interval(solved[:, None].expand(200, 8))
    error = 1.96 * math.sqrt(0.25 * 0.75 / 200)
    assert low == pytest.approx(0.25 - error, abs=0.01)
    assert high == pytest.approx(0.25 + error, abs=0.01)
    unscorable = torch.full((50, 8), nan)
    more = torch.cat([solved[:, None].expand(200, 8), unscorable])
    assert evaluation.bootstrap_interval(more) == (low, high), "they are not wrong"
    assert all(map(math.isnan, evaluation.bootstrap_interval(unscorable)))


def test_batches_do_not_mix_up_golds(make_policy):
    """Every problem gets its own gold, whatever the batch size.

    Fails if golds are repeated in every batch, or if the last batch is lost.
    """
    model, tokenizer = make_policy()
    problems = [Problem(str(i), str(i), "test") for i in range(7)]
    prompt_ids = [tokenizer.encode(problem.text) for problem in problems]
    golds = []

    def reward(_completion, gold):
        golds.append(gold)
        return float(gold)

    for batch_size in (1, 4, 100):
        golds.clear()
        sampling = rollout.Sampling(3, [256], 257, batch_size=batch_size)
        args = (model, tokenizer, problems, prompt_ids, reward, sampling)
        rewards, truncated = evaluation.sample_rewards(*args, k=2, seed=0)
        assert rewards.tolist() == [[float(i)] * 2 for i in range(7)]
        assert golds == [str(i) for i in range(7) for _ in range(2)]
        assert truncated.shape == (7, 2)


def test_pass_at_k_by_enumeration():
    """The share of all choices of k out of n that include a right completion.

    Catches 1 - (1 - c/n)^k, and an unscorable completion that is counted.
    """
    rewards = torch.tensor([[1.0, 0, 0, 0, 1], [0] * 5, [1] * 5, [1, 0, 0, nan, nan]])
    for k in (1, 2, 3, 4, 5):
        shares = []
        for row in rewards.tolist():
            scorable = [score for score in row if not math.isnan(score)]
            choices = list(itertools.combinations(scorable, k))
            if choices:
                shares.append(sum(any(choice) for choice in choices) / len(choices))
        assert evaluation.pass_at_k(rewards, k) == pytest.approx(sum(shares) / len(shares))
    assert math.isnan(evaluation.pass_at_k(rewards, 6))
    assert evaluation.pass_at_k(torch.tensor([[0.5, 1.0]]), 1) == 0.5, "half a point is not right"


def test_majority():
    """Spellings of one answer vote together, ties share the reward, and no answer is no vote.

    Catches a vote of the first answer only, and None as the winner.
    """
    answers = [
        ["1,000", "7", "$1000$", "7.5"],
        ["3", "4", None, None],
        [None] * 4,
        ["a b", "ab", "c", "d"],
    ]
    rewards = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [nan] * 4])
    assert evaluation.maj_at_k(rewards, answers) == pytest.approx((1 + 0.5 + 0) / 3)
    spellings = [["7", "7", "1000", "7.0"]]
    assert evaluation.maj_at_k(rewards[:1], spellings) == 1.0  # the first spelling's reward


def test_figures_by_hand(capsys):
    """Fails if a share or a mean is of problems instead of completions, if pass@k lacks k, or if
    the table's average of two sets is their sum."""
    rows = [
        {
            "rewards": [1.0, 0.0, None], "answers": ["7", "8", None], "lengths": [2, 3, 9],
            "truncated": [False, False, True],
        },
        {
            "rewards": [0.0, 0.0, 0.0], "answers": ["1", "2", "2"], "lengths": [9, 9, 4],
            "truncated": [True, True, False],
        },
    ]  # fmt: skip
    found = evaluation.figures(rows)
    evaluation.print_table([found | {"data": "one"}, found | {"data": "two", "avg@3": 0.75}], k=3)
    assert capsys.readouterr().out.split()[-2:] == ["average", "0.500"]
    assert 0 <= found["ci95"][0] < found.pop("ci95")[1]
    assert found == {
        "problems": 2, "k": 3, "avg@3": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@3": 0.0,
        "maj@3": 0.25, "unscorable": 1, "truncated_share": 0.5, "mean_length": 6.0,
    }  # fmt: skip


@pytest.fixture
def command(monkeypatch, capsys):
    """Run eval.py as the main program; returns (exit code, output, errors)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["eval.py", *args])
        code = 0
        try:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def test_command_line(policy_folder):
    """One line of JSON per set, then the table."""
    args = ["--model", policy_folder, "--max-new-tokens", "4", "--k", "2", "--problems", "5"]
    program = [sys.executable, "eval.py", *args, "--data", "arithmetic-longer", "arithmetic"]
    out = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    first, second, head, *table = out.splitlines()
    names = [json.loads(line)["data"] for line in (first, second)]
    assert names == ["arithmetic-longer", "arithmetic"]
    row = json.loads(first)
    assert (row["problems"], row["avg@2"], row["ci95"]) == (5, 0.0, [0.0, 0.0])
    assert row["max_new_tokens"] == 4
    assert head.split()[:3] == ["set", "problems", "avg@2"]
    assert [line.split()[0] for line in table] == ["arithmetic-longer", "arithmetic", "average"]


def test_prompt_and_errors(policy_folder, command):
    """--prompt prints an answer. A bad value ends in one line and exit code 2."""
    model = ("--model", policy_folder, "--max-new-tokens", "4")
    code, out, _ = command(*model, "--prompt", "7+9+5?")
    assert code == 0
    assert out.endswith("\n")
    code, _, errors = command(*model, "--data", "nothing.jsonl")
    assert code == 2
    assert errors.startswith("error: data nothing.jsonl: no such file")


def test_help_has_a_sentence_for_every_flag(command, monkeypatch):
    """Fails if a flag has no docstring, or if --help cuts it off."""
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = command("--help")
    assert code == 0
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    tree = ast.parse((ROOT / "eval.py").read_text())
    body = next(node for node in tree.body if getattr(node, "name", "") == "EvalConfig").body
    for field, docstring in zip(body[::2], body[1::2], strict=True):
        assert f"--{field.target.id.replace('_', '-')}" in shown
        assert docstring.value.value in shown


def test_check_golds(tmp_path, command):
    """Lists the golds that fail, counts the others and exits with 0.

    Fails if a gold passes just because its text equals itself.
    """
    golds = ["\\frac{1}{2}", "", None, "1,200", " ", "so $x$ is \\boxed{7}"]
    rows = [{"problem": f"p{n}", "answer": gold} for n, gold in enumerate(golds)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = command("--check-golds", "--data", str(path))
    assert code == 0
    *listed, last = out.splitlines()
    assert last == "verified 3 of 6"
    assert [line.split("row ")[1][0] for line in listed] == ["2", "3", "5"]


def test_an_interrupted_evaluation_continues(policy_folder, tmp_path, monkeypatch):
    """Killed within the second of three batches, it ends with the rows of a whole evaluation, and
    does not sample the first batch again.

    Fails if a seed depends on how much is left, if half a batch is kept, or if the completions of
    another model are taken for this one's.
    """
    options = {"k": 2, "problems": 5, "max_new_tokens": 3, "batch_size": 4}

    def go(folder, **changes):
        changes = options | changes
        cfg = evaluation.EvalConfig(policy_folder, out_dir=str(tmp_path / folder), **changes)
        return evaluation.main(cfg)

    whole = go("whole")
    text = (tmp_path / "whole" / "arithmetic.jsonl").read_text()
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    half = "\n".join(text.split("\n")[:3]) + '\n{"index": 3, "pro'
    (part / "arithmetic.jsonl").write_text(half)
    sampled, keys = [], []
    sample = rollout.sample

    def record(model, prompt_ids, sampling, **options):
        sampled.append(len(prompt_ids))
        keys.extend(options["keys"])
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    assert go("part") == whole
    assert keys == [2, 3, 4], "the places of the problems, so no two are the same draw"
    assert (part / "arithmetic.jsonl").read_text() == text
    assert sampled == [2, 1]
    assert go("part") == whole
    assert go("part", problems=3)[0]["problems"] == 3
    assert sampled == [2, 1]
    assert (part / "arithmetic.jsonl").read_text() == text
    message = r"has temperature 1\.0, not 0\.5: use the same value, or another folder"
    with pytest.raises(InputError, match=message):
        go("part", temperature=0.5)
    with pytest.raises(InputError, match="has seed 0, not 1"):
        go("part", seed=1)
    texts = [json.loads(line)["problem"] for line in text.splitlines()]
    others = [Problem(text, "another gold", "other") for text in texts]
    monkeypatch.setattr(data, "eval_problems", lambda *args, **options: others)
    message = "has other problems or golds than arithmetic: use another --out-dir"
    with pytest.raises(InputError, match=message):
        go("part")


def test_settings_of_a_folder(tmp_path):
    """Fails if weights that were trained a little pass for the same, or other threads' rounding for
    others."""
    folder = str(tmp_path / "evals")
    evaluation.open_folder(folder, {"weights": 2.5, "seed": 0})
    evaluation.open_folder(folder, {"weights": 2.5 * (1 + 1e-12), "seed": 0})
    for name, other in (("weights", 2.5 * (1 + 1e-6)), ("seed", 1)):
        settings = {"weights": 2.5, "seed": 0} | {name: other}
        with pytest.raises(InputError, match=f"--out-dir {folder} has {name} .*, not {other}"):
            evaluation.open_folder(folder, settings)


def test_seeds_and_rooms_of_sets(policy_folder, monkeypatch):
    """Fails if two sets or two --seed share their draws, if --prompt ignores --seed, if a set gets
    the room of another one, or if a batch has no room for the k completions of a problem."""
    calls, sample = [], rollout.sample

    def record(model, prompt_ids, sampling, *, seed, **options):
        calls.append((sampling.max_new_tokens, seed))
        return sample(model, prompt_ids, sampling, seed=seed, **options)

    monkeypatch.setattr(rollout, "sample", record)
    names = ("arithmetic", "arithmetic-longer")
    for seed in (0, 1):
        cfg = evaluation.EvalConfig(policy_folder, data=names, problems=1, seed=seed)
        evaluation.main(replace(cfg, k=3, batch_size=2))
        evaluation.main(replace(cfg, prompt="7+9+5?", max_new_tokens=2))
    rooms, seeds = zip(*calls, strict=True)
    assert rooms == (*map(data.max_new_tokens, names), 2) * 2
    assert rooms[0] != rooms[1]
    assert len(set(seeds)) == len(seeds) == 6


def test_a_given_reward_is_used(policy_folder, tmp_path, monkeypatch):
    """Fails if the default reward scores completions, or selects golds, although one is given."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"problem": "p", "answer": ""}\n{"problem": "q", "answer": "none"}\n')

    def reward(_completion, gold):
        return None if gold == "none" else 0.5

    cfg = evaluation.EvalConfig(policy_folder, data=(str(path),), k=2, max_new_tokens=3)
    (row,) = evaluation.main(cfg, reward=reward)
    assert (row["problems"], row["avg@2"]) == (1, 0.5)


def test_held_out_rows_that_fit(policy_folder, tmp_path, capsys):
    """Fails if --held-out evaluates on training rows, or if a prompt has no room to be answered."""
    path = tmp_path / "mine.jsonl"
    rows = [{"problem": f"p{n}", "answer": "1"} for n in range(60)]
    rows[-1]["problem"] = "x" * (512 - len(data.INSTRUCTION) - 4)  # of 512 places; two newlines
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data": (str(path),), "held_out": True, "k": 1, "out_dir": str(tmp_path / "evals")}
    for room, held_out in ((2, 3), (3, 2)):
        cfg = evaluation.EvalConfig(policy_folder, max_new_tokens=room, **options)
        (row,) = evaluation.main(replace(cfg, out_dir=f"{cfg.out_dir}{room}"))
        assert row["problems"] == held_out
    assert "dropped 1 of 3 prompts: longer than 509 tokens" in capsys.readouterr().out
    stored = (tmp_path / "evals3" / "mine.jsonl").read_text().splitlines()
    assert [json.loads(line)["problem"] for line in stored] == ["p57", "p58"]


def test_paired_comparison(tmp_path, capsys):
    """The interval is that of the differences.

    Catches two separate intervals, pairs of different problems, and a problem that is there twice
    but counts once.
    """
    for folder, shift in (("old", 0), ("new", 1)):
        rows = [
            {
                "index": n,
                "problem": f"p{max(n, 2)}",  # the first three are the same
                "gold": "1",
                "rewards": [float(n % 10 < 5 + shift), float(n % 10 < 5)],
            }
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
    """Catches a flag of eval.py that does nothing, and weights in another type than --dtype."""
    samplings, dtypes = [], set()
    sample = rollout.sample

    def record(model, prompt_ids, sampling, **options):
        samplings.append(sampling)
        dtypes.update(parameter.dtype for parameter in model.parameters())
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    logged = {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "repetition_penalty": 1.2}
    given = {**logged, "engine": "hf", "batch_size": 7}
    common = {"problems": 2, "max_new_tokens": 3, "dtype": "bfloat16"}
    cfg = evaluation.EvalConfig(policy_folder, **common, **given)
    (row,) = evaluation.main(cfg)
    assert given.items() <= vars(samplings[0]).items()
    assert dtypes == {torch.bfloat16}
    assert logged.items() <= row.items()


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
