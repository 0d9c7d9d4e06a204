"""
How fast this machine samples a batch, with every engine but vLLM, and how fast it trains on it,
packed and padded.

    python -m bench speed
    python -m bench speed --flags="--model Qwen/Qwen3-0.6B --data gsm8k"

Variants take turns. All speeds are in tokens of completions, so updates compare although padding
computes more.

A padded micro-batch is as wide as its longest sequence. Its pad tokens stand at the end, where
causal attention needs no mask, and log-probs come from the same chunked head as in packing.py. It
takes as many sequences as fill a quarter of a slot, padding included: of four sizes, this was the
fastest on a CPU. Sequences come in order of arrival, or sorted by length, which leaves hardly any
padding.

Letters: K prompts, G completions each, n sequences of a micro-batch and N completion tokens in it.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch.nn.utils.rnn import pad_sequence

import config
import dppo
import models
import packing
import rollout
import train
from bench import JsonFile, write_json
from runtime.device import autocast
from runtime.timer import clock
from update import Sequence, accumulate_gradients, kept_sequences, trainer_logprobs, work

FLAGS = "--prompts-per-step 32 --group-size 16 --out-dir out-speed/never-written"
ENGINES = ("hf", "compact", "plain")
AT_ONCE = (128, 512)  # sequences
SHARES = {"all": 1.0, "a tenth": 0.1}  # of the completions, at random


@dataclass
class Batch:
    """The arguments of update.accumulate_gradients. Tensors are [K, G]."""

    rollouts: rollout.Rollouts
    advantages: torch.Tensor
    factor: torch.Tensor
    keep: torch.Tensor


def main(flags: str = "", rounds: int = 7, json_file: JsonFile = None) -> None:
    """Time the rollouts of a batch, and updates with it.

    Args:
        flags: of train.py. By default the embedded model samples 32 x 16 completions of its task
        rounds: how often each variant is timed
        json_file: where to write the rows {part, variant, tokens_per_s, ratio, ratio_low,
            ratio_high}: medians, and speeds over that of the part's first variant
    """
    args = f"{FLAGS} {flags} --importance-cap 0"  # padded updates have no correction
    trainer = train.Trainer(config.parse_config(args.split()))
    model, cfg = trainer.model, trainer.cfg
    prompts = [trainer.train_ids[q] for q in trainer.candidates(1).tolist()]
    sampled = {}  # what each engine sampled

    def sample(engine: str, at_once: int) -> int:
        how = replace(trainer.sampling, engine=models.ENGINES[engine], batch_size=at_once)
        options = {"group_size": cfg.group_size, "seed": cfg.seed}
        sampled[engine] = rollout.sample(trainer.policy, prompts, how, **options)
        return sampled[engine].lengths.sum().item()

    def update(variant: str, batch: Batch) -> int:
        UPDATES[variant](model, batch, cfg)
        return batch.rollouts.lengths[batch.keep].sum().item()

    engines = {
        f"{engine}, {at_once} at once": functools.partial(sample, engine, at_once)
        for at_once in AT_ONCE
        for engine in ENGINES
    }
    rows = in_turns("rollout", engines, rounds, cfg.device)
    for engine, rollouts in sampled.items():
        gap = (trainer_logprobs(model, rollouts, cfg) - rollouts.logprobs).abs().max()
        print(f"{engine}: log-probs differ from the trainer's by at most {gap:.1e}")

    for name, share in SHARES.items():
        batch = random_batch(sampled["compact"], share)
        updates = {variant: functools.partial(update, variant, batch) for variant in UPDATES}
        check_gradients(model, updates, limit=1e-4 if cfg.dtype == "float32" else 0.1)
        rows += in_turns(f"update, {name}", updates, rounds, cfg.device)
    write_json(json_file, {"rows": rows})


def in_turns(part: str, variants: dict[str, Callable], rounds: int, device: str) -> list[dict]:
    """Time variants, each of which returns how many tokens it handled; returns and prints a row for
    each."""
    speeds = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, variant in variants.items():
            started = clock(device)
            speed = variant() / (clock(device) - started)
            if number > 0:  # the first round warms up
                speeds[name].append(speed)
    rows, (first, *_) = [], speeds.values()
    for name, own in speeds.items():
        ratios = [fast / slow for fast, slow in zip(own, first, strict=True)]
        row = {
            "part": part,
            "variant": name,
            "tokens_per_s": statistics.median(own),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
        rows.append(row)
        shown = "{tokens_per_s:9.0f} tokens/s {ratio:6.2f} ({ratio_low:.2f} to {ratio_high:.2f})"
        print(f"{part:16s} {name:24s} {shown.format(**row)}", flush=True)
    return rows


# ---------------------------------------------------------------------------- updates


def random_batch(rollouts: rollout.Rollouts, share: float) -> Batch:
    """A share of the completions, with random advantages."""
    generator = torch.Generator().manual_seed(0)
    shape = rollouts.lengths.shape
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    factor = torch.full_like(advantages, 1 / rollouts.lengths.sum())
    return Batch(rollouts, advantages, factor, torch.rand(shape, generator=generator) < share)


def packed_update(model, batch: Batch, cfg, *, share_prompts: bool) -> None:
    """Add the gradient of the batch to .grad, as train.py does."""
    model.set_attn_implementation(packing.ATTENTION)
    with mock.patch.object(packing, "shares_prompts", return_value=share_prompts):
        old_logprobs = batch.rollouts.logprobs
        accumulate_gradients(model, *vars(batch).values(), cfg=cfg, old_logprobs=old_logprobs)


def padded_update(model, batch: Batch, cfg, *, by_length: bool) -> None:
    """Add the same gradient from padded micro-batches."""
    model.set_attn_implementation("sdpa")
    sequences = kept_sequences(batch.rollouts, batch.keep, torch.arange(len(batch.keep)))
    if by_length:
        sequences.sort(key=work)
    micro_batches = [[]]
    for sequence in sequences:
        longest = max(map(work, [*micro_batches[-1], sequence]))
        room = longest * (len(micro_batches[-1]) + 1)
        if micro_batches[-1] and room > cfg.pack_tokens // 4:
            micro_batches.append([])
        micro_batches[-1].append(sequence)
    for some in micro_batches:
        padded_backward(model, some, batch, cfg)


def padded_backward(model, sequences: list[Sequence], batch: Batch, cfg) -> None:
    """Add the gradient of one padded micro-batch to .grad."""
    # The last token of a completion is predicted, and not read.
    texts = [torch.tensor(one.prompt + one.completion[:-1]) for one in sequences]
    ids = pad_sequence(texts, batch_first=True).to(model.device)  # [n, longest]
    targets = torch.tensor([token for one in sequences for token in one.completion])  # [N]
    lengths = torch.tensor([len(one.completion) for one in sequences])
    reads = [len(one.prompt) - 1 + torch.arange(len(one.completion)) for one in sequences]
    reads = torch.cat(reads).to(model.device)  # [N]
    owner = torch.arange(len(sequences)).repeat_interleave(lengths).to(model.device)  # [N]
    place = torch.tensor([one.place for one in sequences]).repeat_interleave(lengths)  # [N]
    of_tokens = lambda table: table.flatten()[place].float().to(model.device)
    with autocast(cfg):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[owner, reads]
        head = model.get_output_embeddings()
        logprobs, _ = packing.token_logprobs(
            hidden, head, targets.to(model.device), vocab_size=model.vocab_size
        )  # [N]
    old = torch.cat([one.logprobs for one in sequences]).to(model.device)
    loss, _ = dppo.token_loss(
        logprobs, old, of_tokens(batch.advantages), owner, loss=cfg.loss, eps_low=cfg.eps_low,
        eps_high=cfg.eps_high, num_sequences=len(sequences),
    )  # fmt: skip
    (loss * of_tokens(batch.factor)).sum().backward()


UPDATES = {
    "padded, arrival": functools.partial(padded_update, by_length=False),
    "padded, sorted": functools.partial(padded_update, by_length=True),
    "packed": functools.partial(packed_update, share_prompts=False),
    "packed, shared prompts": functools.partial(packed_update, share_prompts=True),
}


def check_gradients(model, updates: dict[str, Callable], limit: float) -> None:
    """ArithmeticError if the gradient of a variant is not that of the first one."""
    first = None
    for name, update in updates.items():
        model.zero_grad()
        update()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).cpu()
        first = gradient if first is None else first
        error = ((gradient - first).norm() / first.norm()).item()
        if error > limit:
            raise ArithmeticError(f"{name}: the gradient is off by {error}")
