"""
How noisy each completion rule is on real gradients: `python -m bench variance`.

Rollouts and gradients are computed on the run's device; everything after that is small and on the
CPU.

Letters: Q prompts, G completions each, n live completions, P parameters, r_o
--completion-prune-rate.
"""

import itertools
import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import config
import dppo
import train
from bench import JsonFile, check, gradient, inner_products, sized, stamped
from related import rivals  # noqa: F401 (adds cppo_batch)
from rewards import score
from update import accumulate_gradients

TASKS = ("arithmetic", "arithmetic-mixed")  # the default and the realistic one
LOSSES = ("grpo", "dr_grpo")
SHARES = (0.1, 0.2, 0.3, 0.5)  # of the tokens of completions that contribute
RATE = 0.9  # r_o of dppo; the other rules get the tokens that it spends
STAGES = {"early": 4, "midway": 32, "late": 64}  # steps of the embedded run
RULES = ("oracle, independent", "oracle", "pps", "dppo", "uniform", "cppo_batch, best length")


@dataclass
class Gradients:
    """One batch of real rollouts, and the inner products of its completions' gradients."""

    batch: dppo.Completions  # advantages and sizes are filled in for each loss
    lengths: torch.Tensor  # [Q, G]
    energy: torch.Tensor  # [Q, G], exact
    live: torch.Tensor  # [Q, G] bool: advantage not 0
    gram: torch.Tensor  # [n, n] float64, of the live completions' sums of grad log-prob
    max_new_tokens: int


def real_gradients(folder: Path, cfg, step: int) -> Gradients:
    """Roll out the window after `step` from a checkpoint, and compute the gradient of each live
    completion alone."""
    trainer = train.Trainer(replace(cfg, model=str(folder), out_dir=f"{folder}-bench"))
    window = trainer.candidates(step + 1)
    rollouts = check.roll_out(trainer, window, step, "bench")
    problems = [trainer.train_set[q] for q in window.tolist()]
    _, rewards = score(rollouts, problems, trainer.tokenizer, trainer.reward)  # [Q, G]

    live = ~dppo.dead_groups(rewards)[:, None].expand_as(rewards) & ~rewards.isnan()
    ones, alone = torch.ones_like(rewards), torch.zeros_like(live)
    gradients = []
    for place in live.nonzero().tolist():  # advantage and scale 1: minus the sum of grad log-prob
        keep = alone.index_put(tuple(torch.tensor(place)), torch.tensor(True))
        trainer.model.zero_grad()
        accumulate_gradients(trainer.model, rollouts, ones, ones, keep, cfg=trainer.cfg)
        gradients.append(gradient(trainer.model))

    lengths = rollouts.lengths
    prompt_tokens = trainer.prompt_tokens[window]  # [Q]
    zeros = torch.zeros_like(rewards)
    return Gradients(
        dppo.Completions(zeros, rewards, prompt_tokens[:, None] + lengths, zeros),
        lengths,
        energy=rollouts.energy,
        live=live,
        gram=inner_products(gradients),
        max_new_tokens=trainer.cfg.max_new_tokens,
    )


def search(share_at, share: float, high: float = 1 - 1e-6) -> float | None:
    """The rate up to `high` at which share_at(rate), which falls, is `share`; None if none is."""
    low = 0.0
    if share_at(high) > share * 1.001:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share_at(middle) > share else (low, middle)
    return high


def rule_draws(name, share, measured, batch, norms, draws):
    """(weights [draws, Q, G], share of the live tokens kept) of one rule at a share of the tokens.

    None if the rule cannot keep that few.
    """
    generator = dppo.generator_for(0)
    tokens = batch.cost[measured.live].sum().item()

    def kept(keep_prob):
        return (keep_prob * batch.cost)[measured.live].sum().item() / tokens

    if name.startswith("oracle"):  # pps with the true norms
        keep_prob = dppo.pps_keep_prob(norms, batch.cost, share * tokens)
        order = dppo.strata_order(replace(batch, size=norms))
        drawn = []
        for _ in range(draws):
            if name.endswith("independent"):
                keep = dppo.independent(keep_prob, generator)
            else:
                keep = dppo.systematic(keep_prob, order, generator.random())
            drawn.append(dppo.ht_weights(keep, keep_prob))
    else:
        draw = lambda rate: dppo.prune_completions(name.split(",")[0], rate, batch, generator)
        rate = 1 - share
        if name == "pps":  # its rate is of all tokens
            rate = 1 - share * tokens / batch.cost.sum().item()
        elif name == "dppo":
            keep_prob = dppo.COMPLETION_RULES["dppo"].keep_prob
            rate = search(lambda rate: kept(keep_prob(batch, rate)), share)
        elif name.startswith("cppo_batch"):  # without chance; it keeps one completion at least
            most = 1 - 1 / batch.size.numel()
            rate, draws = search(lambda rate: kept(draw(rate)[0].double()), share, most), 1
        if rate is None:
            return None
        drawn = [draw(rate)[1] for _ in range(draws)]
    weights = torch.stack(drawn)
    return weights, kept((weights > 0).double().mean(dim=0))


def variance_rows(measured: Gradients, loss: str, stage: str, draws: int) -> list[dict]:
    """Every rule at every share of the tokens, for one loss and stage."""
    lengths, live = measured.lengths, measured.live
    scale = dppo.loss_scale(
        lengths,
        loss,
        num_sequences=lengths.numel(),
        max_new_tokens=measured.max_new_tokens,
        num_tokens=lengths.sum().item(),
    )
    advantages = dppo.group_advantages(measured.batch.rewards, dppo.LOSSES[loss].scale_rewards)
    factor = (scale * advantages)[live]
    # Of the completions' terms in the full gradient:
    gram = factor[:, None] * measured.gram * factor
    norms = torch.zeros_like(scale)
    norms[live] = gram.diagonal().sqrt()
    size = dppo.contribution_size(advantages, scale, measured.energy, beta=0.0)
    batch = replace(measured.batch, advantages=advantages, size=size)
    spent = dppo.COMPLETION_RULES["dppo"].keep_prob(batch, RATE) * batch.cost
    of_dppo = (spent[live].sum() / batch.cost[live].sum()).item()
    rows = []
    for share, rate in [*((share, None) for share in SHARES), (of_dppo, RATE)]:
        for rule in RULES:
            row = {"loss": loss, "stage": stage, "rule": rule}
            row |= {"tokens": round(share, 4), "r_o": rate}
            row |= dict.fromkeys(("kept", "rel_mse", "rel_bias2"))
            if drawn := rule_draws(rule, share, measured, batch, norms, draws):
                weights, row["kept"] = drawn
                row["rel_mse"], row["rel_bias2"] = relative_errors(weights[:, live], gram)
                if rule.endswith("best length"):
                    best = best_length_error(weights[0, live], gram)
                    row |= {"rel_mse": best, "rel_bias2": best}
            rows.append(row)
    return rows


def relative_errors(weights: torch.Tensor, gram: torch.Tensor) -> tuple[float, float]:
    """(mean squared error, squared bias) of weights [draws, n], relative to |full|^2.

    The squared bias is that of the mean error, without the noise of the draws in it.
    """
    square = gram.sum().item()
    error = weights - 1.0
    squares = ((error @ gram) * error).sum(dim=1)  # [draws]
    mse = squares.mean().item() / square
    count = len(error)
    if count == 1:
        return mse, mse
    mean = error.sum(dim=0)
    between = (mean @ gram @ mean - squares.sum()).item()
    return mse, between / (count * (count - 1)) / square


def best_length_error(weights: torch.Tensor, gram: torch.Tensor) -> float:
    """Relative squared error of weights [n] times the best constant.

    Adam may forgive an error in the length of a step, but not one in its direction.
    """
    square = gram.sum().item()
    along = (weights @ gram).sum().item()
    length2 = (weights @ gram @ weights).sum().item()
    return 1 - along**2 / (square * length2) if length2 else 1.0  # 0: nothing was kept


# ---------------------------------------------------------------------------- the command


def main(seeds: tuple[int, ...] = (0, 1, 2), draws: int = 2000, json_file: JsonFile = None) -> None:
    """Squared error |g - full|^2 of a pruned gradient g, by rule, averaged over the rule's draws.

    It is relative to |full|^2, from the gradient of every completion, with rollouts of the embedded
    run (GRPO) early, midway and late. Tokens are the prompt + completion tokens of the completions
    that contribute. "oracle" knows the true gradient norms.

    Args:
        seeds: seeds of the runs; what is printed are medians
        draws: draws of each rule and batch
        json_file: where to write the rows {seed, data, loss, stage, rule, tokens, r_o, kept,
            rel_mse, rel_bias2}
    """
    rows = []
    for seed, data_name in itertools.product(seeds, TASKS):
        rows += rows_of_run(data_name, seed, draws)
    print(f"\nmedian squared errors at the tokens of dppo at r_o {RATE}")
    for data_name, loss, stage in itertools.product(TASKS, LOSSES, STAGES):
        wanted = {"data": data_name, "loss": loss, "stage": stage, "r_o": RATE}.items()
        print(f"{data_name}, {loss}, {stage}")
        for rule in RULES:
            errors = [row["rel_mse"] for row in rows if {*wanted, ("rule", rule)} <= row.items()]
            known = [error for error in errors if error is not None]
            print(f"    {rule:24s}" + (f"{statistics.median(known):9.2g}" if known else " -"))
    if json_file:  # one line a row, names only once: a third of the size
        short = lambda value: float(f"{value:.4g}") if isinstance(value, float) else value
        lists = [[short(value) for value in row.values()] for row in rows]
        table = json.dumps(stamped({"columns": list(rows[0]), "rows": lists}))
        json_file.write_text(table.replace("], [", "],\n[") + "\n")


def rows_of_run(data_name: str, seed: int, draws: int) -> list[dict]:
    """Train without pruning, and measure every rule at each stage of the run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        args = [*sized("grpo"), "--data", data_name, "--seed", str(seed)]
        args += ["--steps", str(max(STAGES.values())), "--eval-every", "0"]
        args += ["--save-every", str(math.gcd(*STAGES.values())), "--keep-checkpoints", "99"]
        cfg = config.parse_config([*args, "--out-dir", f"{folder}/run"])
        train.main(cfg)
        for stage, step in STAGES.items():  # the learning rate reaches 0 at the last
            checkpoint = Path(folder, "run", f"checkpoint-{step:06d}")
            measured = real_gradients(checkpoint, config.resolve(cfg), step)
            live = measured.live.sum().item()
            print(f"{data_name}, seed {seed}, {stage}: {live} live completions", flush=True)
            for loss in LOSSES:
                marks = {"seed": seed, "data": data_name}
                rows += [marks | row for row in variance_rows(measured, loss, stage, draws)]
    return rows
