"""
The tuned baseline: which batch and learning rate take a method to GRPO's accuracy soonest.

    python -m bench search --minutes 110                        the first round, of 24 each
    python -m bench search --second --minutes 40                the second, of 8 each
    python -m bench race --methods grpo,best_grpo,best_pps      the winners, with seeds of the race

A trial is one configuration with one seed that the race never has. Every trial samples as many
completions as 32 x 16 GRPO in the race, evaluates after as many, and its learning rate falls to 0
over its own steps. Its score is the seconds of training, without evaluations, until the mean of
three evaluations is at 0.98 of 32 x 16 GRPO's final accuracy.

Successive halving with seconds as the resource, because seconds are the score. A method has an
equal share of --minutes in each setting, in three equal rungs. During a rung the trial with the
fewest seconds of training always goes next, up to its next evaluation. So all take turns, and all
have trained about equally long when the rung's time is over. Then the better half of the
configurations goes on where it stopped. Those at the target with all seeds come first, by seconds;
then the others, by accuracy after the same seconds. A trial that is at the target stops.

A second round tries 8 more of each method, which the winners of the first suggested: for GRPO half
steps of the learning rate and groups of 4, for pps a wider window and fewer completions. Its rows
are added to those of the first, and the best of all is raced.

grpo is not searched by default: it makes the same steps as grpo_zero, only slower. What is dropped
is appended to the file of --json after each rung, the rest after the last one. After a kill the
same command continues with the file and the folder; a search that has ended is not repeated.
"""

import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import numpy

import config
import sampler
from bench import JsonFile, race, records
from bench.code import this_code
from runtime import InputError, log

RUNGS = 3


class Configuration(NamedTuple):
    method: str
    prompts: int  # candidates of a step
    group: int
    rate: float  # r_q, the share of the candidates that is not rolled out
    lr: float
    drop: float | None = None  # r_o, the share of the tokens that is not trained on; None: default

    @property
    def completions(self) -> int:
        """Completions sampled in a step."""
        return sampler.kept_prompts(self.prompts, self.rate) * self.group

    @property
    def flags(self) -> str:
        rate = f" --prompt-prune-rate {self.rate:g}" if self.rate else ""
        rate += f" --completion-prune-rate {self.drop:g}" if self.drop else ""
        size = f"--prompts-per-step {self.prompts} --group-size {self.group}{rate}"
        return f"--method {self.method} {size} --lr {self.lr:g}"


def configurations(method: str, lr: float, second: bool = False) -> list[Configuration]:
    """The 24 of a method, or the 8 of the second round, in the order of their first turns; lr is
    that of 32 x 16 completions.

    Learning rates are around lr times the square root of the completions over 512: at half of it,
    once and twice, or for pps, which also has a rate to choose, at 0.7 and 1.4 times.
    """
    product = itertools.product
    sizes = product((4, 8, 16, 32), (8, 16), (0.0,), (0.5, 1.0, 2.0), (None,))
    if method == "pps":
        sizes = product((16, 32, 64), (8, 16), (0.6, 0.75), (0.7, 1.4), (None,))
    if second and method == "pps":
        sizes = product((64, 128), (8, 16), (0.6,), (1.4,), (0.8, 0.9))
    elif second:
        between = product((16, 32), (8,), (0.0,), (0.7, 1.4), (None,))
        sizes = [*between, *product((32, 64), (4,), (0.0,), (1.0, 1.4), (None,))]
    found = []
    for prompts, group, rate, factor, drop in sizes:
        one = Configuration(method, prompts, group, rate, lr, drop)
        own = lr * factor * math.sqrt(one.completions / 512)
        found.append(one._replace(lr=float(f"{own:.2g}")))
    return found


class Curve(NamedTuple):
    """What a trial has shown so far."""

    points: list[tuple[float, float]]  # (seconds, mean of the last three accuracies), or empty
    reached: float  # seconds to the target; infinite if it is not there
    ended: bool  # at the target, or after its last step

    @property
    def seconds(self) -> float:
        return self.points[-1][0] if self.points else 0.0


def main(
    methods: str = "grpo_zero,pps",
    settings: tuple[str, ...] = ("arithmetic", "arithmetic-mixed"),
    minutes: float = 150.0,
    seeds: int = 2,
    first_seed: int = 100,
    second: bool = False,
    target: float | None = None,
    steps: int | None = None,
    every: int = 3,
    eval_problems: int = 150,
    model: str = "tiny",
    folder: Path = Path("out-search"),
    json_file: JsonFile = race.SEARCH,
) -> None:
    """Search each method's batch, group and learning rate, and print every trial and the winners.

    Args:
        methods: of grpo, grpo_zero and pps, separated by commas
        settings: as in the race
        minutes: of all methods and settings together, with evaluations
        seeds: of each configuration
        first_seed: the first of them, at least 100, because lower ones are the race's
        second: the second round, which has other configurations
        target: the accuracy to reach; default: 0.98 of grpo's final one in runs/race.jsonl
        steps: of 32 x 16 completions each, of which others make more or fewer; default: as the race
        every: such steps between evaluations
        eval_problems: problems of an evaluation, 4 completions each
        model: what the trials start from
        folder: where the trials are
        json_file: where a row is appended for every trial
    """
    race.check_names((), settings, model)
    for method in methods.split(","):
        if method not in ("grpo", "grpo_zero", "pps"):
            raise InputError(f"--methods {method}: choose from grpo, grpo_zero, pps")
    if first_seed < 100:
        raise InputError(f"--first-seed {first_seed}: must be 100 or more; lower ones are raced")
    goals = {name: race_target(name) if target is None else target for name in settings}
    brackets = list(itertools.product(settings, methods.split(",")))
    for setting, method in brackets:
        of_all = [*race.SETTINGS[setting].flags.split(), "--model", model]
        trials = {}
        lr = config.resolve(config.parse_config(of_all)).lr
        for one in configurations(method, lr, second):
            length = (steps or race.SETTINGS[setting].steps, every)
            length = race.rescaled(setting, one.completions, *length)
            name = one.flags.replace("--", "").replace(" ", "-")
            rest = (*length, eval_problems, None, model, folder, one.flags)
            numbers = range(first_seed, first_seed + seeds)
            trials[one] = [race.Run(setting, name, seed, *rest) for seed in numbers]
        halve(trials, goals[setting], 60 * minutes / len(brackets), json_file)
    rows = log.read_rows(json_file)
    for setting, method in brackets:
        own = [row for row in rows if (row["setting"], row["method"]) == (setting, method)]
        print(f"\n{setting}, {method}, to an accuracy of {goals[setting]:.3f}\n{table(own)}")
    for setting, (name, own) in itertools.product(settings, race.BEST.items()):
        if set(own) & set(methods.split(",")):
            try:
                print(f"\n{name} in {setting}: {race.winner(rows, name, setting)['flags']}")
            except InputError as problem:
                print(f"\n{problem}")


def race_target(setting: str) -> float:
    """0.98 of the final accuracy of 32 x 16 GRPO, the mean over the seeds of the committed race."""
    path = Path("runs/race.jsonl")
    runs = [run for run in records.load(path) if (run["setting"], run["row"]) == (setting, "grpo")]
    if not runs:
        raise InputError(f"--settings {setting}: {path} has no run of grpo there; give --target")
    return records.REACHED * statistics.mean(map(records.final, runs))


# ---------------------------------------------------------------------------- successive halving


def halve(
    trials: dict[Configuration, list[race.Run]], target: float, budget: float, file: Path
) -> None:
    """Write the row of every trial of a method in a setting; budget: seconds of wall clock.

    The file is the state: a configuration that it holds was dropped in the rung that it says.
    """
    flags = {one.flags for one in trials}
    setting, count = next(iter(trials.values()))[0].setting, sum(map(len, trials.values()))
    while True:
        known = log.read_rows(file)
        own = [row for row in known if row["setting"] == setting and row["flags"] in flags]
        alive = [one for one in trials if one.flags not in {row["flags"] for row in own}]
        if not alive:
            return
        rung = 1 + max((row["rung"] for row in own), default=0)
        last = rung == RUNGS or len(alive) == 1
        runs = [run for one in alive for run in trials[one]]
        spent = sum(row["wall"] for row in own)
        curves = advance(runs, target, budget * (1 if last else rung / RUNGS) - spent)
        clock = min((c.seconds for c in curves.values() if not c.ended), default=math.inf)
        alive.sort(key=lambda one: score([curves[run] for run in trials[one]], clock))
        rows = [
            {
                "setting": setting, "method": one.method, "flags": one.flags, "seed": run.seed,
                "completions": one.completions, "steps": run.steps, "every": run.every,
                "target": target, "trials": count, "rung": rung, "seconds": curves[run].reached,
                "wall": run.wall, "points": curves[run].points, **this_code(),
            }
            for one in alive[0 if last else (len(alive) + 1) // 2 :]
            for run in trials[one]
        ]  # fmt: skip
        print(f"{setting}: {len(rows)} of {len(runs)} trials end in rung {rung}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        log.write_rows(file, known + rows)  # all of a rung's rows, or none


def advance(runs: list[race.Run], target: float, budget: float) -> dict[race.Run, Curve]:
    """Train them until they have had `budget` seconds of wall clock, earlier rungs included.

    However small it is, every run comes to its first evaluation.
    """
    curves = {run: curve_of(run, target) for run in runs}
    while going := [run for run in runs if not curves[run].ended]:
        run = min(going, key=lambda run: curves[run].seconds)
        if curves[run].points and sum(run.wall for run in runs) >= budget:
            break
        turn = max(1, len(curves[run].points))  # the first point is the base model's
        race.turn(run, min(turn * run.every, run.steps))
        curves[run] = curve_of(run, target)
        seconds, accuracy = curves[run].points[-1]
        name = f"{run.setting} {run.flags} --seed {run.seed}"
        print(f"{name}: {accuracy:.3f} after {seconds:.1f} s", flush=True)
    return curves


def curve_of(run: race.Run, target: float) -> Curve:
    """The Curve of a trial, from its log."""
    if not (run.out_dir / "race.json").exists():
        return Curve([], math.inf, False)
    record = records.read_record(run.out_dir)
    spent = [round(seconds, 3) for seconds in itertools.accumulate(record["step_time"])]
    points = [(spent[step], round(value, 4)) for step, value in records.smoothed(record)]
    step = records.reached(record, target)
    reached = spent[step] if step < math.inf else math.inf
    return Curve(points, reached, reached < math.inf or len(points) > run.turns)


def score(curves: list[Curve], clock: float) -> tuple[int, float]:
    """Sorts configurations by the curves of their seeds: at the target by mean seconds to it, then
    the others by mean accuracy after `clock` seconds, between two evaluations on a line."""
    if max(one.reached for one in curves) < math.inf:
        return 0, statistics.mean(one.reached for one in curves)
    at_clock = [numpy.interp(clock, *zip(*one.points, strict=True)) for one in curves]
    return 1, -statistics.mean(map(float, at_clock))


def table(rows: list[dict]) -> str:
    """Markdown: each configuration, its last rung, and of each seed the seconds to the target, the
    seconds trained and the accuracy then; the best ones first."""
    found = {}
    for row in rows:
        found.setdefault(row["flags"], []).append(row)

    def order(runs):
        seconds = race.mean_seconds(runs)
        return (seconds, -runs[0]["rung"], -statistics.mean(run["points"][-1][1] for run in runs))

    lines = ["| flags | rung | seconds | trained | accuracy |", "|---|---|---|---|---|"]
    for flags, runs in sorted(found.items(), key=lambda pair: order(pair[1])):
        reached = ", ".join("-" if r["seconds"] is None else f"{r['seconds']:.1f}" for r in runs)
        trained = ", ".join(f"{run['points'][-1][0]:.1f}" for run in runs)
        accuracy = ", ".join(f"{run['points'][-1][1]:.3f}" for run in runs)
        lines.append(f"| {flags} | {runs[0]['rung']} | {reached} | {trained} | {accuracy} |")
    return "\n".join(lines)
