"""Every bench command without a test file of its own, from its command line to its rows, at a size
at which it takes seconds."""

import json
import math
import re
import subprocess

import pytest
import torch

import bench
import config
import metrics
from bench import __main__ as command_line
from bench import check, hostile, kills, rollout, shapes, step, trl, update
from engines import compact


@pytest.fixture
def command(tmp_path):
    """Run a command line, and return the content of its --json."""

    def go(line):
        command_line.main([*line.split(), "--json", str(tmp_path / "rows.json")])
        return json.loads((tmp_path / "rows.json").read_text())

    return go


@pytest.fixture
def float32(monkeypatch):
    """On a GPU the default would be bfloat16, which rounds at 4e-3."""
    parse = config.parse_config
    monkeypatch.setattr(config, "parse_config", lambda args: parse([*args, "--device", "cpu"]))


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_help(name, capsys):
    """Every command has help for each of its flags. Catches a command that is not in the list."""
    with pytest.raises(SystemExit) as end:
        command_line.main([name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m bench {name}" in shown
    assert ("--json" in shown) == (name not in ("packing", "prompts", "code"))


def test_step(command, monkeypatch, capsys):
    """On made-up runs. Catches rows under another method's name, a first step that counts, a seed
    that is the same in every round, and a ratio upside down."""

    def run(args, reward):
        flags = dict(zip(args[::2], args[1::2], strict=True))
        seconds = {"grpo": 10.0, "pps": 5.0}[flags["--method"]] + float(flags["--seed"])
        return None, [dict.fromkeys(step.PARTS, value) for value in (99.0, seconds, seconds)]

    monkeypatch.setattr(step, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else memory is a part
    rows = command("step --rounds 2 --steps 3 --skip 1 --methods grpo pps")
    found = [(r["method"], r["round"], r["median"]) for r in rows if r["part"] == "time/train"]
    assert found == [("grpo", 0, 10), ("pps", 0, 5), ("grpo", 1, 11), ("pps", 1, 6)]
    assert "5.500 (0.52, 0.50 to 0.55)" in capsys.readouterr().out


def test_step_of_random_weights(command):
    """Real runs. Catches a bench that train.py has outgrown, and a method that is not passed on."""
    size = "--rounds 1 --steps 1 --skip 0 --shape tiny --new-tokens 4"
    rows = command(f"step {size} --methods grpo pps")
    found = {(row["method"], row["part"]): row["median"] for row in rows}
    assert found["pps", "tokens/trained"] < 0.9 * found["grpo", "tokens/trained"]
    assert 1000 < found["grpo", "tokens/generated"] <= 32 * 8 * 4
    assert found["grpo", "step_time"] > found["grpo", "time/train"] > 0


def test_rollout(command):
    """Catches a bench that runs only where it was written, and tokens of another engine."""
    rows = command("rollout --rounds 1 --batches 32 --shape tiny --new-tokens 4")
    assert [row["engine"] for row in rows][:2] == ["hf", "compact"]
    limit = 1e-5 if config.resolve(config.Config()).dtype == "float32" else 0.1
    for row in rows:
        assert row["tokens"] == 32 * 4
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["max_logprob_gap"] < limit
    for row in rows[:2]:
        assert row["forwards"] == 4
        assert 1 < row["computed_per_token"] < (12 if row["engine"] == "compact" else 1000)
    vocabulary, layers = shapes.SHAPES["tiny"][-1], 4
    width = max(map(len, rollout.random_prompts(4, vocabulary)[2:]))  # the first two warm up
    token = layers * 2 * 2 * 32 * (4 if limit == 1e-5 else 2)  # keys and values of 2 heads, bytes
    mib = [row["cache_mib"] for row in rows[:2]]
    assert mib == [32 * token * columns / 2**20 for columns in (width + 3, width + compact.ROOM)]


def test_check(small_runs, float32, command):
    """Catches rows of another run, and a check that does not run at every step."""
    rows = command("check --steps 2 --every 1 --draws 4")
    assert [row["rule"] for row in rows[::3]] == [name for name, *_ in check.RUNS]
    assert {row["checks"] for row in rows} == {2}
    scale = {row["rule"]: row["mean"] for row in rows if row["key"] == "check/scale"}
    assert abs(scale["grpo_zero"]) < 1e-6


def test_check_of_some_runs(small_runs, monkeypatch, tmp_path):
    """One step of pps and its twin, with flags of train.py and three draws. Catches flags, methods
    or draws without effect, and a standard error of one check, which would divide by 0."""
    given, real = [], check.run

    def recorded(args, trainer_class, kind):
        given.append(args)
        return real(args, trainer_class, kind=kind)

    def counted(full, pruned):
        pruned = [*pruned]
        draws.append(len(pruned))
        return formula(full, pruned)

    draws, formula = [], metrics.check_unbiased
    monkeypatch.setattr(metrics, "check_unbiased", counted)
    monkeypatch.setattr(check, "run", recorded)
    file = tmp_path / "rows.json"
    args = [
        "check",
        "--steps",
        "1",
        "--every",
        "1",
        "--methods",
        "pps",
        "--draws",
        "3",
        "--json",
        str(file),
    ]
    command_line.main([*args, "--flags=--data words --seed 5"])
    assert draws == [3, 3]
    rows = json.loads(file.read_text())
    assert {row["rule"] for row in rows} == {"pps", "pps, weights x 0.9"}
    assert all(math.isnan(row["error"]) and row["checks"] == 1 for row in rows)
    assert [args[-4:] for args in given] == [["--data", "words", "--seed", "5"]] * 2


def test_the_twins_fault(small_runs, float32):
    """The first step's draws are the same, so the pruned gradients are 0.81 times as long. Fails if
    one of the two levels has no fault."""
    args = ["--method", "pps", "--steps", "1", "--check-every", "1"]
    scales = []
    for trainer_class in (bench.Trainer, check.Underweighted):
        _, rows = bench.run(args, trainer_class)
        scales.append(1 + rows[0]["check/scale"])
    assert scales[1] == pytest.approx(0.81 * scales[0], rel=1e-4)


def test_check_weights_steps_by_their_gradient():
    """Catches a plain mean, which steps with hardly a gradient would decide."""
    mean, error = check.mean_and_error([9.0, 1.0], [1.0, 7.0])
    assert mean == 2.0
    assert error == 1.75, "((7 x 1)^2 + (1 x 7)^2) x 2 / 1, its root over 8"


def test_prompts(capsys):
    """Catches a bench that the history has outgrown."""
    command_line.main(["prompts", "--count", "2000", "--candidates", "64"])
    shown = capsys.readouterr().out
    assert "2000 prompts, 64 candidates a step" in shown
    assert re.search(r"a step: median \d+\.\d ms", shown)
    assert re.search(r"history 0\.\d MB in memory", shown)


def test_update(command, monkeypatch):
    """Every layout has the first one's gradient, which the bench asserts. Catches a layout that was
    not kept up to date."""
    monkeypatch.setattr(update, "head_rows", lambda _device: [])  # 16,384 x 151,936 logits
    rows = command("update --shape tiny --rounds 1 --sequences 16 --pack-tokens 512")
    timed = {row["variant"] for row in rows if row["seconds"]}
    assert timed == {
        "padded, arrival", "padded, sorted", "packed", "packed, shared prompts",
        "packed, masked SDPA",
    }  # fmt: skip


def test_hostile(command, monkeypatch):
    """From both threads, and the judge survives. Catches a bench that leaves an ended judge to the
    next caller."""
    answers = [("\\boxed{1/0}", "7"), ("\\boxed{\\infty}", "x^{7}+1")]
    monkeypatch.setattr(hostile, "hostile_answers", lambda: answers)
    found = command("hostile")
    assert [row["thread"] for row in found["rows"]] == [False, False, True, True]
    assert (found["summary"]["answers"], found["summary"]["not 0"]) == (4, 0)
    assert found["summary"]["judge_works"]
    assert 0.01 < found["summary"]["peak_gib"] < 2
    assert hostile.rewards.verify("x^2", "x x")


def test_trl(small_runs, command, monkeypatch):
    """Our side of the comparison; TRL's steps are made up. Catches a pilot that picks the slowest,
    first steps that count, and ratios upside down."""

    def trl_steps(size, steps, _seed, variant="TRL", work=None):
        if work is not None:
            work += [(3, 500), (5, 700)]
        return [900.0] + [size * len(variant) / 3] * (steps - 1)

    monkeypatch.setattr(trl, "trl_steps", trl_steps)
    monkeypatch.setattr(trl, "arrival", lambda variant, seed, goal: goal * len(variant) + seed)
    rows = command("trl --rounds 1 --steps 3 --micro-batches 200 100 300 --seeds 2 --goal 10")
    names = list(trl.VARIANTS)
    assert [row["seconds"] for row in rows[:4]] == [200, 100, 300, 100]
    assert [row["trainer"] for row in rows[3:9]] == [*names, "grpo", "dppo", "pps"]
    ratios = [len(name) / 3 for name in names]
    assert [row["ratio"] for row in rows[3:6]] == pytest.approx(ratios)
    assert {(row["forwards"], row["slots"]) for row in rows[3:6]} == {(4, 600)}
    assert [row["trainer"] for row in rows[9:]] == [f"{name}, to 10.0" for name in names]
    assert [row["all_seconds"] for row in rows[9:10]] == [[[30.0], [31.0]]]
    for row in rows[6:9]:
        assert len(row["all_seconds"][0]) == 2
        assert 0 < row["seconds"] < 50
        assert row["ratio"] == pytest.approx(row["seconds"] / 100)


def test_deal(small_runs, float32, command):
    """Two steps, dealt to 2 to 64 ranks. Fails if what is dealt is less even than where it was
    sampled, or more even than the longest sequence allows."""
    rows = command("deal --steps 2 --prompts 8 --long 30")
    seconds = {row["how"]: row.pop("seconds") for row in rows if "seconds" in row}
    assert 2 * seconds["all"] == pytest.approx(sum(seconds.values()))
    assert len(seconds) == 9
    found = {(row["setting"], row["ranks"], row["how"]): row.get("mean") for row in rows}
    assert len(found) == 3 * 6 * 4 + 9
    for setting in ("arithmetic-mixed", "30 tokens"):
        for world in (2, 4, 8, 16, 32, 64):
            here, there, bound = (
                found[setting, world, how] for how in ("sampled", "dealt", "bound")
            )
            assert 0.999 * bound <= there <= 1.02 * max(here, bound)
    assert found["arithmetic-mixed", 2, "more"] < 1.2


def test_sizes_of_benches():
    """Catches steps that are compared at sizes or rates of their own, flags of the user that do not
    count, and tiny's learning rate for another model."""
    for method, prompts in (("grpo", 32), ("dppo", 32), ("pps", 64)):
        cfg = config.resolve(config.parse_config(bench.sized(method)))
        assert (cfg.method, cfg.prompts_per_step, cfg.group_size) == (method, prompts, 16)
        assert (cfg.loss, cfg.lr, cfg.adam_beta2) == ("grpo", 6e-4, 0.999)
    assert (cfg.prompt_prune_rate, cfg.completion_prune_rate) == (0.6, 0.7)
    cfg = config.resolve(config.parse_config(bench.sized("pps", "--model folder --group-size 4")))
    assert (cfg.lr, cfg.group_size) == (1e-6, 4)


def test_kills(command, monkeypatch, capsys):
    """One kill of a short run. Catches a first start that is refused, which counted as a kill."""
    rows = command("kills --count 1 --steps 30 --seed 3")
    assert sum(row["killed"] for row in rows) == 1
    assert all(row["resumed_from"] <= row["logged"] for row in rows)
    assert "1 kills: logs, samples and weights equal" in capsys.readouterr().out
    monkeypatch.setattr(kills, "resume", lambda _folder: ["--resume"])
    with pytest.raises(subprocess.CalledProcessError):
        command("kills --count 1 --steps 1 --seed 2")  # 12.6 s: refused before it is killed
