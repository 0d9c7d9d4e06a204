"""
What packing is compared with: padded micro-batches, and how fast either is (`python bench.py update`).

Padded sequences are as long as the longest of their micro-batch. Here pad tokens stand at the end, where causal
attention needs no mask, log-probs come from the same chunked head, and a micro-batch takes as many sequences as fit a
budget of tokens, padding included. Its two orders are that of arrival and that of length, which hardly pads.

Letters: K prompts, G completions each, N completion tokens of a micro-batch.
"""

import functools
import itertools
import json
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal
from unittest import mock

import tokenizers
import torch
import transformers
import tyro

import arithmetic
import config
import dppo
import packing
import rollout
import train
import update

SHAPES = {  # Qwen3's: hidden, feed-forward, layers, heads, key-value heads, head width, vocabulary
    "tiny": (128, 384, 4, 4, 2, 32, 2048),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bfloat16, of the makers' data sheets
MICRO_BATCHES = (512, 1024, 2048, 4096, 8192, 16_384)  # tokens; the padded variants are given the best of these


@dataclass
class Work:
    """What one update is given, as update.accumulate_gradients takes it: [K, G] each, but for the rollouts."""

    rollouts: rollout.Rollouts
    advantages: torch.Tensor
    scale: torch.Tensor
    keep: torch.Tensor

    def sequences(self) -> dict[int, tuple[int, int]]:
        """(prompt, completion) lengths of what is kept, by place in K * G."""
        lengths, G = self.rollouts.lengths.flatten().tolist(), self.keep.shape[1]
        places = self.keep.flatten().nonzero().squeeze(1).tolist()
        return {place: (len(self.rollouts.prompt_ids[place // G]), lengths[place]) for place in places}

    def plan(self, pack_tokens: int, window: int, share_prompts: bool) -> list[int]:
        """Tokens in each slot of this work's plan."""
        sequences = self.sequences()
        prompts, lengths = zip(*sequences.values(), strict=True)
        totals = [prompt + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
        shared = ([place // self.keep.shape[1] for place in sequences], prompts) if share_prompts else ()
        packs = packing.plan_packs(totals, pack_tokens, window, *shared)
        return [packing.slot_tokens(pack, totals, *shared) for pack in packs]


# ---------------------------------------------------------------------------- two ways to do the same update


def packed_update(model, work: Work, cfg: config.Config, attention: str = packing.ATTENTION) -> int:
    """The real one. Returns tokens forwarded."""
    model.set_attn_implementation(attention)
    words = (model, work.rollouts, work.advantages, work.scale, work.keep)
    return int(update.accumulate_gradients(*words, cfg=cfg)[update.SUMS.index("tokens")])


def micro_batches(order: list[int], lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Cut an order of sequences where one more would make it more than `tokens`, each as long as the longest."""
    batches, longest = [], 0
    for place in order:
        longest = max(longest, lengths[place])
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = lengths[place]
        batches[-1].append(place)
    return batches


def padded_update(model, work: Work, cfg: config.Config, tokens: int, in_order_of_length: bool) -> int:
    """The same gradient from micro-batches of at most `tokens`. Returns tokens forwarded, padding included."""
    model.set_attn_implementation("sdpa")
    sequences, forwarded, device = work.sequences(), 0, model.device
    order = sorted(sequences, key=lambda place: sum(sequences[place])) if in_order_of_length else list(sequences)
    completion_ids, old_logprobs = (
        states.flatten(0, 1) for states in (work.rollouts.completion_ids, work.rollouts.logprobs)
    )
    advantages, scale = work.advantages.flatten().to(device), work.scale.flatten().to(device)  # [K * G]
    totals = {place: prompt + completion - 1 for place, (prompt, completion) in sequences.items()}
    for places in micro_batches(order, totals, tokens):
        completions = [completion_ids[place, : sequences[place][1]].tolist() for place in places]
        prompts = [work.rollouts.prompt_ids[place // work.keep.shape[1]] for place in places]
        texts = [prompt + completion[:-1] for prompt, completion in zip(prompts, completions, strict=True)]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)  # [rows, width]
        firsts = [row * width + len(prompt) - 1 for row, prompt in enumerate(prompts)]
        predictors = [
            place for first, of in zip(firsts, completions, strict=True) for place in range(first, first + len(of))
        ]
        owner = torch.tensor([place for place in places for _ in range(sequences[place][1])], device=device)  # [N]
        targets = torch.tensor(list(itertools.chain(*completions)), device=device)  # [N]
        old = torch.cat([old_logprobs[place, : sequences[place][1]] for place in places])  # [N]
        with update.autocast(cfg, cache=False):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            logprobs, _ = packing.token_logprobs(
                hidden[predictors], model.get_output_embeddings(), targets, vocab_size=model.vocab_size
            )
        loss, _ = dppo.token_loss(
            logprobs, old, advantages[owner].float(), owner, loss=cfg.loss, eps_low=cfg.eps_low, eps_high=cfg.eps_high
        )
        (loss * scale[owner].float()).sum().backward()
        forwarded += ids.numel()
    return forwarded


# ---------------------------------------------------------------------------- what is updated


def recorded_works(method: str, steps: int) -> list[Work]:
    """Every update of a run of the embedded task."""
    works, plain = [], train.accumulate_gradients

    def record(model, rollouts, advantages, scale, keep, **options):
        works.append(Work(rollouts, advantages, scale, keep))
        return plain(model, rollouts, advantages, scale, keep, **options)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(train, "accumulate_gradients", record):
        words = ["--method", method, "--steps", str(steps), "--eval-every", "0", "--save-every", "0"]
        train.main(config.parse_config([*words, "--out-dir", f"{folder}/run"]))
    return works


def log_normal_work(K: int, G: int, median: int, prompt_tokens: int, vocabulary: int, device: str) -> Work:
    """Completions whose lengths are log-normal with a tenfold spread (two standard deviations each way), prompts of
    half to one and a half times prompt_tokens; random tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = (median * 10 ** (torch.randn(K, G, generator=generator).clamp(-2, 2) / 4)).long()
    counts = torch.randint(prompt_tokens // 2, 3 * prompt_tokens // 2 + 1, (K,), generator=generator)
    ids = torch.randint(vocabulary, (K, G, int(lengths.max())), generator=generator)
    prompt_ids = [torch.randint(vocabulary, (count,), generator=generator).tolist() for count in counts.tolist()]
    old = torch.full(ids.shape, -math.log(vocabulary), device=device)
    nothing = torch.zeros(K, G)
    rollouts = rollout.Rollouts(prompt_ids, ids.to(device), old, nothing, nothing, lengths, nothing.bool())
    advantages = torch.randn(K, G, generator=generator, dtype=torch.float64)
    return Work(
        rollouts, advantages, torch.full_like(advantages, 1 / lengths.sum()), torch.ones(K, G, dtype=torch.bool)
    )


def random_model(shape: str, device: str):
    """A Qwen3 of that shape, float32 weights, untrained."""
    hidden, inner, layers, heads, kv_heads, width, vocabulary = SHAPES[shape]
    options = transformers.Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=width, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    options._attn_implementation = packing.ATTENTION
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen3ForCausalLM(options)


def random_policy(shape: str, folder: str) -> None:
    """A folder for --model with such a model, a tokenizer of as many words, and problems.jsonl."""
    vocabulary, rng = SHAPES[shape][-1], random.Random(0)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{n}": n for n in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t2")
    tokenizer.save_pretrained(folder)
    model = random_model(shape, "cpu")
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=2)
    model.save_pretrained(folder)
    problems = (" ".join(f"t{rng.randrange(vocabulary)}" for _ in range(rng.randint(20, 200))) for _ in range(256))
    lines = (json.dumps({"problem": problem, "answer": "1"}) + "\n" for problem in problems)
    Path(folder, "problems.jsonl").write_text("".join(lines))


def model_flops(options, sequences: list[tuple[int, int]]) -> float:
    """Operations of forward and backward, 2 + 4 a weight and token: the layers' weights x all tokens + the head's x
    completion tokens, and causal attention, 6 x layers x heads x width x sum of squared lengths. Nothing for padding or
    recomputation, and no less for prompts that are shared."""
    heads, kv_heads, width = options.num_attention_heads, options.num_key_value_heads, options.head_dim
    layer = options.hidden_size * (2 * heads * width + 2 * kv_heads * width + 3 * options.intermediate_size)
    layers = options.num_hidden_layers * sum(layer * sum(both) + heads * width * sum(both) ** 2 for both in sequences)
    return 6 * (layers + options.vocab_size * options.hidden_size * sum(completion for _, completion in sequences))


# ---------------------------------------------------------------------------- the measurement


def main(
    shape: Literal["embedded", "tiny", "0.6b", "1.7b"] = "embedded",
    rounds: int = 7,
    pack_tokens: int | None = None,
    steps: int = 24,
    sequences: int = 256,
    gradient_checkpointing: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Time forward and backward of one update, packed and padded, in turn. Rows {lengths, variant, tokens, seconds,
    ratio}: tokens forwarded, medians, and how many times as fast as padded in order of arrival.

    Args:
        shape: embedded: the embedded base model and the lengths of real runs; else random weights of that size
        rounds: times that each variant is timed
        pack_tokens: tokens in a slot; default: train.py's
        steps: steps of the runs that the lengths come from
        sequences: how many, with a shape that is not embedded
        gradient_checkpointing: compute layers again in the backward pass
        json_file: where to write the rows
    """
    words = ["--out-dir", "unused"] + (["--pack-tokens", str(pack_tokens)] if pack_tokens else [])
    cfg = config.resolve(config.parse_config(words))
    rows = head_rows(cfg.device)  # first: what it cannot measure here, it says before anything else was worked out
    if shape == "embedded":
        runs = {method: recorded_works(method, steps) for method in ("dppo", "pps")}
        last = runs["dppo"][-1]
        works = {"embedded, all": replace(last, keep=torch.ones_like(last.keep), scale=torch.ones_like(last.scale))}
        works |= {f"embedded, kept by {method}": runs[method][-1] for method in runs}
        model, tokenizer = rollout.load_policy(str(arithmetic.base_folder()), cfg.device)
        works["log-normal"] = log_normal_work(16, 16, 120, 24, len(tokenizer), cfg.device)
        of_steps = {f"embedded, kept by {method}": runs[method] for method in runs}
        for name, some in (of_steps | {"log-normal": [works["log-normal"]]}).items():
            rows += density_rows(name, some, cfg.pack_tokens)
    else:
        model, median = random_model(shape, cfg.device), 60 if shape == "tiny" else 600
        works = {"log-normal": log_normal_work(sequences // 8, 8, median, median // 4, SHAPES[shape][-1], cfg.device)}
    if gradient_checkpointing:
        update.checkpoint_layers(model)
    for name, work in works.items():
        rows += time_updates(model, name, work, cfg, rounds)
    for row in rows:
        print("  ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def density_rows(name: str, works: list[Work], pack_tokens: int) -> list[dict]:
    """Density over all slots but the last of each step: next-fit, a window of 64, first-fit-decreasing."""
    rows = []
    for window, share in itertools.product((1, 64, 10**6), (False, True)):
        slots = [tokens for work in works for tokens in work.plan(pack_tokens, window, share)[:-1]]
        variant = f"density, window {'all' if window > 64 else window}" + ", shared prompts" * share
        rows.append({"lengths": name, "variant": variant, "tokens": sum(slots), "seconds": None, "ratio": None,
                     "density": packing.pack_density(slots, pack_tokens)})  # fmt: skip
    return rows


def time_updates(model, name: str, work: Work, cfg: config.Config, rounds: int) -> list[dict]:
    """Rows of one set of lengths. Each variant's gradient is compared with the first one's before it is timed."""
    lengths, cuda = list(work.sequences().values()), cfg.device == "cuda"
    variants = {
        ("padded, sorted" if in_order else "padded, arrival", budget): functools.partial(
            padded_update, model, work, cfg, budget, in_order
        )
        for in_order in (False, True)
        for budget in MICRO_BATCHES
        if cfg.pack_tokens / 4 <= budget <= 2 * cfg.pack_tokens
    }
    for share in (False, True):
        packed = functools.partial(packed_update, model, work, replace(cfg, share_prompts=share))
        variants["packed" + ", shared prompts" * share, None] = packed
    variants["packed, masked SDPA", None] = functools.partial(
        packed_update, model, work, replace(cfg, share_prompts=False), packing.MASKED
    )

    def once(variant):
        model.zero_grad()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        started = train.clock(cfg)
        return variants[variant](), train.clock(cfg) - started

    seconds, tokens, first = {}, {}, None
    for variant in variants:  # the first call warms up
        tokens[variant], _ = once(variant)
        gradient = torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])
        first = gradient if first is None else first
        error = ((gradient - first).norm() / first.norm()).item()
        assert error < (1e-4 if cfg.dtype == "float32" else 0.1), f"{name}, {variant}: the gradient is off by {error}"
        seconds[variant] = min(once(variant)[1] for _ in range(2))
    names = dict.fromkeys(kind for kind, _ in variants)
    chosen = [min((v for v in variants if v[0] == kind), key=seconds.get) for kind in names]  # the best micro-batches
    times, peaks = {variant: [] for variant in chosen}, {}
    for _, variant in itertools.product(range(rounds), chosen):
        times[variant].append(once(variant)[1])
        peaks[variant] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    rows = []
    for variant in chosen:
        median = statistics.median(times[variant])
        ratios = [slow / fast for slow, fast in zip(times[chosen[0]], times[variant], strict=True)]
        rows.append({"lengths": name, "variant": variant[0], "tokens": tokens[variant], "seconds": median,
                     "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
                     "micro_batch": variant[1]})  # fmt: skip
        if cuda:
            peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in torch.cuda.get_device_name()), math.nan)
            real = sum(map(sum, lengths)) / median  # tokens of sequences a second, shared or not, without padding
            utilisation = model_flops(model.config, lengths) / median / peak
            rows[-1] |= {"tokens_per_s": real, "utilisation": utilisation, "peak_gib": peaks[variant]}
    return rows


def head_rows(device: str) -> list[dict]:
    """Log-probs and their gradient with Qwen3's vocabulary from hidden states 64 wide: seconds, peak memory. Each in a
    process of its own, so that the peak is its own."""
    rows = []
    for tokens, limit in ((2048, 2**62), (2048, packing.HEAD_LOGITS), (16_384, packing.HEAD_LOGITS)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peak = pool.apply(measure_head, (tokens, limit, device))
        variant = "head, chunked" if limit == packing.HEAD_LOGITS else "head, all logits at once"
        rows.append({"lengths": f"{tokens} x 151936 logits", "variant": variant, "tokens": tokens, "seconds": seconds,
                     "ratio": None, "peak_gib": peak})  # fmt: skip
    return rows


def measure_head(tokens: int, limit: int, device: str) -> tuple[float, float]:
    """(seconds, GiB above what was there before)."""
    head = torch.nn.Linear(64, 151_936, bias=False, device=device)
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # Linux: a child begins with its parent's peak

    def go(count):
        hidden = torch.randn(count, 64, device=device, requires_grad=True)
        targets = torch.arange(count, device=device)
        packing.token_logprobs(hidden, head, targets, head_logits=limit)[0].sum().backward()
        return hidden.grad.sum().item()  # waits for the device

    def peak():
        if device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20

    go(8)
    before, started = peak(), time.perf_counter()
    go(tokens)
    return time.perf_counter() - started, peak() - before
