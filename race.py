"""
The race: who reaches GRPO's accuracy first, from the same base model, on the same problems, with the same evaluation.

    python bench.py race --methods grpo,pps --seeds 1        both side by side, live, in about 3 minutes
    bash runs/race.sh                                        grpo, dppo and pps, 2 seeds, in 10 minutes
    bash runs/race.sh all                                    everything that the README reports, in hours

A run is a call of train.py (of TRL's trainer) that is evaluated every few steps and whose seconds are those of its
steps, evaluation left out. The first seeds take turns, alone on the machine, a few steps each; the seeds after them
may run two at a time, one thread each, and their seconds are those of the first seeds, step by step. What is there is
not run again. `summary` makes the tables from the records alone, so from the committed logs as well.
"""

import contextlib
import io
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import tyro
from matplotlib.figure import Figure  # not pyplot, whose backend is the caller's

import checkpoint
import config
import data
import log
import train
import trl_trainer

ROWS = {  # flags of each row, at the rates that are train.py's defaults; uniform: pps's rollouts, drawn blindly
    "grpo": "--method grpo",
    "grpo_zero": "--method grpo_zero",
    "cppo": "--method cppo",
    "cppo_allocated": "--method cppo --cppo-allocation",
    "greso": "--method greso",
    "dppo": "--method dppo",
    "dppo_floor": "--method dppo_floor",
    "pps": "--method pps",
    "uniform": "--prompt-rule uniform --completion-rule uniform --prompts-per-step 64 --prompt-prune-rate 0.6",
}
PLANNED = {"arithmetic": 60, "arithmetic-mixed": 75}  # last step of a run
EVAL_DATA = "arithmetic"  # held-out chains of 2 to 8 numbers: of the mix, all that can be learned
REACHED, ABSOLUTE = 0.98, 0.8  # of GRPO's final accuracy; and an accuracy of its own
WINDOW = 3  # evaluations that are averaged
COLUMNS = (  # of log.jsonl that a record keeps
    "step_time", "tokens/generated", "tokens/trained", "kept/prompts", "kept/completions", "kept/tokens", "weight/ess",
    "eval/avg@4",
)  # fmt: skip


# ---------------------------------------------------------------------------- runs


def main(
    methods: str = "grpo,dppo,pps",
    settings: tuple[str, ...] = ("arithmetic",),
    seeds: int = 2,
    first_seed: int = 0,
    alone: int | None = None,
    steps: int | None = None,
    every: int = 3,
    eval_problems: int = 150,
    lr: float | None = None,
    folder: Path = Path("out-race"),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Race the methods, and print who reached what when.

    Args:
        methods: rows, with commas between them; `cppo:3` has 3 seeds; trl needs requirements-trl.txt
        settings: arithmetic, arithmetic-mixed
        seeds: of every row that does not say
        first_seed: the first of them; 100 for what is tried and not reported
        alone: seeds that take turns alone on the machine; the others run two at a time; default: all
        steps: last step; default: the setting's
        every: steps between evaluations, and of a turn
        eval_problems: of an evaluation, 4 completions each
        lr: another learning rate than train.py's
        folder: of the runs; what is there goes on or is done
        json_file: where to write the records of everything that is in the folder; their picture goes beside it
    """
    wanted = dict(row.split(":") if ":" in row else (row, seeds) for row in methods.split(","))
    for name in wanted:
        if name not in ROWS and name != "trl":
            raise data.InputError(f"--methods {name}: choose of {', '.join(ROWS)}, trl")
    for setting in settings:
        if setting not in PLANNED:
            raise data.InputError(f"--settings {setting}: choose of {', '.join(PLANNED)}")
    if "trl" in wanted and settings != ("arithmetic",):
        raise data.InputError(f"--methods trl --settings {' '.join(settings)}: trl is raced in arithmetic only")
    turns, pairs = [], []
    for setting, number in itertools.product(settings, range(max(map(int, wanted.values())))):
        options = steps or PLANNED[setting], every, eval_problems, lr, folder
        runs = [
            Run(setting, name, first_seed + number, *options) for name, count in wanted.items() if number < int(count)
        ]
        if alone is None or number < alone:
            turns.append(runs)
        else:
            pairs += runs
    for runs in turns:
        _take_turns(runs)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_process, run) for run in pairs]:
            done.result()
    records = collect(folder, lr)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text("".join(json.dumps(record) + "\n" for record in records))
        draw(records).savefig(json_file.with_suffix(".png"))
    for setting in settings:
        print(f"\n{setting}\n{table(summary(records), setting)}")


@dataclass(frozen=True)
class Run:
    setting: str
    row: str
    seed: int
    steps: int  # last one
    every: int  # steps between evaluations
    eval_problems: int
    lr: float | None
    folder: Path  # of all runs

    @property
    def out_dir(self) -> Path:
        return self.folder / self.setting / (f"{self.row}-seed{self.seed}" + (f"-lr{self.lr:g}" if self.lr else ""))

    def is_at(self, step: int) -> bool:
        """Whether the step is in the log, with its evaluation, and `finish` has been told."""
        rows = checkpoint.read_rows(self.out_dir / "log.jsonl")
        evaluated = any(row["step"] >= step and "eval/avg@4" in row for row in rows)
        return evaluated and (self.out_dir / "race.json").exists()

    def words(self) -> list[str]:
        """train.py's arguments, to start or to go on."""
        words = ["--out-dir", str(self.out_dir), "--steps", str(self.steps)]
        if (self.out_dir / "config.json").exists():
            return [*words, "--resume"]
        words += [*ROWS[self.row].split(), "--data", self.setting, "--eval-data", EVAL_DATA, "--seed", str(self.seed)]
        words += ["--eval-every", str(self.every), "--eval-problems", str(self.eval_problems)]
        words += ["--save-every", str(10 * self.every), "--keep-checkpoints", "1"]
        return words + (["--lr", str(self.lr)] if self.lr else [])

    def finish(self, **facts) -> None:
        (self.out_dir / "race.json").write_text(json.dumps(facts))


def _take_turns(runs: list[Run]) -> None:
    """A few steps each, one after the other, so that a slow minute of the machine is everybody's."""
    print(f"\n{runs[0].setting}, seed {runs[0].seed}: mean of the last {WINDOW} evaluations, seconds of training")
    print("  step" + "".join(f"{run.row:>20s}" for run in runs))
    for upto in [*range(runs[0].every, runs[0].steps, runs[0].every), runs[0].steps]:
        line = f"{upto:6d}"
        for run in runs:
            _turn(run, upto)
            record = _record(run.out_dir)
            accuracy = [value for step, value in smoothed(record) if step <= upto][-1]
            line += f"{accuracy:11.3f} {sum(record['step_time'][: upto + 1]):6.0f} s"
            print("\r" + line, end="", flush=True)
        print()


def _turn(run: Run, upto: int) -> None:
    """Some steps of a run in this process; a turn is ended as a user would. TRL's trainer makes all of its steps in
    the first turn."""
    if run.is_at(upto):
        return
    if run.row == "trl":
        cfg, rows = trl_trainer.curve(run.steps, run.seed, run.lr, run.every, EVAL_DATA, run.eval_problems)
        run.out_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.write_rows(run.out_dir / "log.jsonl", rows)
        checkpoint.write_config(run.out_dir, asdict(cfg), 1)
    else:
        line = log.console_line

        def stop(figures, steps):  # the rate falls to 0 at the last step, so it has to know which one that is
            if figures["step"] >= upto:
                os.kill(os.getpid(), signal.SIGTERM)
            return line(figures, steps)

        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(log, "console_line", stop):
            train.main(config.parse_config(run.words()))
    run.finish(threads=torch.get_num_threads(), alone=True)
    if not run.is_at(upto):
        raise SystemExit("stopped; the same command goes on")


def _process(run: Run) -> None:
    """A whole run in a process of its own, with one thread."""
    if run.is_at(run.steps):
        return
    words = [sys.executable, "train.py", *run.words()]
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(words, stdout=nowhere, env=os.environ | {"OMP_NUM_THREADS": "1"})
        _, status, usage = os.wait4(process.pid, 0)
    run.finish(threads=1, alone=False, peak_gib=usage.ru_maxrss / 2**20)
    if status or not run.is_at(run.steps):  # a run that is asked to stop ends with 0, too
        raise RuntimeError(f"{' '.join(words)} ended early, with {os.waitstatus_to_exitcode(status)}")
    print(f"{run.out_dir}: {final(_record(run.out_dir)):.3f} after {run.steps} steps", flush=True)


# ---------------------------------------------------------------------------- records


def _record(out_dir: Path) -> dict:
    """What is kept of a run: {setting, row, seed, lr, threads, alone, columns}, each column a list, one entry a step
    from 0 on; null where the log has none."""
    told = json.loads((out_dir / "config.json").read_text())["config"]
    rows = checkpoint.read_rows(out_dir / "log.jsonl")
    columns = {name: [_short(row.get(name)) for row in rows] for name in COLUMNS}
    columns["step_time"][0] = 0.0
    facts = json.loads((out_dir / "race.json").read_text())
    name = out_dir.name.split("-seed")[0]
    return {"setting": told["data"], "row": name, "seed": told["seed"], "lr": told["lr"], **facts, **columns}


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect(folder: Path, lr: float | None = None) -> list[dict]:
    """The records of all runs in a folder at this --lr (None: at train.py's own) that are done: an unfinished one has
    no final accuracy."""
    folders = [path.parent for path in sorted(folder.glob("*/*/race.json"))]
    folders = [path for path in folders if path.name.partition("-lr")[2] == (f"{lr:g}" if lr else "")]
    last = {path: json.loads((path / "config.json").read_text())["config"]["steps"] for path in folders}
    return [_record(path) for path in folders if checkpoint.read_rows(path / "log.jsonl")[-1]["step"] == last[path]]


def load(*files: Path) -> list[dict]:
    """The records of committed logs."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def smoothed(record: dict) -> list[tuple[int, float]]:
    """(step, mean of the last three evaluations up to it), the base model's own evaluation left out; the first two
    have fewer, and no race is won by them."""
    found = [(step, value) for step, value in enumerate(record["eval/avg@4"]) if value is not None]
    values = [value for _, value in found]
    return [
        (step, statistics.mean(values[max(1, number - WINDOW + 1) : number + 1] or values[:1]))
        for number, (step, _) in enumerate(found)
    ]


def final(record: dict) -> float:
    """Mean of the last three evaluations."""
    return smoothed(record)[-1][1]


def reached(record: dict, accuracy: float) -> float:
    """The step at which the mean of three evaluations first is at the accuracy; infinite if it never is."""
    return next((step for step, value in smoothed(record)[WINDOW:] if value >= accuracy), math.inf)


def seconds(record: dict, records: list[dict]) -> list[float]:
    """Seconds of training [steps + 1] up to each step: the run's own, if it had the machine to itself, else the mean
    of those that had, step by step; beyond their last step as in their last ten."""
    own = [record] if record["alone"] else [
        other for other in records
        if other["alone"] and (other["setting"], other["row"]) == (record["setting"], record["row"])
    ]  # fmt: skip
    if not own:
        return [math.nan] * len(record["step_time"])
    steps = [statistics.mean(column) for column in zip(*(run["step_time"] for run in own), strict=False)]
    steps += [statistics.mean(steps[-10:])] * (len(record["step_time"]) - len(steps))
    return list(itertools.accumulate(steps[: len(record["step_time"])]))


def tokens(record: dict) -> list[float]:
    """Tokens generated plus trained on (with prompts), [steps + 1] up to each step. TRL's: generated, twice."""
    pairs = zip(record["tokens/generated"], record["tokens/trained"], strict=True)
    return list(itertools.accumulate((a or 0) + (b or 0) for a, b in pairs))


# ---------------------------------------------------------------------------- tables


def interval(values: list[float], middle=statistics.median, draws: int = 10_000) -> tuple[float, float, float]:
    """(middle, low, high): what the values say, and the 95 % bootstrap interval over seeds."""
    rng = random.Random(0)
    found = sorted(middle(rng.choices(values, k=len(values))) for _ in range(draws))
    return middle(values), found[draws // 40], found[-1 - draws // 40]


def scales(records: list[dict]) -> dict:
    """What a race is measured on: {axis: function of a record}, each giving [steps + 1] figures."""
    return {
        "steps": lambda run: range(len(run["step_time"])),
        "seconds": lambda run: seconds(run, records),
        "tokens": tokens,
    }


def summary(records: list[dict]) -> list[dict]:
    """The figures of each setting and row against the GRPO of the same seeds: when 0.98 of its final accuracy, and
    0.8, are reached, on three axes. Ratios are GRPO's figure over the row's: 2 is twice as soon, 0 is never. Triples
    are (middle, low, high) over seeds: medians of ratios, means of differences."""
    found, axes = [], scales(records)
    grpo = {(record["setting"], record["seed"]): record for record in records if record["row"] == "grpo"}
    for setting, name in itertools.product(PLANNED, COLORS):
        runs = [run for run in records if (run["setting"], run["row"]) == (setting, name)]
        runs = [run for run in runs if (setting, run["seed"]) in grpo]
        if not runs:
            continue
        rivals = [grpo[setting, run["seed"]] for run in runs]
        row = {"setting": setting, "row": name, "seeds": len(runs)}
        for goal, axis in itertools.product(("reached", "absolute"), axes):
            spent, theirs = [], []
            for run, rival in zip(runs, rivals, strict=True):
                accuracy = REACHED * final(rival) if goal == "reached" else ABSOLUTE
                for who, where in ((run, spent), (rival, theirs)):
                    step = reached(who, accuracy)
                    where.append(axes[axis](who)[step] if step < math.inf else math.inf)
            row[f"{goal}/{axis}"] = statistics.median(spent)
            ratios = [their / our if our < math.inf else 0.0 for our, their in zip(spent, theirs, strict=True)]
            row[f"{goal}/{axis}_ratio"] = interval(ratios)
        row["final"] = statistics.mean(map(final, runs))
        gaps = [final(run) - final(rival) for run, rival in zip(runs, rivals, strict=True)]
        row["final_gap"] = interval(gaps, statistics.mean)
        time_limit = min(seconds(run, records)[-1] for run in records if run["setting"] == setting)
        row["at_equal_time"] = statistics.mean(
            [value for step, value in smoothed(run) if seconds(run, records)[step] <= time_limit][-1] for run in runs
        )
        row["seconds_per_step"] = statistics.mean(
            seconds(run, records)[-1] / (len(run["step_time"]) - 1) for run in runs
        )
        for column in ("kept/prompts", "kept/tokens", "weight/ess"):
            values = [value for run in runs for value in run[column] if value is not None]
            row[column] = statistics.mean(values) if values else math.nan
        row["peak_gib"] = max([run["peak_gib"] for run in runs if "peak_gib" in run], default=math.nan)
        found.append(row)
    return found


def table(rows: list[dict], setting: str) -> str:
    """A setting's rows of `summary`, as Markdown."""
    several = lambda triple, digits=2: "{1:.{0}f} ({2:.{0}f} to {3:.{0}f})".format(digits, *triple)
    spent = lambda value: f"{value:.0f} s" if value < math.inf else "never"
    cells = [[
        "", "seeds", f"to {REACHED} of GRPO's final", "times sooner (95 %)", "steps", "tokens", f"to {ABSOLUTE}",
        "times sooner", "final accuracy", "minus GRPO's (95 %)", "at equal time", "s / step", "prompts kept",
        "tokens kept", "ESS", "GiB",
    ]]  # fmt: skip
    cells.append(["---"] * len(cells[0]))
    cells += [[
        row["row"], str(row["seeds"]), spent(row["reached/seconds"]), several(row["reached/seconds_ratio"]),
        f"{row['reached/steps']:.0f}", several(row["reached/tokens_ratio"]), spent(row["absolute/seconds"]),
        several(row["absolute/seconds_ratio"]), f"{row['final']:.3f}", several(row["final_gap"], 3),
        f"{row['at_equal_time']:.3f}", f"{row['seconds_per_step']:.2f}", f"{row['kept/prompts']:.2f}",
        f"{row['kept/tokens']:.2f}", f"{row['weight/ess']:.0f}", f"{row['peak_gib']:.2f}",
    ] for row in rows if row["setting"] == setting]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells)


# ---------------------------------------------------------------------------- pictures


COLORS = {  # in the order of the tables; trl is the one row that is not in ROWS
    "grpo": "#000000", "grpo_zero": "#999999", "cppo": "#D55E00", "cppo_allocated": "#E69F00", "greso": "#56B4E9",
    "dppo": "#0072B2", "dppo_floor": "#CC79A7", "pps": "#009E73", "uniform": "#F0E442", "trl": "#8B4513",
}  # fmt: skip


def draw(records: list[dict], axis: str = "seconds") -> Figure:
    """Accuracy (means of three evaluations) over seconds, tokens or steps, a panel a setting: each seed thin, the mean
    of the seeds at each step thick, a single seed in between, 0.98 of GRPO's final accuracy dotted; cut at twice GRPO's
    end. From the third evaluation on, and the base model's own."""
    settings = [setting for setting in PLANNED if any(record["setting"] == setting for record in records)]
    figure = Figure(figsize=(6 * len(settings), 3.6), dpi=110, layout="constrained")
    scale = scales(records)[axis]
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for panel, setting in zip(panels, settings, strict=True):
        for name, color in COLORS.items():
            runs = [run for run in records if (run["setting"], run["row"]) == (setting, name)]
            points = [smoothed(run)[:1] + smoothed(run)[WINDOW:] for run in runs]
            lines = [[(scale(run)[s], value) for s, value in found] for run, found in zip(runs, points, strict=True)]
            for line in lines:
                panel.plot(*zip(*line, strict=True), color=color, lw=0.6, alpha=0.35)
            if lines:
                middle = [
                    tuple(map(statistics.mean, zip(*points, strict=True))) for points in zip(*lines, strict=False)
                ]
                width = 2 if len(runs) > 1 else 1
                panel.plot(*zip(*middle, strict=True), color=color, lw=width, label=f"{name} ({len(runs)})")
        grpo = [run for run in records if (run["setting"], run["row"]) == (setting, "grpo")]
        end = panel.get_xlim()[1]
        if grpo:
            goal = statistics.mean(REACHED * final(run) for run in grpo)
            panel.axhline(goal, color="#000000", ls=":", lw=1, label=f"{REACHED} of grpo's final")
            end = min(end, 2 * max(scale(run)[-1] for run in grpo))
        panel.set(title=setting, xlabel={"seconds": "seconds of training"}.get(axis, axis), xlim=(0, end))
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set(ylabel="avg@4, held out (mean of 3 evaluations)", ylim=(None, 1))
    return figure
