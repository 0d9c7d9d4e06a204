"""
The race: which method reaches GRPO's accuracy first, from the same base model and problems, and
with the same evaluation.

    python -m bench race --methods grpo,pps --seeds 1        side by side, live, about 4 minutes
    bash runs/race.sh                                        grpo, dppo and pps, 2 seeds, 10 minutes
    bash runs/race.sh all                                    everything in docs/race.md, hours
    python -m bench race --methods grpo,best_grpo,best_pps --against best_grpo --seeds 5

A run is a call of train.py (or of TRL's trainer) with an evaluation every few steps. Its seconds
are those of its steps, without evaluation. The first seeds take turns, a few steps each, alone on
the machine. Later seeds may run two at a time with one thread each; their seconds are those of the
first seeds, step by step. Rows whose steps sample other numbers of completions sample as many in
all, and as many between evaluations. Finished runs are not repeated. `summary` makes the tables
from the records alone, so it also works on the committed logs.
"""

import contextlib
import io
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the caller

import config
import train
from bench import JsonFile, trl
from runtime import InputError, checkpoint, log

ROWS = {  # flags of each row; rates are train.py's defaults. uniform: as many rollouts as pps
    "grpo": "--method grpo",
    "grpo_zero": "--method grpo_zero",
    "cppo": "--method cppo",
    "cppo_allocated": "--method cppo --cppo-allocation",
    "pods": "--method pods",
    "greso": "--method greso",
    "dynamic": "--method dynamic",
    "mopps": "--method mopps",
    "dppo": "--method dppo",
    "dppo_floor": "--method dppo_floor",
    "pps": "--method pps",
    "uniform": "--prompt-rule uniform --completion-rule uniform --prompt-prune-rate 0.6",
}
WIDE = ("pps", "uniform")  # rows with twice the candidates, of which they roll out 40 %
BEST = {  # rows with the flags that won `python -m bench search`, and of which methods
    "best_grpo": ("grpo_zero", "grpo"),
    "best_pps": ("pps",),
}
SEARCH = Path("runs/search.jsonl")  # every trial of the search


class Setting(NamedTuple):
    """What all rows of a setting have in common."""

    steps: int  # the last step of a run
    prompts: int  # candidates of a step, and what GRPO rolls out
    eval_data: str  # for the mix, arithmetic: all of it that can be learned
    flags: str = ""


SETTINGS = {
    "arithmetic": Setting(60, 32, "arithmetic"),
    "arithmetic-mixed": Setting(75, 32, "arithmetic"),
    "words": Setting(
        24, 16, "words", "--prompt-format plain --lr 2e-5 --lr-schedule linear --rollout-batch 256"
    ),
}  # fmt: skip
REACHED = 0.98  # of GRPO's final accuracy
ABSOLUTE = 0.8  # a fixed accuracy
WINDOW = 3  # evaluations that are averaged
COLUMNS = (  # of log.jsonl that a record keeps
    "step_time", "tokens/generated", "tokens/trained",
    "kept/prompts", "kept/completions", "kept/tokens", "weight/ess", "eval/avg@4",
)  # fmt: skip


# ---------------------------------------------------------------------------- runs


def main(
    methods: str = "grpo,dppo,pps",
    settings: tuple[str, ...] = ("arithmetic",),
    seeds: int = 2,
    first_seed: int = 0,
    alone: int | None = None,
    against: str = "grpo",
    steps: int | None = None,
    every: int = 3,
    eval_problems: int = 150,
    lr: float | None = None,
    model: str = "tiny",
    folder: Path = Path("out-race"),
    json_file: JsonFile = None,
) -> None:
    """Race the methods, and print which of them reached what, and when.

    Args:
        methods: rows, separated by commas; `cppo:3` has 3 seeds; trl needs requirements-trl.txt
        settings: arithmetic, arithmetic-mixed, words
        seeds: seeds of every row without a number of its own
        first_seed: the first of them; use 100 and up for trials that are not reported
        alone: seeds that take turns alone on the machine; the others run two at a time; default:
            all
        against: the row whose time the speed-ups divide; the targets stay GRPO's
        steps: last step of 32 x 16 completions each (words: 16 x 16); default: the setting's
        every: steps between evaluations, and steps of a turn
        eval_problems: problems of an evaluation, 4 completions each
        lr: a learning rate other than the setting's
        model: what the runs start from; words needs another than tiny, see runs/smollm2.sh
        folder: where the runs are; unfinished ones continue, finished ones are not repeated
        json_file: where to write the records of all runs in the folder; a picture goes beside it
    """
    counts = dict(row.split(":") if ":" in row else (row, seeds) for row in methods.split(","))
    check_names([*counts, against], settings, model)
    if alone == 0:
        raise InputError("--alone 0: seconds come from seeds that ran alone; give at least 1")
    turns, pairs = [], []
    for setting, number in itertools.product(settings, range(max(map(int, counts.values())))):
        options = (steps or SETTINGS[setting].steps, every, eval_problems, lr, model, folder)
        names = [name for name, count in counts.items() if number < int(count)]
        runs = [make_run(setting, name, first_seed + number, *options) for name in names]
        for run in runs:
            if run.row != "trl":
                config.parse_config(run.args())  # refuses a folder made with other flags
        if alone is None or number < alone:
            turns.append(runs)
        else:
            pairs += runs
    for runs in turns:
        _take_turns(runs)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_run_process, run) for run in pairs]:
            done.result()
    records = collect(folder, lr)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text("".join(json.dumps(record) + "\n" for record in records))
        draw(records).savefig(json_file.with_suffix(".png"))
    for setting in settings:
        print(f"\n{setting}, against {against}\n{table(summary(records, against), setting)}")


def check_names(methods, settings, model: str) -> None:
    """InputError for an unknown row or setting, before anything runs."""
    for name in methods:
        if name not in (known := (*ROWS, *BEST, "trl")):
            raise InputError(f"--methods {name}: choose from {', '.join(known)}")
    for setting in settings:
        if setting not in SETTINGS:
            raise InputError(f"--settings {setting}: choose from {', '.join(SETTINGS)}")
    if "trl" in methods and settings != ("arithmetic",):
        flags = f"--methods trl --settings {' '.join(settings)}"
        raise InputError(f"{flags}: trl is raced in arithmetic only")
    if "words" in settings and model == "tiny":
        raise InputError("--settings words: tiny cannot read; give --model, see runs/smollm2.sh")


def make_run(setting: str, row: str, seed: int, steps: int, every: int, *options) -> "Run":
    """The run of a row; options are Run's, from eval_problems to folder.

    A row of BEST has its winner's flags, and steps and evaluations by completions.
    """
    if row not in BEST:
        return Run(setting, row, seed, steps, every, *options)
    best = winner(log.read_rows(SEARCH), row, setting)
    steps, every = rescaled(setting, best["completions"], steps, every)
    return Run(setting, row, seed, steps, every, *options, best["flags"])


def rescaled(setting: str, completions: int, steps: int, every: int) -> tuple[int, int]:
    """(steps, every) for another number of completions a step than the setting's GRPO samples, so
    that as many are sampled in all, and between evaluations. To the nearest whole step."""
    ratio = SETTINGS[setting].prompts * config.Config.group_size / completions
    return round(steps * ratio), max(1, round(every * ratio))


def winner(trials: list[dict], row: str, setting: str) -> dict:
    """A trial of the configuration that was at the target soonest, on average over its seeds.

    trials: the rows of bench/search.py. InputError if a search of the row has not ended, if there
    is none, or if no configuration was at the target with every seed.
    """
    own = [t for t in trials if t["setting"] == setting and t["method"] in BEST[row]]
    counts = Counter((trial["method"], trial["trials"]) for trial in own)
    if not own or any(there < planned for (_, planned), there in counts.items()):
        command = f"python -m bench search --settings {setting}"
        raise InputError(f"{row}: {SEARCH} has no whole search in {setting}; run {command}")
    found = {}
    for trial in own:
        found.setdefault((trial["method"], trial["flags"]), []).append(trial)
    best = min(found.values(), key=mean_seconds)
    if mean_seconds(best) == math.inf:
        raise InputError(f"{row}: no configuration was at the target in {setting} with all seeds")
    return best[0]


def mean_seconds(trials: list[dict]) -> float:
    """Seconds to the target of a configuration; infinite if a seed was not there."""
    times = [trial["seconds"] for trial in trials]
    return math.inf if None in times else statistics.mean(times)


@dataclass(frozen=True)
class Run:
    """One run of one row with one seed."""

    setting: str
    row: str
    seed: int
    steps: int  # the last one
    every: int  # steps between evaluations
    eval_problems: int
    lr: float | None
    model: str
    folder: Path  # of all runs
    flags: str | None = None  # of train.py, for a row that is not in ROWS

    @property
    def out_dir(self) -> Path:
        name = f"{self.row}-seed{self.seed}" + (f"-lr{self.lr:g}" if self.lr else "")
        return self.folder / self.setting / name

    @property
    def turns(self) -> int:
        """Evaluations after the base model's; a turn ends with one."""
        return math.ceil(self.steps / self.every)

    def is_at(self, step: int) -> bool:
        """Whether the log has the step with its evaluation, and `finish` was called."""
        rows = log.read_rows(self.out_dir / "log.jsonl")
        evaluated = any(row["step"] >= step and "eval/avg@4" in row for row in rows)
        return evaluated and (self.out_dir / "race.json").exists()

    @property
    def wall(self) -> float:
        """Seconds that its turns took, with evaluations and loading."""
        facts = self.out_dir / "race.json"
        return json.loads(facts.read_text()).get("wall", 0.0) if facts.exists() else 0.0

    def args(self) -> list[str]:
        """train.py's arguments, to start the run, or to resume it if it has the same flags."""
        args = ["--out-dir", str(self.out_dir), "--steps", str(self.steps)]
        args += ["--resume"] * (self.out_dir / "config.json").exists()
        setting = SETTINGS[self.setting]
        flags = ROWS[self.row] if self.flags is None else self.flags
        prompts = setting.prompts * (2 if self.row in WIDE else 1)
        args += ["--model", self.model, "--prompts-per-step", str(prompts), *setting.flags.split()]
        args += [*flags.split(), "--data", self.setting, "--eval-data", setting.eval_data]
        args += ["--eval-every", str(self.every), "--eval-problems", str(self.eval_problems)]
        args += ["--save-every", str(10 * self.every), "--keep-checkpoints", "1"]
        args += ["--seed", str(self.seed)]
        return args + (["--lr", str(self.lr)] if self.lr else [])

    def finish(self, **facts) -> None:
        """Record how the run was made: threads, and whether it was alone on the machine."""
        (self.out_dir / "race.json").write_text(json.dumps(facts))


def _take_turns(runs: list[Run]) -> None:
    """Run a few steps of each in turn, so that a slow minute of the machine slows all of them."""
    print(
        f"\n{runs[0].setting}, seed {runs[0].seed}: mean of the last {WINDOW} evaluations, "
        f"seconds of training"
    )
    print("  step" + "".join(f"{run.row:>20s}" for run in runs))  # the first row's steps
    for number in range(1, max(run.turns for run in runs) + 1):
        line = f"{min(number * runs[0].every, runs[0].steps):6d}"
        for run in runs:
            upto = min(number * run.every, run.steps)
            turn(run, upto)
            record = read_record(run.out_dir)
            accuracy = [value for step, value in smoothed(record) if step <= upto][-1]
            line += f"{accuracy:11.3f} {sum(record['step_time'][: upto + 1]):6.0f} s"
            print("\r" + line, end="", flush=True)
        print()


def turn(run: Run, upto: int) -> None:
    """Train to a step in this process. TRL's trainer runs all of its steps in the first turn."""
    if run.is_at(upto):
        return
    started, before = time.monotonic(), run.wall
    if run.row == "trl":
        evaluation = (run.every, SETTINGS[run.setting].eval_data, run.eval_problems)
        cfg, rows = trl.curve(run.steps, run.seed, run.lr, *evaluation)
        run.out_dir.mkdir(parents=True, exist_ok=True)
        log.write_rows(run.out_dir / "log.jsonl", rows)
        checkpoint.write_config(run.out_dir, asdict(cfg), 1)
    else:  # --steps stays the last one of all, because the learning rate falls to 0 there
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(config.parse_config(run.args()), until=upto)
    wall = round(before + time.monotonic() - started, 2)
    run.finish(threads=torch.get_num_threads(), alone=True, wall=wall)
    if not run.is_at(upto):
        raise SystemExit("stopped; the same command continues")


def _run_process(run: Run) -> None:
    """A whole run in a process of its own, with one thread."""
    if run.is_at(run.steps):
        return
    command = [sys.executable, "train.py", *run.args()]
    with open(os.devnull, "w") as nowhere:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=nowhere, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    run.finish(threads=1, alone=False, peak_gib=usage.ru_maxrss / 2**20)
    if status or not run.is_at(run.steps):  # a run that was stopped ends with 0, too
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"{' '.join(command)} ended early, with {code}")
    accuracy = final(read_record(run.out_dir))
    print(f"{run.out_dir}: {accuracy:.3f} after {run.steps} steps", flush=True)


# ---------------------------------------------------------------------------- records


def read_record(out_dir: Path) -> dict:
    """What is kept of a run: {setting, row, seed, lr, threads, alone, columns}.

    Each column is a list with an entry for each step from 0 on, null if the log has none.
    """
    settings = json.loads((out_dir / "config.json").read_text())["config"]
    rows = log.read_rows(out_dir / "log.jsonl")
    columns = {name: [_short(row.get(name)) for row in rows] for name in COLUMNS}
    columns["step_time"][0] = 0.0
    run = {
        "setting": settings["data"],
        "row": out_dir.name.split("-seed")[0],
        "seed": settings["seed"],
        "lr": settings["lr"],
    }
    return run | json.loads((out_dir / "race.json").read_text()) | columns


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect(folder: Path, lr: float | None = None) -> list[dict]:
    """The records of all finished runs in a folder at this --lr (None: train.py's own).

    An unfinished run has no final accuracy.
    """
    records = []
    for path in [path.parent for path in sorted(folder.glob("*/*/race.json"))]:
        if path.name.partition("-lr")[2] == (f"{lr:g}" if lr else ""):
            steps = json.loads((path / "config.json").read_text())["config"]["steps"]
            if log.read_rows(path / "log.jsonl")[-1]["step"] == steps:
                records.append(read_record(path))
    return records


def load(*files: Path) -> list[dict]:
    """The records of committed logs."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def smoothed(record: dict) -> list[tuple[int, float]]:
    """(step, mean of the last three evaluations up to it), without the base model's evaluation.

    The first two means are of fewer evaluations and do not count as reaching a target.
    """
    found = [(step, x) for step, x in enumerate(record["eval/avg@4"]) if x is not None]
    values = [value for _, value in found]
    means = []
    for number, (step, _) in enumerate(found):
        last = values[max(1, number - WINDOW + 1) : number + 1]
        means.append((step, statistics.mean(last or values[:1])))
    return means


def final(record: dict) -> float:
    """Mean of the last three evaluations."""
    return smoothed(record)[-1][1]


def reached(record: dict, accuracy: float) -> float:
    """The first step whose mean of three evaluations is at the accuracy; infinite if none is."""
    return next((s for s, value in smoothed(record)[WINDOW:] if value >= accuracy), math.inf)


def seconds(record: dict, records: list[dict]) -> list[float]:
    """Seconds of training [steps + 1] up to each step.

    They are the run's own if it was alone on the machine. Otherwise they are the mean, step by
    step, of the same row's runs that were; beyond their last step, the mean of their last ten.
    """
    own = [record]
    if not record["alone"]:
        same = lambda other: all(other[key] == record[key] for key in ("setting", "row"))
        own = [other for other in records if other["alone"] and same(other)]
    if not own:
        return [math.nan] * len(record["step_time"])
    columns = zip(*(run["step_time"] for run in own), strict=False)
    steps = [statistics.mean(column) for column in columns]
    steps += [statistics.mean(steps[-10:])] * (len(record["step_time"]) - len(steps))
    return list(itertools.accumulate(steps[: len(record["step_time"])]))


def tokens(record: dict) -> list[float]:
    """Tokens generated plus tokens trained on (with prompts), [steps + 1] up to each step.

    TRL's trainer reports only the former, which count twice.
    """
    pairs = zip(record["tokens/generated"], record["tokens/trained"], strict=True)
    return list(itertools.accumulate((a or 0) + (b or 0) for a, b in pairs))


# ---------------------------------------------------------------------------- tables


def interval(
    values: list[float], middle=statistics.median, draws: int = 10_000
) -> tuple[float, float, float]:
    """(middle, low, high): an average over seeds and its 95 % bootstrap interval."""
    rng = random.Random(0)
    found = sorted(middle(rng.choices(values, k=len(values))) for _ in range(draws))
    return middle(values), found[draws // 40], found[-1 - draws // 40]


def scales(records: list[dict]) -> dict:
    """The axes of the race: {name: function of a record that gives [steps + 1] figures}."""
    return {
        "steps": lambda run: range(len(run["step_time"])),
        "seconds": lambda run: seconds(run, records),
        "tokens": tokens,
    }


def summary(records: list[dict], against: str = "grpo") -> list[dict]:
    """The figures of each setting and row, paired with the GRPO runs of the same seeds.

    reached/* and absolute/* say when 0.98 of GRPO's final accuracy, and 0.8, are reached, on three
    axes. Ratios are the figure of the row `against`, with the same seed, over the row's: 2 is twice
    as soon, 0 is never, and infinite is never for the row `against` alone. Triples are (middle,
    low, high) over seeds: medians of ratios, means of differences.
    """
    found = []
    found_by = {(run["setting"], run["row"], run["seed"]): run for run in records}
    twin = lambda run, row: found_by.get((run["setting"], row, run["seed"]))
    for setting, name in itertools.product(SETTINGS, COLORS):
        runs = [run for run in records if (run["setting"], run["row"]) == (setting, name)]
        runs = [run for run in runs if twin(run, "grpo") and twin(run, against)]
        if runs:
            baselines, rivals = ([twin(run, row) for run in runs] for row in ("grpo", against))
            row = {"setting": setting, "row": name, "seeds": len(runs)}
            row |= _targets(runs, baselines, rivals, scales(records))
            found.append(row | _averages(setting, runs, baselines, records))
    return found


def _targets(runs: list[dict], baselines: list[dict], rivals: list[dict], axes: dict) -> dict:
    """When each target of the baselines is reached on each axis, and how much later by rivals."""

    def cost(run, axis, accuracy):
        step = reached(run, accuracy)
        return axes[axis](run)[step] if step < math.inf else math.inf

    figures = {}
    for goal, axis in itertools.product(("reached", "absolute"), axes):
        costs, ratios = [], []
        for run, baseline, rival in zip(runs, baselines, rivals, strict=True):
            accuracy = REACHED * final(baseline) if goal == "reached" else ABSOLUTE
            own = cost(run, axis, accuracy)
            costs.append(own)
            ratios.append(cost(rival, axis, accuracy) / own if own < math.inf else 0.0)
        figures[f"{goal}/{axis}"] = statistics.median(costs)
        figures[f"{goal}/{axis}_ratio"] = interval(ratios)
    return figures


def _averages(setting: str, runs: list[dict], baselines: list[dict], records: list[dict]) -> dict:
    """Accuracy at the end and at equal time, seconds per step, and what was kept."""
    pairs = zip(runs, baselines, strict=True)
    gaps = [final(run) - final(baseline) for run, baseline in pairs]
    time_limit = min(seconds(run, records)[-1] for run in records if run["setting"] == setting)

    def in_time(run):
        spent = seconds(run, records)
        return [value for step, value in smoothed(run) if spent[step] <= time_limit][-1]

    def per_step(run):
        return seconds(run, records)[-1] / (len(run["step_time"]) - 1)

    figures = {
        "final": statistics.mean(map(final, runs)),
        "final_gap": interval(gaps, statistics.mean),
        "at_equal_time": statistics.mean(map(in_time, runs)),
        "seconds_per_step": statistics.mean(map(per_step, runs)),
    }
    for column in ("kept/prompts", "kept/tokens", "weight/ess"):
        values = [value for run in runs for value in run[column] if value is not None]
        figures[column] = statistics.mean(values) if values else math.nan
    peaks = [run["peak_gib"] for run in runs if "peak_gib" in run]
    return figures | {"peak_gib": max(peaks, default=math.nan)}


def table(rows: list[dict], setting: str) -> str:
    """A setting's rows of `summary`, as Markdown."""

    def triple(values, digits=2):
        return "{1:.{0}f} ({2:.{0}f} to {3:.{0}f})".format(digits, *values)

    def spent(value):
        return f"{value:.0f} s" if value < math.inf else "never"

    columns = {
        "": lambda row: row["row"],
        "seeds": lambda row: str(row["seeds"]),
        f"to {REACHED} of GRPO's final": lambda row: spent(row["reached/seconds"]),
        "speed-up (95 %)": lambda row: triple(row["reached/seconds_ratio"]),
        "steps": lambda row: f"{row['reached/steps']:.0f}",
        "fewer tokens by": lambda row: triple(row["reached/tokens_ratio"]),
        f"to {ABSOLUTE}": lambda row: spent(row["absolute/seconds"]),
        "speed-up": lambda row: triple(row["absolute/seconds_ratio"]),
        "final accuracy": lambda row: f"{row['final']:.3f}",
        "minus GRPO's (95 %)": lambda row: triple(row["final_gap"], 3),
        "at equal time": lambda row: f"{row['at_equal_time']:.3f}",
        "s / step": lambda row: f"{row['seconds_per_step']:.2f}",
        "prompts kept": lambda row: f"{row['kept/prompts']:.2f}",
        "tokens kept": lambda row: f"{row['kept/tokens']:.2f}",
        "ESS": lambda row: f"{row['weight/ess']:.0f}",
        "GiB": lambda row: f"{row['peak_gib']:.2f}",
    }
    cells = [list(columns), ["---"] * len(columns)]
    for row in rows:
        if row["setting"] == setting:
            cells.append([cell(row) for cell in columns.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells)


# ---------------------------------------------------------------------------- pictures


COLORS = {  # in the order of the tables; trl is the one row that is not in ROWS
    "grpo": "#000000",
    "grpo_zero": "#999999",
    "best_grpo": "#555555",
    "cppo": "#D55E00",
    "pods": "#999933",
    "cppo_allocated": "#E69F00",
    "greso": "#56B4E9",
    "dynamic": "#882255",
    "mopps": "#44AA99",
    "dppo": "#0072B2",
    "dppo_floor": "#CC79A7",
    "pps": "#009E73",
    "best_pps": "#005F45",
    "uniform": "#F0E442",
    "trl": "#8B4513",
}


def draw(records: list[dict], axis: str = "seconds", rows=tuple(COLORS)) -> Figure:
    """Accuracy (means of three evaluations) over seconds, tokens or steps, a panel per setting.

    Seeds are thin, their mean at each step is thick, a single seed is in between, and 0.98 of
    GRPO's final accuracy is dotted. Lines start with the base model's evaluation and go on from the
    third one. Panels end at twice GRPO's end.
    """
    used = {record["setting"] for record in records}
    settings = [setting for setting in SETTINGS if setting in used]
    figure = Figure(figsize=(6 * len(settings), 3.6), dpi=110, layout="constrained")
    scale = scales(records)[axis]
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for panel, setting in zip(panels, settings, strict=True):
        for name in rows:
            runs = [run for run in records if (run["setting"], run["row"]) == (setting, name)]
            _draw_row(panel, runs, scale, name)
        grpo = [run for run in records if (run["setting"], run["row"]) == (setting, "grpo")]
        end = panel.get_xlim()[1]
        if grpo:
            goal = statistics.mean(REACHED * final(run) for run in grpo)
            label = f"{REACHED} of grpo's final"
            panel.axhline(goal, color="#000000", ls=":", lw=1, label=label)
            end = min(end, 2 * max(scale(run)[-1] for run in grpo))
        xlabel = "seconds of training" if axis == "seconds" else axis
        panel.set(title=setting, xlabel=xlabel, xlim=(0, end))
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("avg@4, held out (mean of 3 evaluations)")
    return figure


def _draw_row(panel, runs: list[dict], scale, name: str) -> None:
    """The lines of one row: its seeds, and their mean."""
    lines, color = [], COLORS[name]
    for run in runs:
        points = smoothed(run)[:1] + smoothed(run)[WINDOW:]
        lines.append([(scale(run)[step], value) for step, value in points])
        panel.plot(*zip(*lines[-1], strict=True), color=color, lw=0.6, alpha=0.35)
    if lines:
        columns = zip(*lines, strict=False)
        mean = [tuple(map(statistics.mean, zip(*points, strict=True))) for points in columns]
        width, label = 2 if len(runs) > 1 else 1, f"{name} ({len(runs)})"
        panel.plot(*zip(*mean, strict=True), color=color, lw=width, label=label)
