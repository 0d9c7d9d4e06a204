"""Evaluation: averages, their intervals, stored completions, and the command line."""

import itertools
import json
import math
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
import rollout
from engines import hf
from eval import EvalConfig
from runtime import InputError, checkpoint, log

ROOT = Path(__file__).resolve().parents[1]
nan = math.nan


def write(path, rows):
    log.append_rows(path, rows)
    return str(path)


@pytest.fixture
def sampled(monkeypatch):
    """A list that gets, of each call of rollout.sample: the model, the prompts, how to sample, and
    the options."""
    calls, sample = [], rollout.sample

    def record(model, prompt_ids, sampling, **options):
        calls.append((model, prompt_ids, sampling, options))
        return sample(model, prompt_ids, sampling, **options)

    monkeypatch.setattr(rollout, "sample", record)
    return calls


# ---------------------------------------------------------------------------- figures


SCORES = torch.tensor([[1.0, 1, 1, 0], [0, nan, nan, nan], [1, 0, nan, nan], [nan] * 4])


def test_average_is_over_completions_then_problems():
    """Fails if all completions are pooled (then 4/7), or an unscorable one counts as wrong."""
    assert evaluation.avg_at_k(SCORES) == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert math.isnan(evaluation.avg_at_k(torch.full((2, 2), nan)))


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("P", [30, 300])
@pytest.mark.parametrize(("first", "second"), [(0, 0.05), (0, 0.95), (0.02, 0.05)])
def test_intervals_cover(P, k, first, second):
    """2,000 sets of P problems, of which two models can solve these shares, always or half of the
    time; where the first solves none, the interval is of the second. Catches the percentile
    bootstrap and Student's t (0.69 of 30 problems at 0.05), and completions that are resampled."""
    generator = torch.Generator().manual_seed(P + k)
    rates = torch.tensor([1.0, 0.5]).double()[torch.randint(2, (2, 2000, P), generator=generator)]
    can = torch.rand(2, 2000, P, generator=generator) < torch.tensor([first, second])[:, None, None]
    chances = (can * rates)[..., None].expand(-1, -1, -1, k)
    before, after = torch.bernoulli(chances, generator=generator).mean(dim=3)
    truth, low = 0.75 * (second - first), -1.0 if first else 0.0
    ends = torch.tensor([evaluation.wilson_interval(x, low) for x in after - before])
    covered = ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).double().mean()
    assert 0.93 <= covered <= 1.0
    assert P == 30 or covered < 0.97, "too wide"


def test_intervals_by_hand():
    """Wilson's of 7 of 50; shares of 0 and 1; equal models; rewards beyond 1. Fails if a problem
    that cannot be scored counts, or if less spread does not narrow it."""
    interval = evaluation.wilson_interval
    solved = (torch.arange(50) < 7).double()
    assert interval(solved) == pytest.approx((0.0695, 0.2619), abs=1e-4)
    assert interval(torch.cat([solved, torch.full((9,), nan)])) == interval(solved)
    assert all(map(math.isnan, interval(torch.full((9,), nan))))
    assert interval(torch.zeros(30)) == pytest.approx((0, 0.1135), abs=1e-4)
    assert interval(torch.ones(30)) == pytest.approx((0.8865, 1), abs=1e-4)
    assert interval(torch.zeros(30), low=-1.0) == pytest.approx((-0.1135, 0.1135), abs=1e-4)
    assert interval(10 * solved) == pytest.approx((0.695, 2.619), abs=1e-3)
    means = 0.5 + 0.01 * solved  # of many completions: within 1.96 standard errors
    error = 1.96 * means.std(correction=0).item() / math.sqrt(50)
    assert interval(means) == pytest.approx((0.5014 - error, 0.5014 + error), abs=1e-5)


def test_pass_at_k_by_enumeration():
    """The share of all choices of k out of n that include a right completion. Catches 1 - (1 -
    c/n)^k, and an unscorable completion that is counted."""
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


def test_figures_by_hand(capsys):
    """Fails if a share or a mean is of problems instead of completions, if pass@k lacks k or is 0
    because no reward is exactly 1, or if the table's average of two sets is their sum."""
    rows = [
        {"rewards": [1, 0, None], "lengths": [2, 3, 9], "truncated": [False, False, True]},
        {"rewards": [0, 0, 0], "lengths": [9, 9, 4], "truncated": [True, True, False]},
    ]
    found = evaluation.figures(rows)
    evaluation.print_table([found | {"data": "one"}, found | {"data": "two", "avg@3": 0.75}], k=3)
    assert capsys.readouterr().out.split()[-2:] == ["average", "0.500"]
    assert 0 <= found["wilson95"][0] < found.pop("wilson95")[1]
    assert found == {
        "problems": 2, "k": 3, "avg@3": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@3": 0.0,
        "unscorable": 1, "truncated_share": 0.5, "mean_length": 6.0,
    }  # fmt: skip
    partial = evaluation.figures([rows[0] | {"rewards": [0.5, 2.0, 2.0]}])
    assert partial["avg@3"] == 1.5
    assert not any(name.startswith("pass@") for name in partial)
    evaluation.print_table([partial | {"data": "one"}], k=3)


def test_paired_comparison(tmp_path):
    """The second model had no room for the first problem, and cannot score the last, nor the first
    model the one before. The interval is that of the differences. Catches pairs by row number, two
    separate intervals, pairs of different problems, means over problems of one folder, and a
    problem that is there twice but counts once."""
    old, new, nothing = (str(tmp_path / name) for name in ("old", "new", "nothing"))
    texts = [f"p{n}" for n in range(97)] + ["p96"] * 3
    for folder, shift in ((old, 0), (new, 1)):
        rewards = [[float(n % 10 < 5 + shift), float(n % 10 < 5), None] for n in range(100)]
        rewards[98 + shift] = [None] * 3
        rows = [{"problem": texts[n], "rewards": rewards[n]} for n in range(shift, 100)]
        Path(folder).mkdir()
        write(Path(folder) / "mine.jsonl", [{"index": n} | row for n, row in enumerate(rows)])
    (row,) = evaluation.compare(old, new)
    assert row["problems"] == 97
    assert row["first"] == pytest.approx(49 / 97, abs=1e-4)
    assert row["second"] == pytest.approx((49 + 5) / 97, abs=1e-4)
    assert row["difference"] == pytest.approx(5 / 97, abs=1e-4)
    assert 0 < row["wilson95"][0] < row["difference"] < row["wilson95"][1] < 0.1
    (row,) = evaluation.compare(old, old)
    assert row["wilson95"][0] == -row["wilson95"][1] < 0, "of a model and itself"
    with pytest.raises(InputError, match="no problem in common"):
        evaluation.compare(old, nothing)

    # Chats that end alike differ in their answers; the second model had no room for the first.
    same = [{"problem": "Go on.", "answer": n, "rewards": [n]} for n in (1, 0)]
    for folder, rows in ((old, same), (new, same[1:])):
        write(Path(folder) / "yours.jsonl", [{"index": n} | row for n, row in enumerate(rows)])
    _, row = evaluation.compare(old, new)
    assert (row["problems"], row["difference"]) == (1, 0)


# ---------------------------------------------------------------------------- the command line


def test_bad_values_are_named(monkeypatch, capsys):
    for name, value in (
        ("k", 0), ("max_new_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.5),
        ("top_k", -1),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {value}: must be"):
            evaluation.main(EvalConfig("m", **{name: value}))
    monkeypatch.setattr(sys, "argv", ["eval.py", "--model", "/nowhere"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
    assert stop.value.code == 2
    assert re.fullmatch("error: --model /nowhere cannot be loaded.*\n", capsys.readouterr().err)


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


def test_check_golds(tmp_path, capsys):
    """Lists the reference answers that fail, and counts the others. Fails if an answer passes just
    because its text equals itself: the last one takes math-verify too long, so nothing that is
    spelled in another way would be right."""
    answers = ["\\frac{1}{2}", "", None, "1,200", " ", "so $x$ is \\boxed{7}", "3!!!!!!!!!"]
    rows = [{"problem": f"p{n}", "answer": answer} for n, answer in enumerate(answers)]
    path = write(tmp_path / "mine.jsonl", rows)
    evaluation.main(EvalConfig(check_golds=True, data=(path,)))
    *listed, last = capsys.readouterr().out.splitlines()
    assert last == "verified 3 of 7"
    assert [line.split("row ")[1][0] for line in listed] == ["2", "3", "5", "7"]


# ---------------------------------------------------------------------------- sample and score


@pytest.mark.parametrize("batch_size", [1, 4])
def test_batches_do_not_mix_up_problems(policy_folder, tmp_path, batch_size):
    """Seven problems, in batches of one or two: each completion is scored by the given reward, with
    its own problem's answer. Fails if a batch gets another one's answers, if the last is lost, or
    if another reward scores completions or selects problems."""
    rows = [{"problem": "+" * n, "answer": n} for n in range(1, 8)]
    path = write(tmp_path / "mine.jsonl", [*rows, {"problem": "p", "answer": "none"}])
    cfg = EvalConfig(policy_folder, data=(path,), k=2, max_new_tokens=3, batch_size=batch_size)
    evaluation.main(
        replace(cfg, out_dir=str(tmp_path / "evals")),
        reward=lambda _completion, answer: None if answer == "none" else float(answer),
    )
    (path,) = (tmp_path / "evals").glob("mine-*.jsonl")
    *stored, last = log.read_rows(path)
    assert [row["index"] for row in stored] == [*range(7)]
    assert [row["problem"] for row in stored] == ["+" * n for n in range(1, 8)]
    assert [row["rewards"] for row in stored] == [[n, n] for n in range(1, 8)]
    assert last["rewards"] == [None, None]
    for other, name in ((float, "float"), (None, "None")):
        with pytest.raises(InputError, match=rf"has reward .*lambda.*, not {name}: use the same"):
            evaluation.main(replace(cfg, out_dir=str(tmp_path / "evals")), reward=other)


def test_seeds_and_rooms_of_sets(policy_folder, sampled, capsys):
    """One line of JSON per set, then the table. Fails if two sets or two --seed share their draws,
    if --prompt ignores --seed or is not answered, if a set gets the room of another one, or if a
    batch has no room for the k completions of a problem."""
    names = ("arithmetic", "arithmetic-longer")
    rooms = [*map(data.max_new_tokens, names)]
    for seed in (0, 1):
        cfg = EvalConfig(policy_folder, data=names, problems=1, seed=seed)
        evaluation.main(replace(cfg, k=3, batch_size=2))
        *lines, head, _first, _second, average = capsys.readouterr().out.splitlines()
        lines = [json.loads(line) for line in lines]
        assert [line["data"] for line in lines] == [*names]
        assert [line["max_new_tokens"] for line in lines] == rooms
        assert (head[:3], average[:7]) == ("set", "average")
        (row,) = evaluation.main(replace(cfg, prompt="7+9+5?", max_new_tokens=2))
        assert row["completion"] + "\n" == capsys.readouterr().out
    seeds = [options["seed"] for *_, options in sampled]
    assert [options["group_size"] for *_, options in sampled] == [3, 3, 1] * 2
    assert [sampling.max_new_tokens for _, _, sampling, _ in sampled] == [*rooms, 2] * 2
    assert rooms[0] != rooms[1]
    assert len(set(seeds)) == len(seeds) == 6


def test_held_out_rows(policy_folder, tmp_path):
    """Fails if --held-out evaluates on training rows."""
    rows = [{"problem": f"p{n}", "answer": "1"} for n in range(60)]
    path = write(tmp_path / "mine.jsonl", rows)
    cfg = EvalConfig(policy_folder, data=(path,), held_out=True, k=1, max_new_tokens=2)
    evaluation.main(replace(cfg, out_dir=str(tmp_path / "evals")))
    (path,) = (tmp_path / "evals").glob("mine-*.jsonl")
    assert [row["problem"] for row in log.read_rows(path)] == ["p57", "p58", "p59"]


# ---------------------------------------------------------------------------- stored completions


SUMS = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(12)]


@pytest.fixture
def evaluate(policy_folder, tmp_path):
    """Evaluate files; returns the completions of each problem, and the files of completions."""

    def go(folder, *files, **options):
        cfg = EvalConfig(policy_folder, data=files, k=2, max_new_tokens=3)
        evaluation.main(replace(cfg, out_dir=str(tmp_path / folder), **options))
        stored = {path.name: log.read_rows(path) for path in (tmp_path / folder).glob("*.jsonl")}
        said = {}
        for row in (row for rows in stored.values() for row in rows):
            said.setdefault(row["problem"], []).append(row["completions"])
        return said, {name: len(rows) for name, rows in stored.items()}

    return go


def test_what_a_file_holds_names_its_completions(evaluate, tmp_path):
    """Two files of one name, of which one has the other's problems and more; and fewer --problems.
    Catches a set that takes over another one's completions, and one that --problems starts over."""
    for name, rows in (("a", SUMS[:4]), ("b", SUMS), ("c", SUMS[4:])):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "test.jsonl", rows)
    a, b, c = (str(tmp_path / name / "test.jsonl") for name in "abc")
    _, counts = evaluate("evals", a, b, c)
    assert sorted(counts.values()) == [4, 8, 12]
    assert all(re.fullmatch(r"test-[0-9a-f]{16}\.jsonl", name) for name in counts)
    assert evaluate("evals", a, c, b, problems=3)[1] == counts
    _, (count,) = (part.values() for part in evaluate("fewer", b, problems=3))
    assert count == 3
    assert evaluate("fewer", b)[1].popitem()[1] == 12


def test_only_what_a_file_holds_counts(evaluate, tmp_path, monkeypatch):
    """Catches a draw by the path, or by the place of a row; and equal draws for two occurrences of
    one problem."""
    first = write(tmp_path / "first.jsonl", [*SUMS, SUMS[3]])
    again = write(tmp_path / "again.jsonl", [SUMS[3], *SUMS[::-1]])
    monkeypatch.chdir(tmp_path)
    said = [evaluate(f"evals{n}", path)[0] for n, path in enumerate((first, "first.jsonl", again))]
    assert said[0] == said[1] == said[2]
    one, other = said[0]["3+1?"]
    assert one != other


def test_an_interrupted_evaluation_continues(policy_folder, tmp_path, monkeypatch, sampled):
    """Killed within the second of three batches, it ends with the rows of a whole evaluation, and
    does not sample the first batch again. Fails if a seed depends on how much is left, if half a
    batch is kept, or if the completions of other problems are taken for this set's."""
    options = {"k": 2, "problems": 5, "max_new_tokens": 3, "batch_size": 4}

    def go(folder, **changes):
        cfg = EvalConfig(policy_folder, out_dir=str(tmp_path / folder), **options)
        return evaluation.main(replace(cfg, **changes))

    whole, part = go("whole"), tmp_path / "part"
    text = (tmp_path / "whole" / "arithmetic.jsonl").read_text()
    shutil.copytree(tmp_path / "whole", part)
    half = "\n".join(text.split("\n")[:3]) + '\n{"index": 3, "pro'
    (part / "arithmetic.jsonl").write_text(half)
    sampled.clear()
    assert go("part") == whole
    assert [len(prompts) for _, prompts, *_ in sampled] == [2, 1]
    keys = [key for *_, options in sampled for key in options["keys"]]
    assert keys == [2, 3, 4], "the places of the problems, so no two are the same draw"
    assert (part / "arithmetic.jsonl").read_text() == text

    assert go("part") == whole
    assert go("part", problems=3)[0]["problems"] == 3
    assert len(sampled) == 2, "nothing is sampled again"
    assert (part / "arithmetic.jsonl").read_text() == text

    for name, stored, other in (("temperature", r"1\.0", 0.5), ("seed", 0, 1)):
        message = f"--out-dir {part} has {name} {stored}, not {other}: use the same value, or"
        with pytest.raises(InputError, match=message):
            go("part", **{name: other})
    others = [replace(problem, answer="another") for problem in data.eval_problems("arithmetic", 5)]
    monkeypatch.setattr(data, "eval_problems", lambda *args, **options: others)
    message = "has other problems or answers than arithmetic: use another --out-dir"
    with pytest.raises(InputError, match=message):
        go("part")
    monkeypatch.setattr(checkpoint, "fingerprint", lambda _model: 1)
    with pytest.raises(InputError, match=f"--out-dir {part} has weights .*, not 1: use"):
        go("part")


def test_a_folder_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {}}')
    with pytest.raises(InputError, match="holds a run of training: use another folder"):
        evaluation.open_folder(str(tmp_path), {"seed": 0})
