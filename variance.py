"""
How noisy each pruning rule is, on real gradients: bench.py variance. Completions, then prompts.

Letters: Q prompts, G completions each, n of their completions with an advantage.
"""

import copy
import itertools
import json
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal
from unittest import mock

import torch
import tyro

import arithmetic
import baselines
import config
import data
import dppo
import rollout
import sampler
import train
import update
from eval import score

# ---------------------------------------------------------------------------- completions

SETTINGS = ("arithmetic", "arithmetic-mixed")  # the default and the realistic one
LOSSES = ("grpo", "dr_grpo")
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
    sampling = rollout.Sampling(
        cfg.max_new_tokens, rollout.eos_token_ids(model, tokenizer), tokenizer.pad_token_id, cfg.temperature,
        cfg.rollout_batch, cfg.engine,
    )  # fmt: skip
    seed = sampler.seed_for(cfg.seed, step, "bench")
    rollouts = rollout.sample(model, [ids[q] for q in window], sampling, group_size=cfg.group_size, seed=seed)
    reward = data.reward_function(cfg.data)
    _, rewards = score(rollouts, [problems[q] for q in window], tokenizer, reward)  # [Q, G]

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
        module, rate = dppo, 1 - share * tokens / batch.cost.sum().item()  # pps counts all tokens, dead ones too
        if name == "uniform":
            module, rate = baselines, 1 - share
        drawn = [module.prune_completions(name, rate, batch, generator)[1] for _ in range(draws)]
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
                along, length2 = (with_error @ gram).sum().item(), (with_error @ gram @ with_error).item()
                best = 1 - along**2 / (square * length2) if length2 else 1.0  # nothing kept
                rows.append(row | {"rule": f"{rule}, best length", "kept": kept, "rel_mse": best, "rel_bias2": best,
                                   "ratio_to_oracle": best / oracle})  # fmt: skip
    return rows


RULES = (
    "oracle, independent", "oracle", "pps", "pps, independent", "pps from log-probs", "size |A| sqrt(length)",
    "size |A|", "dppo", "uniform", "cppo", "cppo_batch", "dppo_floor",
)  # fmt: skip


def main(
    level: Literal["completion", "prompt"] = "completion",
    seeds: tuple[int, ...] = (0, 1, 2),
    draws: int = 2000,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Squared error |g - full|^2 of each pruning rule from true gradients, over draws of its own design.

    completion: relative to |full|^2, from every completion's gradient; rollouts of the embedded run (GRPO) early,
    midway and late. Tokens are prompt + completion tokens of the completions that contribute; "oracle" has the true
    gradient norms as sizes, and ratios are to its independent draw. prompt: relative to a uniform draw of as many
    rollout tokens, from every group's gradient at every step of a run that prunes nothing; "oracle" knows norms and
    tokens.

    Args:
        level: which of the two prunings
        seeds: of the runs; the tables have the medians
        draws: of each rule and batch (prompt: a tenth of it)
        json_file: where to write the rows
    """
    rows = completion_variance(seeds, draws) if level == "completion" else prompt_variance(seeds, draws // 10)
    if json_file:  # one line a row, without the names: a third of the size
        short = [[float(f"{v:.4g}") if isinstance(v, float) else v for v in row.values()] for row in rows]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in short)
        json_file.write_text(f'{{"columns": {json.dumps(list(rows[0]))}, "rows": [\n{lines}\n]}}\n')


def completion_variance(seeds: tuple[int, ...], draws: int) -> list[dict]:
    """Rows {seed, data, loss, stage, rule, tokens, r_o, kept, rel_mse, rel_bias2, ratio_to_oracle}, and their table."""
    rows = []
    for seed, data_name in itertools.product(seeds, SETTINGS):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--method", "grpo", "--data", data_name, "--out-dir", f"{folder}/run", "--seed", str(seed)]
            words += ["--steps", str(max(STAGES.values())), "--save-every", str(math.gcd(*STAGES.values()))]
            cfg = config.parse_config([*words, "--keep-checkpoints", "99", "--eval-every", "0"])
            train.main(cfg)
            for stage, step in STAGES.items():  # the rate falls to 0 over the run, so late is at its end
                found = real_gradients(Path(folder, "run", f"checkpoint-{step:06d}"), config.resolve(cfg), step)
                print(f"{data_name}, seed {seed}, {stage}: {found.live.sum().item()} live completions", flush=True)
                for loss in LOSSES:
                    marks = {"seed": seed, "data": data_name}
                    rows += [marks | row for row in variance_rows(found, loss, stage, draws)]
    columns = [{"tokens": share, "r_o": None} for share in SHARES] + [{"r_o": rate} for rate in RATES]
    for data_name, loss, stage in itertools.product(SETTINGS, LOSSES, STAGES):
        print(
            f"\n{data_name}, {loss}, {stage}: medians of relative squared error, squared bias (error over the oracle's)"
        )
        heads = [f"as r_o {column['r_o']}" if column["r_o"] else f"{column['tokens']}" for column in columns]
        print(f"{'':24s}" + "".join(f"{head:>26s}" for head in heads))
        for rule in dict.fromkeys(row["rule"] for row in rows):
            cells = [_cell(rows, data=data_name, loss=loss, stage=stage, rule=rule, **column) for column in columns]
            print(f"{rule:24s}" + "".join(cells))
    return rows


def _cell(rows, **wanted):
    """Medians over seeds as text; a dash where some seed has none."""
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found or not all(row["kept"] for row in found):
        return f"{'-':>26s}"
    mse, bias2, ratio = (
        statistics.median(row[key] for row in found) for key in ("rel_mse", "rel_bias2", "ratio_to_oracle")
    )
    return f"{mse:9.4f} {bias2:7.4f} ({ratio:6.2f})"


# ---------------------------------------------------------------------------- prompts

PROMPT_RULES = ("uniform", "uniform, coins", "dppo", "pps", "oracle")  # coins: independent keeps, as dppo has them
PROMPT_RATES = (0.3, 0.6)  # r_q; 0.6 is the default of pps
EPOCHS = 5  # of a run: visits of each prompt


def recorded_run(data_name: str, loss: str, seed: int, steps: int) -> tuple[sampler.PromptHistory, list[dict]]:
    """An un-pruned run, taken group by group: an empty history, and of every step what PromptHistory.update was told
    and the inner products [Q, Q] of what each group adds to the gradient."""
    recorded, empty, plain_update, plain = [], [], sampler.PromptHistory.update, train.accumulate_gradients

    def update_and_record(history, *told):
        if not empty:
            empty.append(copy.deepcopy(history))
        recorded[-1]["told"] = told
        plain_update(history, *told)

    def group_by_group(model, rollouts, advantages, scale, keep, **options):
        sums, gradients = 0.0, []
        for row in range(len(keep)):
            only = keep & (torch.arange(len(keep)) == row)[:, None]
            model.zero_grad()
            sums = sums + plain(model, rollouts, advantages, scale, only, **options)
            gradients.append(torch.cat([(p * 0 if p.grad is None else p.grad).flatten() for p in model.parameters()]))
        stacked = torch.stack(gradients)  # [Q, parameters]
        recorded.append({"gram": sum(part.double() @ part.double().T for part in stacked.split(50_000, dim=1))})
        sizes = [p.numel() for p in model.parameters()]
        for p, grad in zip(model.parameters(), stacked.sum(dim=0).split(sizes), strict=True):
            p.grad = grad.view_as(p)
        return sums

    words = ["--method", "grpo", "--data", data_name, "--loss", loss, "--seed", str(seed), "--steps", str(steps)]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sampler.PromptHistory, "update", update_and_record),
        mock.patch.object(train, "accumulate_gradients", group_by_group),
    ):
        train.main(
            config.parse_config([*words, "--out-dir", f"{folder}/run", "--eval-every", "0", "--save-every", "0"])
        )
    return empty[0], recorded


def uniform_error(gram: torch.Tensor, count: float) -> float:
    """Expected |g - full|^2 of a simple random sample of `count` of the Q groups, a fraction by interpolation."""
    Q = len(gram)
    return (Q / count - 1) * Q / (Q - 1) * (gram.trace() - gram.sum() / Q).item()


def replay(rule: str, rate: float, empty, recorded: list[dict], draws: int, seed: int) -> list[dict]:
    """What a rule would have done at every step, had it only seen what it rolled out: its error, that of a uniform
    draw of as many rollout tokens, and these tokens' share."""
    history, rows = copy.deepcopy(empty), []
    for record in recorded:
        step, window, _, rewards, advantages, square, tokens = record["told"]
        gram, generator = record["gram"], sampler.generator_for(seed, step, "replay")
        if rule == "oracle":
            norm = gram.diagonal().clamp(min=0).sqrt()
            size = norm.clamp(min=1e-3 * norm.mean().item() + 1e-30) / tokens.sqrt()
            history.priority = lambda *_, size=size: size  # for prune, in place of what was learned
        if rule == "uniform, coins":
            even = torch.full(window.shape, 1 - rate, dtype=torch.float64)
            drawn = [dppo.prune(even, generator) for _ in range(draws)]
        else:
            name = "pps" if rule == "oracle" else rule
            drawn = [history.prune(name, rate, window, generator, step) for _ in range(draws)]
        error = torch.stack([weights for _, weights in drawn]) - 1.0  # [draws, Q]
        share = (torch.stack([keep for keep, _ in drawn]).double() @ tokens).mean().item() / tokens.sum().item()
        rows.append({
            "step": step, "error": ((error @ gram) * error).sum(dim=1).mean().item(),
            "uniform": uniform_error(gram, len(window) * share), "tokens": share, "square": gram.sum().item(),
            "dead": dppo.dead_groups(rewards).double().mean().item(),
        })  # fmt: skip
        keep, weights = drawn[0]
        history.update(step, window[keep], weights[keep], rewards[keep], advantages[keep], square[keep], tokens[keep])
    return rows


def prompt_variance(seeds: tuple[int, ...], draws: int) -> list[dict]:
    """Rows {seed, data, loss, rule, r_q, visit, dead, tokens, rel_mse, over_uniform, median_over_uniform}, one a visit
    (epoch), and their table. Errors are summed over a visit's steps before they are divided."""
    rows = []
    for seed, data_name, loss in itertools.product(seeds, SETTINGS, LOSSES):
        per_epoch = arithmetic.TRAIN_PROBLEMS // config.resolve(config.Config(method="grpo")).prompts_per_step
        empty, recorded = recorded_run(data_name, loss, seed, EPOCHS * per_epoch)
        for rule, rate in itertools.product(PROMPT_RULES, PROMPT_RATES):
            replays = [replay(rule, rate, empty, recorded, draws, number) for number in range(4)]  # other histories
            for visit in range(EPOCHS):
                part = slice(visit * per_epoch, (visit + 1) * per_epoch)
                of_visit = [row for replayed in replays for row in replayed[part]]
                total = {key: math.fsum(row[key] for row in of_visit) for key in of_visit[0]}
                ratios = [row["error"] / row["uniform"] for row in of_visit if row["uniform"] > 0]
                rows.append({
                    "seed": seed, "data": data_name, "loss": loss, "rule": rule, "r_q": rate, "visit": visit + 1,
                    "dead": total["dead"] / len(of_visit), "tokens": total["tokens"] / len(of_visit),
                    "rel_mse": total["error"] / total["square"],
                    "over_uniform": total["error"] / total["uniform"] if total["uniform"] else None,
                    "median_over_uniform": statistics.median(ratios) if ratios else None,
                })  # fmt: skip
    for data_name, loss, rate in itertools.product(SETTINGS, LOSSES, PROMPT_RATES):
        print(f"\n{data_name}, {loss}, r_q {rate}: error over a uniform draw's of as many rollout tokens (tokens)")
        for rule in PROMPT_RULES:
            line = f"{rule:14s}"
            for visit in range(1, EPOCHS + 1):
                wanted = {"data": data_name, "loss": loss, "r_q": rate, "rule": rule, "visit": visit}
                found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
                over = sorted(row["over_uniform"] for row in found if row["over_uniform"] is not None)
                spread = f"{statistics.median(over):6.2f} [{over[0]:.2f}, {over[-1]:.2f}]" if over else f"{'-':>19s}"
                line += spread + f" ({statistics.median(row['tokens'] for row in found):.2f})"
            print(line)
    return rows
