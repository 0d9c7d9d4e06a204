"""The running check of unbiasedness over whole runs: `python -m bench check`."""

import math

from bench import JsonFile, run, sized, write_json
from run import Run
from runtime import InputError
from train import Trainer


class Underweighted(Trainer):
    """A faulty twin that the check must find: the weights of both levels are 10 % too small."""

    def prune_prompts(self, *args):
        chosen = super().prune_prompts(*args)
        return chosen._replace(weights=0.9 * chosen.weights)

    def prune_completions(self, *args):
        keep, weights = super().prune_completions(*args)
        return keep, 0.9 * weights


RUNS = (  # name of the row, --method, trainer
    ("grpo_zero", "grpo_zero", Trainer),
    ("dppo", "dppo", Trainer),
    ("pps", "pps", Trainer),
    ("pps, weights x 0.9", "pps", Underweighted),
    ("dppo_floor", "dppo_floor", Trainer),
    ("cppo", "cppo", Trainer),
)
WITHOUT_CHANCE = ("grpo_zero", "dppo_floor", "cppo")  # two draws are as good as many


def main(
    steps: int = 60,
    every: int = 6,
    draws: int = 64,
    methods: str = "",
    flags: str = "",
    json_file: JsonFile = None,
) -> None:
    """Means and standard errors of the running check over whole runs, both levels at once.

    The runs are the exact rules, a twin of pps whose weights are 10 % too small, and two biased
    rules.

    Args:
        steps: steps of each run
        every: steps between checks
        draws: pruned gradients of a check; the standard error of bias2 falls as 1 / draws
        methods: only these, separated by commas; pps is checked with its twin
        flags: flags of train.py for every run, such as --flags="--model FOLDER --data words"
        json_file: where to write the rows {rule, key, mean, error, checks}
    """
    if every > steps:
        raise InputError(f"--steps {steps} --every {every}: no check; give more steps")
    rows = []
    for name, method, trainer_class in RUNS:
        if methods and method not in methods.split(","):
            continue
        args = ["--steps", str(steps), "--check-every", str(every), *sized(method, flags)]
        number = 2 if method in WITHOUT_CHANCE else draws
        kind = type("Checked", (Run,), {"check_draws": number})
        _, log_rows = run(args, trainer_class, kind=kind)
        found = [row for row in log_rows if row.get("check/norm")]
        norms = [row["check/norm"] for row in found]
        for key in ("check/bias2", "check/scale", "check/variance"):
            mean, error = mean_and_error([row[key] for row in found], norms)
            result = {"rule": name, "key": key, "mean": mean, "error": error, "checks": len(found)}
            rows.append(result)
    print(f"\n{'':20s} {'':16s} {'mean':>10s} {'std. error':>10s}  mean / error")
    for row in rows:
        ratio = row["mean"] / (row["error"] or math.nan)
        print(
            f"{row['rule']:20s} {row['key']:16s} {row['mean']:10.5f} {row['error']:10.5f}  "
            f"{ratio:+6.1f}  ({row['checks']} checks)"
        )
    write_json(json_file, rows)


def mean_and_error(values: list[float], norms: list[float]) -> tuple[float, float]:
    """Mean of the steps' values, weighted by their |full|, and its standard error.

    Without weights, steps with hardly a gradient would decide the mean; with |full|^2, a few large
    ones would (runs/LOG.md).
    """
    count, total = len(values), math.fsum(norms)
    mean = math.fsum(value * norm for value, norm in zip(values, norms, strict=True)) / total
    pairs = zip(values, norms, strict=True)
    rest = math.fsum(((value - mean) * norm) ** 2 for value, norm in pairs)
    if count == 1:
        return mean, math.nan
    return mean, math.sqrt(rest * count / (count - 1)) / total
