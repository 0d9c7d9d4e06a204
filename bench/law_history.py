"""The trial of runs/law-history.jsonl: prompts by the class of their last group (new; none right, some,
all) against a plain batch of as many prompts. It ran on 28 November 2026 beside bench/law.py of commit
151216d (adaptive's flag was --completion-prune-rate then), with rates 2e-4, 3e-4 and 4.5e-4:

    python -m bench.law_history 2

and then, for both rules, the fresh seeds at the rates 3e-4 and 4.5e-4 that their searches had not chosen.
It did not win, so this commit keeps it for the record, and the next one removes it.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

import dppo
import metrics
import sampler
import train
from bench import law
from runtime import log
from tasks import arithmetic

NEW, NONE, SOME, ALL = range(4)
FLOOR, MEMORY = 0.1, 10
tables = {}
plain_row = metrics.row


def row(cfg, **figures):
    tables.update(figures)
    return plain_row(cfg, **figures)


metrics.row = row


class History(sampler.PromptHistory):
    def __init__(self, n):
        super().__init__(n)
        self.kind = torch.zeros(n, dtype=torch.long)
        self.sums = torch.zeros(3, 4, dtype=torch.float64)  # squares, costs, count by class

    def prune(self, name, rate, prompts, generator, minibatches=1):
        if name == "none":
            return super().prune(name, rate, prompts, generator, minibatches)
        kind = self.kind[prompts]
        squares, costs, count = self.sums
        whole = self.sums.sum(1)

        def mean(part, total):
            known = part / count.clamp(min=1e-300)
            return torch.where(count > 0, known, total / whole[2].clamp(min=1e-300))

        priority = torch.ones(4, dtype=torch.float64)
        if whole[2] > 0:
            priority = (mean(squares, whole[0]) / mean(costs, whole[1])).sqrt()
        size = priority[kind]
        size = size.clamp(min=FLOOR * size.mean().item() + 1e-300)
        K = sampler.kept_prompts(len(prompts), rate)
        p = dppo.pps_keep_prob(size, torch.ones_like(size), K)
        order = torch.from_numpy(generator.permutation(len(p)))
        order = order[p[order].argsort(stable=True)]
        keep = dppo.systematic(p, order, start=generator.random())
        self.asked = kind[keep]
        self.asked_prompts = prompts[keep]
        return keep, dppo.ht_weights(keep, p)

    def learn(self, rest):
        t = tables
        size = dppo.contribution_size(t["advantages"], t["scale"], t["energy"], 0.0)
        squares = size.square().sum(1)
        costs = rest * t["cost"].sum(1) + (t["cost"] * t["keep"]).sum(1)
        self.sums *= 1 - 1 / MEMORY
        for part, values in enumerate((squares, costs.double(), torch.ones_like(squares))):
            self.sums[part].index_add_(0, self.asked, values * t["prompt_weights"])
        r = t["rewards"]
        dead = torch.where(r[:, 0] > 0, ALL, NONE)
        self.kind[self.asked_prompts] = torch.where(r.amax(1) == r.amin(1), dead, SOME)


class Trainer(train.Trainer):
    ratio = 1.0

    def __init__(self, *args):
        super().__init__(*args)
        self.history = History(len(self.train_set))

    def step(self, step):
        found = super().step(step)
        if hasattr(self.history, "asked"):
            self.history.learn(self.ratio)
        return found


@dataclass(frozen=True)
class Run(law.Run):
    def flags(self):
        K = law.COMPLETIONS // self.group_size
        many = 1 if self.rule == "blind" else int(self.rule.removeprefix("history"))
        rule = "none" if many == 1 else "uniform"
        rate = f"--prompt-prune-rate {1 - 1 / many}" if many > 1 else ""
        return (
            f"{law.FLAGS} --data {self.task} --eval-data arithmetic --steps {law.STEPS[self.task]} "
            f"--prompts-per-step {many * K} --group-size {self.group_size} --prompt-rule {rule} "
            f"{rate} --completion-rule adaptive --completion-prune-rate {1 / (1 + self.ratio)} "
            f"--lr {self.lr} --seed {self.seed}"
        )


def make_one(run):
    torch.set_num_threads(1)
    arithmetic.TRAIN_PROBLEMS = 128
    Trainer.ratio = run.ratio
    train.Trainer = Trainer
    return plain_make_one(run)


plain_make_one = law.make_one


def make(runs, file):
    rows = log.cut_rows(file, lambda row: True)
    missing = [run for run in runs if not any(map(run.is_row, rows))]
    with ProcessPoolExecutor(int(sys.argv[1]), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(make_one, run) for run in missing]):
            log.append_rows(file, [done.result()])


def main():
    law.make_one = make_one
    file = Path("runs/law-history.jsonl")
    arms = [("arithmetic-mixed", rule, m, 8) for m in (1.0, 3.0) for rule in ("blind", "history2")]
    tuning = [(seed, lr, arm) for seed in law.TUNING_SEEDS for lr in law.RATES for arm in arms]
    make([Run(*arm, lr, seed) for seed, lr, arm in tuning], file)
    rows = log.read_rows(file)
    chosen = [(*arm, law.best_rate(rows, arm, arm[2])) for arm in arms]
    make([Run(*arm, seed) for seed in range(5) for arm in chosen], file)


if __name__ == "__main__":
    main()
