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
all, and as many between evaluations. Finished runs are not repeated. bench/records.py makes the
tables and pictures.
"""

import contextlib
import io
import itertools
import json
import math
import os
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

import config
import train
from bench import JsonFile, records, trl
from bench.code import this_code
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
    found = records.collect(folder, lr)
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text("".join(json.dumps(record) + "\n" for record in found))
        records.draw(found).savefig(json_file.with_suffix(".png"))
    for setting in settings:
        rows = records.table(records.summary(found, against), setting)
        print(f"\n{setting}, against {against}\n{rows}")


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
        """Record how the run was made: code, threads, and whether it was alone on the machine."""
        (self.out_dir / "race.json").write_text(json.dumps(facts | this_code()))


def _take_turns(runs: list[Run]) -> None:
    """Run a few steps of each in turn, so that a slow minute of the machine slows all of them."""
    print(
        f"\n{runs[0].setting}, seed {runs[0].seed}: mean of the last {records.WINDOW} evaluations, "
        f"seconds of training"
    )
    print("  step" + "".join(f"{run.row:>20s}" for run in runs))  # the first row's steps
    for number in range(1, max(run.turns for run in runs) + 1):
        line = f"{min(number * runs[0].every, runs[0].steps):6d}"
        for run in runs:
            upto = min(number * run.every, run.steps)
            turn(run, upto)
            record = records.read_record(run.out_dir)
            accuracy = [value for step, value in records.smoothed(record) if step <= upto][-1]
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
    accuracy = records.final(records.read_record(run.out_dir))
    print(f"{run.out_dir}: {accuracy:.3f} after {run.steps} steps", flush=True)
