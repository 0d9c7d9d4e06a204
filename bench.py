"""
Measurements behind the README's figures. Rivals alternate in one run; medians and ratios are reported.

    python bench.py step --json runs/step.json          seconds of a training step and its parts
    python bench.py variance --json runs/variance.json  error of each pruning rule, on real gradients, at equal tokens
    python bench.py check --json runs/check.json        the running check over whole runs, and a twin that it must catch
"""

import itertools
import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import transformers
import tyro

import baselines
import config
import data
import dppo
import rollout
import sampler
import train
import update
from eval import as_number, decode

PARTS = ("step_time", "time/rollout", "time/score", "time/train", "tokens/generated", "tokens/trained")


TIMED = ("grpo", "dppo", "pps")


def step(
    rounds: int = 3,
    steps: int = 32,
    skip: int = 16,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time train.py's steps from the same base model, `rounds` times each method in turn, each round with its seed.

    Args:
        rounds: runs of each method
        steps: steps of a run
        skip: first steps of a run left out: the first epoch (16 steps), in which there is no history to prune by
        json_file: where to write the rows {method, round, part, median}
    """
    rows = []
    for number, method in itertools.product(range(rounds), TIMED):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--method", method, "--steps", str(steps), "--seed", str(number), "--out-dir", f"{folder}/run"]
            train.main(config.parse_config([*words, "--eval-every", "0", "--save-every", "0"]))
            log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()][skip:]
        for part in PARTS:
            median = statistics.median(row[part] for row in log)
            rows.append({"method": method, "round": number, "part": part, "median": median})

    def medians(method, part):
        return [row["median"] for row in rows if (row["method"], row["part"]) == (method, part)]

    print(
        f"\nmedians over {rounds} alternating runs of steps {skip + 1} to {steps}, {torch.get_num_threads()} threads;"
    )
    print("in brackets the ratio to GRPO and its range over the runs")
    print(f"{'':16s}" + "".join(f"{method:>28s}" for method in TIMED))
    for part in PARTS:
        line = f"{part:16s}"
        for method in TIMED:
            ratios = sorted(m / g for m, g in zip(medians(method, part), medians("grpo", part), strict=True))
            spread = f"({statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})"
            line += f"{statistics.median(medians(method, part)):10.3f}{spread if method != 'grpo' else '':>20s}  "
        print(line)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


# ---------------------------------------------------------------------------- variance, on real gradients

SHARES = (0.1, 0.2, 0.3, 0.5)  # of the tokens of completions that contribute
RATES = (0.5, 0.7, 0.9)  # r_o of dppo; the others get the tokens that it spends
STAGES = {"early": 4, "midway": 32, "late": 64}  # steps of the embedded run


@dataclass
class Gradients:
    """One batch of real rollouts, and the inner products of its completions' gradients."""

    batch: dppo.Completions  # advantages and sizes are filled in for each loss
    lengths: torch.Tensor  # [Q, G]
    energy: torch.Tensor  # [Q, G], exact
    bound: torch.Tensor  # [Q, G], from the sampled log-probs alone
    live: torch.Tensor  # [Q, G] bool: advantage not 0
    gram: torch.Tensor  # [n, n] float64, of the live completions' sums of grad log-prob
    max_new_tokens: int


def real_gradients(folder: Path, cfg, step: int) -> Gradients:
    """Roll out the window after `step` from a checkpoint, and take the gradient of every live completion alone."""
    model, tokenizer = rollout.load_policy(str(folder), cfg.device)
    problems = data.train_problems(cfg.data, hold_out=True)
    room = model.config.max_position_embeddings - cfg.max_new_tokens
    problems, ids = data.encode_prompts(problems, tokenizer, room)
    window = sampler.candidates(len(problems), cfg.prompts_per_step, cfg.seed, step + 1).tolist()
    rollouts = rollout.sample(
        model, [ids[q] for q in window], group_size=cfg.group_size, max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature, eos_ids=rollout.eos_token_ids(model, tokenizer), pad_id=tokenizer.pad_token_id,
        batch_size=cfg.rollout_batch, seed=sampler.seed_for(cfg.seed, step, "bench"),
    )  # fmt: skip
    texts = decode(rollouts.completion_ids, rollouts.lengths, tokenizer)
    golds = [problems[q].answer for q in window for _ in range(cfg.group_size)]
    reward = data.reward_function(cfg.data)
    scores = [as_number(reward(text, gold)) for text, gold in zip(texts, golds, strict=True)]
    rewards = torch.tensor(scores, dtype=torch.float64).view(-1, cfg.group_size)  # [Q, G]

    live = ~dppo.dead_groups(rewards)[:, None].expand_as(rewards) & ~rewards.isnan()
    ones, alone = torch.ones_like(rewards), torch.zeros_like(live)
    gradients = []
    for place in live.nonzero().tolist():  # advantage 1, factor 1: the sum over its tokens of grad log-prob, negated
        keep = alone.index_put(tuple(torch.tensor(place)), torch.tensor(True))
        model.zero_grad()
        update.accumulate_gradients(model, rollouts, ones, ones, keep, cfg=cfg)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for part in torch.stack(gradients).split(50_000, dim=1):
        gram += part.double() @ part.double().T

    prompt_tokens = torch.tensor([[len(ids[q])] for q in window])
    nothing = torch.zeros_like(rewards)
    batch = dppo.Completions(nothing, rewards, prompt_tokens + rollouts.lengths, nothing)
    sampled = torch.arange(cfg.max_new_tokens) < rollouts.lengths[..., None]
    bound = (dppo.energy_bound(rollouts.logprobs) * sampled).sum(dim=-1)
    return Gradients(batch, rollouts.lengths, rollouts.energy, bound, live, gram, cfg.max_new_tokens)


def rule_draws(name, share, found, batch, sizes, norms, draws):
    """(weights [draws, Q, G], share of the live tokens kept) of one rule at a token share; None if out of its reach."""
    generator = torch.Generator().manual_seed(0)
    tokens = batch.cost[found.live].sum().item()

    def kept(keep_prob):
        return (keep_prob * batch.cost)[found.live].sum().item() / tokens

    def search(share_at):  # the rate at which a rule keeps `share`, or None
        low, high = 0.0, 1 - 1e-6
        if share_at(high) > share * 1.001:
            return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if share_at(middle) > share else (low, middle)
        return high

    if name in ("pps", "uniform"):
        module = dppo if name == "pps" else baselines
        drawn = [module.prune_completions(name, 1 - share, batch, generator)[1] for _ in range(draws)]
    elif name == "dppo":
        rate = search(lambda rate: kept(dppo.completion_keep_prob("dppo", rate, batch)))
        if rate is None:
            return None
        drawn = [dppo.prune_completions("dppo", rate, batch, generator)[1] for _ in range(draws)]
    elif name in ("cppo", "cppo_batch", "dppo_floor"):
        lowest = 1 - 1 / batch.size.shape[1] if name == "cppo" else 1.0  # one completion of a group at least
        keep = lambda rate: baselines.prune_completions(name, min(rate, lowest), batch, generator)
        rate = search(lambda rate: kept(keep(rate)[0].double()))
        if rate is None:
            return None
        drawn = [keep(rate)[1]]
    else:  # sizes of another kind, or another draw
        size = sizes.get(name, batch.size)
        other = replace(batch, size=norms if name.startswith("oracle") else size)
        keep_prob = dppo.pps_keep_prob(other.size, other.cost, share * tokens)
        order = dppo.strata_order(other.size)
        drawn = []
        for _ in range(draws):
            start = torch.rand((), dtype=torch.float64, generator=generator).item()
            independent = name.endswith("independent")
            keep = dppo.draw(keep_prob, generator) if independent else dppo.systematic(keep_prob, order, start)
            drawn.append(dppo.ht_weights(keep, keep_prob))
    weights = torch.stack(drawn)
    return weights, kept((weights > 0).double().mean(dim=0))


def variance_rows(found: Gradients, loss: str, stage: str, draws: int) -> list[dict]:
    """Every rule at every token share, for one loss and stage."""
    lengths = found.lengths
    scale = dppo.loss_scale(
        lengths, loss, num_sequences=lengths.numel(), max_new_tokens=found.max_new_tokens,
        num_tokens=lengths.sum().item(),
    )  # fmt: skip
    advantages = dppo.group_advantages(found.batch.rewards, loss)
    factor = (scale * advantages)[found.live]
    gram = factor[:, None] * found.gram * factor  # of what each adds to the full gradient
    square = gram.sum().item()
    norms = torch.zeros_like(scale)
    norms[found.live] = gram.diagonal().sqrt()
    size = {
        kind: dppo.contribution_size(advantages, scale, energy, 0.0)
        for kind, energy in (
            ("pps", found.energy), ("pps from log-probs", found.bound), ("size |A| sqrt(length)", lengths),
            ("size |A|", 1 / scale.square()),
        )
    }  # fmt: skip
    batch = replace(found.batch, advantages=advantages, size=size["pps"])
    spent = {}
    for rate in RATES:
        keep_prob = dppo.completion_keep_prob("dppo", rate, batch)
        spent[rate] = ((keep_prob * batch.cost)[found.live].sum() / batch.cost[found.live].sum()).item()
    rows = []
    for share, rate in [(share, None) for share in SHARES] + [(share, rate) for rate, share in spent.items()]:
        oracle = None
        for rule in RULES:
            answer = rule_draws(rule, share, found, batch, size, norms, draws)
            row = {"loss": loss, "stage": stage, "rule": rule, "tokens": round(share, 4), "r_o": rate}
            if answer is None:
                rows.append(row | {"kept": None, "rel_mse": None, "rel_bias2": None, "ratio_to_oracle": None})
                continue
            weights, kept = answer
            error = weights[:, found.live] - 1.0  # [draws, n]
            squares = ((error @ gram) * error).sum(dim=1)
            mse, mean = squares.mean().item() / square, error.sum(dim=0)
            number = len(error)  # the squared mean error, without the draws' own part in it
            bias2 = mse if number == 1 else (
                (mean @ gram @ mean - squares.sum()).item() / (number * (number - 1)) / square
            )  # fmt: skip
            oracle = mse if rule == "oracle, independent" else oracle
            rows.append(row | {"kept": kept, "rel_mse": mse, "rel_bias2": bias2, "ratio_to_oracle": mse / oracle})
            if rule in ("cppo", "cppo_batch"):  # how much of its error is the step's length, which Adam may forgive
                with_error = error[0] + 1.0
                along = (with_error @ gram).sum().item()
                best = 1 - along**2 / (square * (with_error @ gram @ with_error).item())
                rows.append(row | {"rule": f"{rule}, best length", "kept": kept, "rel_mse": best, "rel_bias2": best,
                                   "ratio_to_oracle": best / oracle})  # fmt: skip
    return rows


RULES = (
    "oracle, independent", "oracle", "pps", "pps, independent", "pps from log-probs", "size |A| sqrt(length)",
    "size |A|", "dppo", "uniform", "cppo", "cppo_batch", "dppo_floor",
)  # fmt: skip


def variance(
    draws: int = 2000, seeds: int = 3, json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
) -> None:
    """Relative squared error |g - full|^2 / |full|^2 of each completion rule, from every completion's true gradient.

    Rollouts are those of the embedded run (GRPO) early, midway and late. Tokens are prompt + completion tokens of the
    completions that contribute; "oracle" has the true gradient norms as sizes, and ratios are to its independent draw.

    Args:
        draws: draws of each rule's own design
        seeds: runs, each with a seed of its own; the table has the medians
        json_file: where to write rows {seed, loss, stage, rule, tokens, r_o, kept, rel_mse, rel_bias2, ratio_to_oracle}
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, (stage, step) in itertools.product(range(seeds), STAGES.items()):
            out = Path(folder, f"run{seed}")
            words = ["--method", "grpo", "--out-dir", str(out), "--seed", str(seed), "--eval-every", "0"]
            cfg = config.parse_config([*words, "--steps", str(step), *(["--resume"] if out.exists() else [])])
            train.main(cfg)
            found = real_gradients(out / "checkpoint", config.resolve(cfg), step)
            print(f"seed {seed}, {stage}: {found.live.sum().item()} live completions", flush=True)
            for loss in ("grpo", "dr_grpo"):
                rows += [{"seed": seed} | row for row in variance_rows(found, loss, stage, draws)]
    columns = [{"tokens": share, "r_o": None} for share in SHARES] + [{"r_o": rate} for rate in RATES]
    for loss, stage in itertools.product(("grpo", "dr_grpo"), STAGES):
        print(f"\n{loss}, {stage}: medians of relative squared error, squared bias (and error over the oracle's)")
        heads = [f"as r_o {column['r_o']}" if column["r_o"] else f"{column['tokens']}" for column in columns]
        print(f"{'':24s}" + "".join(f"{head:>26s}" for head in heads))
        for rule in dict.fromkeys(row["rule"] for row in rows):
            cells = [_cell(rows, loss=loss, stage=stage, rule=rule, **column) for column in columns]
            print(f"{rule:24s}" + "".join(cells))
    if json_file:
        short = [{k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in short)
        json_file.write_text(f"[\n{lines}\n]\n")


def _cell(rows, **wanted):
    """Medians over seeds as text; a dash where some seed has none."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not all(row["kept"] for row in found):
        return f"{'-':>26s}"
    mse, bias2, ratio = (
        statistics.median(row[key] for row in found) for key in ("rel_mse", "rel_bias2", "ratio_to_oracle")
    )
    return f"{mse:9.4f} {bias2:7.4f} ({ratio:6.2f})"


# ---------------------------------------------------------------------------- the running check over whole runs


def check(
    steps: int = 60, every: int = 1, json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
) -> None:
    """Mean and standard error of the running check over whole runs: dppo, pps, and pps with weights times 0.9.

    Args:
        steps: steps of each run
        every: steps between checks
        json_file: where to write the rows {rule, key, mean, error, checks}
    """
    rows = []
    honest = dppo.ht_weights
    for name, rule, factor in (("dppo", "dppo", 1.0), ("pps", "pps", 1.0), ("pps, weights x 0.9", "pps", 0.9)):
        dppo.ht_weights = lambda keep, keep_prob, factor=factor: factor * honest(keep, keep_prob)
        with tempfile.TemporaryDirectory() as folder:
            words = ["--method", "grpo", "--completion-rule", rule, "--steps", str(steps), "--check-every", str(every)]
            train.main(config.parse_config([*words, "--out-dir", f"{folder}/run", "--eval-every", "0"]))
            log = [json.loads(line) for line in Path(folder, "run", "log.jsonl").read_text().splitlines()]
        dppo.ht_weights = honest
        for key in ("check/bias2", "check/scale", "check/variance"):
            values = [row[key] for row in log if row.get(key) is not None]
            error = statistics.stdev(values) / math.sqrt(len(values))
            rows.append({"rule": name, "key": key, "mean": statistics.mean(values), "error": error,
                         "checks": len(values)})  # fmt: skip
    print(f"\n{'':20s} {'':16s} {'mean':>10s} {'std. error':>10s}  mean / error")
    for row in rows:
        print(f"{row['rule']:20s} {row['key']:16s} {row['mean']:10.5f} {row['error']:10.5f}  "
              f"{row['mean'] / row['error']:+6.1f}  ({row['checks']} checks)")  # fmt: skip
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    tyro.extras.subcommand_cli_from_dict({"step": step, "variance": variance, "check": check})
