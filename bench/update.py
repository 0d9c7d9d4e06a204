"""
Packed and padded updates, and how fast each is: `python -m bench update`.

A padded micro-batch is as wide as its longest sequence. Here pad tokens stand at the end, where
causal attention needs no mask; log-probs come from the same chunked head as in packing.py; and a
micro-batch takes as many sequences as fit a budget of tokens, padding included. Sequences are taken
in order of arrival, or sorted by length, which leaves hardly any padding.

Letters: K prompts, G completions each, n sequences of a micro-batch and N completion tokens in it.
"""

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn.utils.rnn import pad_sequence

import config
import dppo
import models
import packing
import rollout
import train
from bench import JsonFile, gradient, run, shapes, sized, write_json
from runtime.device import autocast
from runtime.timer import clock
from tasks import arithmetic
from update import accumulate_gradients

STEPS = 24  # of the runs that the lengths come from
BUDGETS = (0.25, 0.5, 1, 2)  # of a micro-batch, in slots; padded variants get the fastest


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


# ---------------------------------------------------------------------------- two ways to update


def packed_update(model, work: Work, cfg: config.Config, share_prompts: bool) -> int:
    """The update that train.py runs. Returns the tokens forwarded."""
    model.set_attn_implementation(packing.ATTENTION)
    args = (model, work.rollouts, work.advantages, work.factor, work.keep)
    with mock.patch.object(packing, "shares_prompts", return_value=share_prompts):
        return int(accumulate_gradients(*args, cfg=cfg).tokens)


def padded_update(
    model, work: Work, cfg: config.Config, in_order_of_length: bool, budget: float
) -> int:
    """The same gradient, from micro-batches of at most `budget` times the tokens of a slot. Returns
    the tokens forwarded, padding included."""
    model.set_attn_implementation("sdpa")
    lengths = {row: sum(both) - 1 for row, both in work.sequences().items()}
    order = sorted(lengths, key=lengths.get) if in_order_of_length else lengths
    batches, longest = [[]], 0
    for row in order:
        longest = max(longest, lengths[row])
        if batches[-1] and (len(batches[-1]) + 1) * longest > budget * cfg.pack_tokens:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return sum(padded_backward(model, work, cfg, rows) for rows in batches)


def padded_backward(model, work: Work, cfg: config.Config, rows: list[int]) -> int:
    """Add the gradient of one padded micro-batch, the sequences `rows` of the work, to .grad.
    Returns the tokens forwarded."""
    rollouts, G, device = work.rollouts, work.keep.shape[1], model.device
    lengths = rollouts.lengths.flatten()[rows]  # [n]
    prompts = [rollouts.prompt_ids[row // G] for row in rows]
    completions = rollouts.completion_ids.flatten(0, 1)[rows]  # [n, T]
    # The last token of a completion is predicted, and not read.
    triples = zip(prompts, completions, lengths, strict=True)
    texts = [torch.cat([torch.tensor(p), ids[: length - 1]]) for p, ids, length in triples]
    ids = pad_sequence(texts, batch_first=True).to(device)

    owner = torch.arange(len(rows)).repeat_interleave(lengths)  # [N]
    place = torch.cat([torch.arange(length) for length in lengths])  # [N], in the completion
    reads = torch.tensor([len(prompt) - 1 for prompt in prompts])[owner] + place  # [N]
    with autocast(cfg):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logprobs, _ = packing.token_logprobs(
            hidden[owner.to(device), reads.to(device)],
            model.get_output_embeddings(),
            completions[owner, place].to(device),
            vocab_size=model.vocab_size,
        )  # [N]

    def of_tokens(table: torch.Tensor) -> torch.Tensor:
        """A value of each completion [K, G], for each of its tokens [N]."""
        return table.flatten()[rows][owner].float().to(device)

    loss, _ = dppo.token_loss(
        logprobs,
        rollouts.logprobs.flatten(0, 1)[rows][owner, place].float().to(device),
        of_tokens(work.advantages),
        owner.to(device),
        loss=cfg.loss,
        eps_low=cfg.eps_low,
        eps_high=cfg.eps_high,
        num_sequences=len(rows),
    )
    (loss * of_tokens(work.factor)).sum().backward()
    return ids.numel()


VARIANTS = {  # updates to call with a model, its work and the config
    "padded, arrival": [functools.partial(padded_update, in_order_of_length=False, budget=budget)
                        for budget in BUDGETS],
    "padded, sorted": [functools.partial(padded_update, in_order_of_length=True, budget=budget)
                       for budget in BUDGETS],
    "packed": [functools.partial(packed_update, share_prompts=False)],
    "packed, shared prompts": [functools.partial(packed_update, share_prompts=True)],
}  # fmt: skip


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
    shape: shapes.Shape | None = None,
    rounds: int = 7,
    pack_tokens: int | None = None,
    sequences: int = 256,
    json_file: JsonFile = None,
) -> None:
    """Time forward and backward of one update, packed and padded, in turn.

    Args:
        shape: by default the embedded base model and the lengths of real runs. Otherwise random
            weights of that size
        rounds: how often each variant is timed
        pack_tokens: tokens in a slot; default: train.py's
        sequences: how many sequences, with random weights
        json_file: where to write the rows {lengths, variant, tokens (forwarded), seconds (median),
            ratio (the speed over that of padding in order of arrival), ratio_low, ratio_high}
    """
    args = ["--out-dir", "unused", "--importance-cap", "0"]  # padded_update has no correction
    if pack_tokens:
        args += ["--pack-tokens", str(pack_tokens)]
    cfg = config.resolve(config.parse_config(args))
    if shape:
        model = shapes.random_model(shape, cfg.device)
        models.checkpoint_layers(model)
        median = 60 if shape == "tiny" else 600
        sizes = (sequences // 8, 8, median, median // 4, model.vocab_size)
        works = {"log-normal": log_normal_work(*sizes)}
    else:
        model, tokenizer = models.load_policy(str(arithmetic.BASE), cfg.device)
        methods = {"all": "grpo", "kept by dppo": "dppo", "kept by pps": "pps"}
        works = {
            f"embedded, {name}": recorded_works(method, STEPS)[-1]
            for name, method in methods.items()
        }
        works["log-normal"] = log_normal_work(16, 16, 120, 24, len(tokenizer))
    rows = []
    for name, work in works.items():
        rows += time_updates(model, name, work, cfg, rounds)
    for row in rows:
        cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
        print("  ".join(cells))
    write_json(json_file, rows)


def time_updates(model, name: str, work: Work, cfg: config.Config, rounds: int) -> list[dict]:
    """Rows for one set of lengths. ArithmeticError if the gradient of a variant is not that of the
    first one."""

    def once(update) -> tuple[int, float]:
        """(tokens, seconds)"""
        model.zero_grad()
        started = clock(cfg.device)
        return update(model, work, cfg), clock(cfg.device) - started

    fastest, first = {}, None
    limit = 1e-4 if cfg.dtype == "float32" else 0.1
    for variant, updates in VARIANTS.items():
        seconds = {}
        for update in updates:
            once(update)  # warms up
            seconds[update] = min(once(update)[1] for _ in range(2))
            tried = gradient(model).cpu()
            first = tried if first is None else first
            error = ((tried - first).norm() / first.norm()).item()
            if error > limit:
                raise ArithmeticError(f"{name}, {variant}: the gradient is off by {error}")
        fastest[variant] = min(seconds, key=seconds.get)

    times = {variant: [] for variant in fastest}
    for _, variant in itertools.product(range(rounds), fastest):
        times[variant].append(once(fastest[variant]))
    rows, reference = [], [seconds for _, seconds in times["padded, arrival"]]
    for variant, measured in times.items():
        tokens, seconds = zip(*measured, strict=True)
        ratios = [slow / fast for slow, fast in zip(reference, seconds, strict=True)]
        row = {
            "lengths": name,
            "variant": variant,
            "tokens": tokens[0],
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
        rows.append(row)
    return rows
