"""
Packed and padded updates, and how fast each is: `python -m bench update`.

A padded micro-batch is as wide as its longest sequence. Here pad tokens stand at the end, where
causal attention needs no mask; log-probs come from the same chunked head as in packing.py; and a
micro-batch takes as many sequences as fit a budget of tokens, padding included. Sequences are taken
in order of arrival, or sorted by length, which leaves hardly any padding.

Letters: K prompts, G completions each, N completion tokens of a micro-batch.
"""

import functools
import itertools
import math
import statistics
from dataclasses import dataclass, replace
from unittest import mock

import torch

import config
import dppo
import models
import packing
import rollout
import train
from bench import JsonFile, gradient, masked, run, shapes, sized, write_json
from bench import packing as bench_packing
from runtime.device import autocast
from runtime.timer import clock
from tasks import arithmetic
from update import accumulate_gradients

MICRO_BATCHES = (512, 1024, 2048, 4096, 8192, 16_384)  # tokens; padded variants get the best one


@dataclass
class Work:
    """The arguments of one update.accumulate_gradients. Tensors are [K, G]."""

    rollouts: rollout.Rollouts
    advantages: torch.Tensor
    factor: torch.Tensor
    keep: torch.Tensor

    def sequences(self) -> dict[int, tuple[int, int]]:
        """(prompt, completion) lengths of the kept sequences, by their index in K * G."""
        lengths, G = self.rollouts.lengths.flatten().tolist(), self.keep.shape[1]
        kept = self.keep.flatten().nonzero().squeeze(1).tolist()
        return {row: (len(self.rollouts.prompt_ids[row // G]), lengths[row]) for row in kept}

    def plan(self, pack_tokens: int, window: int, share_prompts: bool) -> list[int]:
        """Tokens in each slot of this work's plan."""
        sequences = self.sequences()
        prompts, lengths = zip(*sequences.values(), strict=True)
        totals = [prompt + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
        shared = ()
        if share_prompts:
            shared = ([row // self.keep.shape[1] for row in sequences], prompts)
        packs = packing.plan_packs(totals, pack_tokens, window, *shared)
        return [bench_packing.slot_tokens(pack, totals, *shared) for pack in packs]


# ---------------------------------------------------------------------------- two ways to update


def packed_update(
    model,
    work: Work,
    cfg: config.Config,
    share_prompts: bool | None = None,
    attention: str = packing.ATTENTION,
) -> int:
    """The update that train.py runs; share_prompts: None is train.py's choice for the device.

    Returns the tokens forwarded.
    """
    model.set_attn_implementation(attention)
    args = (model, work.rollouts, work.advantages, work.factor, work.keep)
    if share_prompts is None:
        return int(accumulate_gradients(*args, cfg=cfg).tokens)
    with mock.patch.object(packing, "shares_prompts", return_value=share_prompts):
        return int(accumulate_gradients(*args, cfg=cfg).tokens)


def micro_batches(order: list[int], lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Cut an order of sequences into micro-batches of at most `tokens`, padding included."""
    batches, longest = [], 0
    for row in order:
        longest = max(longest, lengths[row])
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def padded_update(
    model, work: Work, cfg: config.Config, tokens: int, in_order_of_length: bool
) -> int:
    """The same gradient, from micro-batches of at most `tokens`.

    Returns the tokens forwarded, padding included.
    """
    model.set_attn_implementation("sdpa")
    sequences = work.sequences()
    order = list(sequences)
    if in_order_of_length:
        order = sorted(sequences, key=lambda row: sum(sequences[row]))
    totals = {row: prompt + completion - 1 for row, (prompt, completion) in sequences.items()}
    return sum(
        padded_backward(model, work, cfg, rows) for rows in micro_batches(order, totals, tokens)
    )


def padded_backward(model, work: Work, cfg: config.Config, rows: list[int]) -> int:
    """Add the gradient of one padded micro-batch, the sequences `rows` of the work, to .grad.

    Returns the tokens forwarded.
    """
    G, device = work.keep.shape[1], model.device
    lengths = work.rollouts.lengths.flatten()[rows].tolist()
    prompts = [work.rollouts.prompt_ids[row // G] for row in rows]
    completion_ids = work.rollouts.completion_ids.flatten(0, 1)  # [K * G, T]
    completions = [completion_ids[row, :n].tolist() for row, n in zip(rows, lengths, strict=True)]

    # The last token of a completion is predicted, and not read.
    pairs = zip(prompts, completions, strict=True)
    texts = [prompt + completion[:-1] for prompt, completion in pairs]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)

    # The N places, in the flattened micro-batch, whose outputs predict the completions' tokens.
    firsts = [number * width + len(prompt) - 1 for number, prompt in enumerate(prompts)]
    places = [range(first, first + n) for first, n in zip(firsts, lengths, strict=True)]
    places = list(itertools.chain(*places))  # [N]
    targets = torch.tensor(list(itertools.chain(*completions)), device=device)  # [N]
    owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))  # [N]
    with autocast(cfg):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logprobs, _ = packing.token_logprobs(
            hidden.flatten(0, 1)[places],
            model.get_output_embeddings(),
            targets,
            vocab_size=model.vocab_size,
        )  # [N]

    def of_tokens(table: torch.Tensor) -> torch.Tensor:
        """A value of each completion [K, G], for each of its tokens [N]."""
        return table.flatten()[rows][owner].float().to(device)

    old = work.rollouts.logprobs.flatten(0, 1)  # [K * G, T]
    old = torch.cat([old[row, :n] for row, n in zip(rows, lengths, strict=True)]).to(device)  # [N]
    loss, _ = dppo.token_loss(
        logprobs,
        old.float(),
        of_tokens(work.advantages),
        owner.to(device),
        loss=cfg.loss,
        eps_low=cfg.eps_low,
        eps_high=cfg.eps_high,
        num_sequences=len(rows),
    )
    (loss * of_tokens(work.factor)).sum().backward()
    return ids.numel()


# ---------------------------------------------------------------------------- what is updated


def recorded_works(method: str, steps: int) -> list[Work]:
    """Every update of a run of the embedded task."""
    works = []

    def record(model, rollouts, advantages, factor, keep, **options):
        works.append(Work(rollouts, advantages, factor, keep))
        return accumulate_gradients(model, rollouts, advantages, factor, keep, **options)

    with mock.patch.object(train, "accumulate_gradients", record):
        run([*sized(method), "--steps", str(steps)])
    return works


def log_normal_work(K: int, G: int, median: int, prompt_tokens: int, vocabulary: int) -> Work:
    """Random tokens with log-normal completion lengths.

    They range from median / sqrt(10) to median * sqrt(10), two standard deviations each way.
    Prompts have half to one and a half times prompt_tokens.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (median * 10 ** (torch.randn(K, G, generator=generator).clamp(-2, 2) / 4)).long()
    shortest, longest = prompt_tokens // 2, 3 * prompt_tokens // 2
    counts = torch.randint(shortest, longest + 1, (K,), generator=generator)
    ids = torch.randint(vocabulary, (K, G, int(lengths.max())), generator=generator)
    prompt_ids = [
        torch.randint(vocabulary, (count,), generator=generator).tolist()
        for count in counts.tolist()
    ]
    old = torch.full(ids.shape, -math.log(vocabulary))
    zeros = torch.zeros(K, G)
    rollouts = rollout.Rollouts(prompt_ids, ids, old, zeros, zeros, lengths, zeros.bool())
    advantages = torch.randn(K, G, generator=generator, dtype=torch.float64)
    factor = torch.full_like(advantages, 1 / lengths.sum())
    return Work(rollouts, advantages, factor, torch.ones(K, G, dtype=torch.bool))


# ---------------------------------------------------------------------------- the measurement


def main(
    shape: shapes.Shape = "embedded",
    rounds: int = 7,
    pack_tokens: int | None = None,
    steps: int = 24,
    sequences: int = 256,
    json_file: JsonFile = None,
) -> None:
    """Time forward and backward of one update, packed and padded, in turn.

    Rows {lengths, variant, tokens, seconds, ratio, ...}: tokens forwarded, median seconds, and the
    speed relative to padding in order of arrival.

    Args:
        shape: embedded: the embedded base model and the lengths of real runs. Otherwise random
            weights of that size
        rounds: how often each variant is timed
        pack_tokens: tokens in a slot; default: train.py's
        steps: steps of the runs that the lengths come from
        sequences: how many sequences, unless the shape is embedded
        json_file: where to write the rows
    """
    args = ["--out-dir", "unused", "--importance-cap", "0"]  # padded_update has no correction
    if pack_tokens:
        args += ["--pack-tokens", str(pack_tokens)]
    cfg = config.resolve(config.parse_config(args))
    rows = []
    if shape == "embedded":
        runs = {method: recorded_works(method, steps) for method in ("dppo", "pps")}
        last = runs["dppo"][-1]
        everything = {"keep": torch.ones_like(last.keep), "factor": torch.ones_like(last.factor)}
        works = {"embedded, all": replace(last, **everything)}
        works |= {f"embedded, kept by {method}": runs[method][-1] for method in runs}
        model, tokenizer = models.load_policy(str(arithmetic.BASE), cfg.device)
        works["log-normal"] = log_normal_work(16, 16, 120, 24, len(tokenizer))
        for method, recorded in runs.items():
            rows += density_rows(f"embedded, kept by {method}", recorded, cfg.pack_tokens)
        rows += density_rows("log-normal", [works["log-normal"]], cfg.pack_tokens)
    else:
        model = shapes.random_model(shape, cfg.device)
        median, vocabulary = 60 if shape == "tiny" else 600, shapes.SHAPES[shape][-1]
        sizes = (sequences // 8, 8, median, median // 4, vocabulary)
        works = {"log-normal": log_normal_work(*sizes)}
    for name, work in works.items():
        rows += time_updates(model, name, work, cfg, rounds)
    for row in rows:
        cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
        print("  ".join(cells))
    write_json(json_file, rows)


def density_rows(name: str, works: list[Work], pack_tokens: int) -> list[dict]:
    """Density over all slots but the last of each step."""
    rows = []
    for share in (False, True):
        plans = [work.plan(pack_tokens, packing.WINDOW, share) for work in works]
        slots = [tokens for plan in plans for tokens in plan[:-1]]
        row = {
            "lengths": name,
            "variant": f"density, window {packing.WINDOW}" + ", shared prompts" * share,
            "tokens": sum(slots),
            "seconds": None,
            "ratio": None,
            "density": bench_packing.pack_density(slots, pack_tokens),
        }
        rows.append(row)
    return rows


def variants(model, work: Work, cfg: config.Config) -> dict:
    """{(name, micro-batch): an update to call}; packed ones have no micro-batch."""
    found = {}
    for name, in_order in (("padded, arrival", False), ("padded, sorted", True)):
        for budget in MICRO_BATCHES:
            if cfg.pack_tokens / 4 <= budget <= 2 * cfg.pack_tokens:
                update = functools.partial(padded_update, model, work, cfg, budget, in_order)
                found[name, budget] = update
    packed = functools.partial(packed_update, model, work, cfg)
    found["packed", None] = functools.partial(packed, False)
    found["packed, shared prompts", None] = functools.partial(packed, True)
    found["packed, masked SDPA", None] = functools.partial(packed, False, masked.MASKED)
    return found


def time_updates(model, name: str, work: Work, cfg: config.Config, rounds: int) -> list[dict]:
    """Rows for one set of lengths.

    Before a variant is timed, its gradient is compared with the first one's.
    """
    updates = variants(model, work, cfg)

    def once(variant) -> tuple[int, float]:
        """(tokens, seconds)"""
        model.zero_grad()
        started = clock(cfg.device)
        return updates[variant](), clock(cfg.device) - started

    tokens, seconds, first = {}, {}, None
    limit = 1e-4 if cfg.dtype == "float32" else 0.1
    for variant in updates:
        tokens[variant], _ = once(variant)  # warms up
        found = gradient(model).cpu()
        first = found if first is None else first
        error = ((found - first).norm() / first.norm()).item()
        if error > limit:
            raise ArithmeticError(f"{name}, {variant}: the gradient is off by {error}")
        seconds[variant] = min(once(variant)[1] for _ in range(2))

    best = {}  # the fastest micro-batch of each layout
    for variant in sorted(updates, key=seconds.get):
        best.setdefault(variant[0], variant)
    chosen = [best[layout] for layout in dict.fromkeys(layout for layout, _ in updates)]
    times = {variant: [] for variant in chosen}
    for _, variant in itertools.product(range(rounds), chosen):
        times[variant].append(once(variant)[1])

    rows = []
    for variant in chosen:
        pairs = zip(times[chosen[0]], times[variant], strict=True)
        ratios = [slow / fast for slow, fast in pairs]
        row = {
            "lengths": name,
            "variant": variant[0],
            "tokens": tokens[variant],
            "seconds": statistics.median(times[variant]),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "micro_batch": variant[1],
        }
        rows.append(row)
    return rows
