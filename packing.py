"""
Dense prompt packing: lay sequences of very different lengths, window by window, into token slots.

    plan_packs       integers only: which sequence goes into which slot
    build_pack       tensors: one slot, its segments end to end, positions restarted at each
    packed_logprobs  log-probabilities of the completion tokens of one slot, without a tensor of all its logits

Segments never see each other. What a segment may look at reaches the attention function explicitly, through
transformers' AttentionInterface, and is never guessed from position ids: transformers' own detection is silently off
unless `use_cache=False`, and builds an L x L mask.

The completions of a prompt may share it: its tokens are forwarded once, as a segment of their own, and each
completion is a segment that looks at them and at itself. It is the same function of the weights.

Packing cannot change the objective: nothing is dropped, split or truncated, and whatever multiplies a sequence in the
loss travels with the sequence, not with the slot.

`python packing.py` draws it. Source: arXiv:2603.04135 section 4.3 (window-based greedy); the details are our
reconstruction, shared prompts are ours. Letters: L tokens in a slot, S segments in it, K keys that they look at,
N completion tokens to predict, H heads, D head width, V vocabulary.
"""

import bisect
import inspect
import random
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

try:
    from flash_attn import flash_attn_varlen_func  # optional
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

ATTENTION, MASKED = "packed", "packed_masked"  # the names packed_attention and masked_attention are registered under
HEAD_LOGITS = 2**27  # of one chunk: 883 tokens of Qwen3's vocabulary, 0.5 GiB in float32, of which four copies live


# ---------------------------------------------------------------------------- the plan


def plan_packs(
    lengths: list[int],
    pack_tokens: int,
    window: int,
    prompts: list[int] | None = None,
    prompt_lengths: list[int] | None = None,
) -> list[list[int]]:
    """Assign each sequence to a slot of at most `pack_tokens` tokens; returns lists of indices into `lengths`.

    A window of `window` sequences in arrival order: the oldest opens a slot, so nothing starves; then the longest
    that fits is added and the window refilled, until none fits. A sequence longer than a slot gets a slot of its own.
    Deterministic; of equal lengths the older goes first. A window of 1 is next-fit. A window that holds everything
    has no order to keep: the longest opens a slot, which makes it first-fit-decreasing (where prompts are not shared).

    With `prompts`, which prompt each sequence continues, and `prompt_lengths`, its tokens (part of `lengths`), a slot
    holds a prompt once: others of its sequences cost that much less there, and go before those of other prompts.

        >>> plan_packs([5, 3, 4, 2, 6], pack_tokens=10, window=3)
        [[0, 2], [1, 4], [3]]
    """
    if pack_tokens < 1 or window < 1:
        raise ValueError(f"pack_tokens and window must be at least 1, got {pack_tokens} and {window}")
    arrivals = list(range(len(lengths)))
    if window >= len(lengths):
        arrivals.sort(key=lambda index: -lengths[index])
    arriving = ((lengths[index], -place) for place, index in enumerate(arrivals))
    waiting = []  # the window, ascending (tokens, -place): of those that fit, the last is the longest and oldest
    mates = {}  # the same by prompt
    placed, packs = [False] * len(lengths), []

    def refill():
        while len(waiting) < window and (entry := next(arriving, None)):
            bisect.insort(waiting, entry)
            if prompts:
                bisect.insort(mates.setdefault(prompts[arrivals[-entry[1]]], []), entry)

    for oldest in range(len(lengths)):
        if placed[oldest]:
            continue
        refill()
        entry, pack, room = (lengths[arrivals[oldest]], -oldest), [], pack_tokens
        held = {}  # the prompts in this slot, and their tokens
        while entry:
            tokens, place = entry[0], -entry[1]
            index, placed[place] = arrivals[place], True
            del waiting[bisect.bisect_left(waiting, entry)]
            room -= tokens
            if prompts:
                prompt = prompts[index]
                del mates[prompt][bisect.bisect_left(mates[prompt], entry)]
                room += held.get(prompt, 0)
                held[prompt] = prompt_lengths[index]
            pack.append(index)
            refill()
            fitting = [_last_that_fits(mates[prompt], room + held[prompt]) for prompt in held]
            entry = max(filter(None, fitting), default=None) or _last_that_fits(waiting, room)
        packs.append(pack)
    return packs


def _last_that_fits(entries, room):
    """Of ascending (tokens, -place) the last with at most `room` tokens, or None."""
    place = bisect.bisect_right(entries, (room, 0))
    return entries[place - 1] if place else None


def slot_tokens(pack: list[int], lengths: list[int], prompts=None, prompt_lengths=None) -> int:
    """Tokens that the sequences of one slot take, as plan_packs counts them."""
    tokens = sum(lengths[index] for index in pack)
    if prompts:
        own = {prompts[index]: prompt_lengths[index] for index in pack}
        tokens += sum(own.values()) - sum(prompt_lengths[index] for index in pack)
    return tokens


def pack_density(slots: list[int], pack_tokens: int) -> float:
    """Share of the slots' room that holds tokens, from the tokens in each. One over-long sequence makes its slot as
    long as itself; nan without slots."""
    return sum(slots) / sum(max(pack_tokens, tokens) for tokens in slots) if slots else float("nan")


# ---------------------------------------------------------------------------- one slot


@dataclass
class Segments:
    """What the tokens of a slot may look at. A segment's queries are its own tokens, its keys are those of its prompt,
    if that is a segment of its own, and its own; the last query sees all of them, the one before all but one."""

    runs: tuple[tuple[int, int, int], ...]  # neighbours of equal lengths: (how many, queries of each, keys of each)
    key_index: torch.Tensor | None  # [K] where in the slot the keys are, by segment; None: where the queries are
    cu_queries: torch.Tensor  # [S + 1] int32, cumulative
    cu_keys: torch.Tensor  # [S + 1] int32


@dataclass
class Pack:
    """One slot. Two sequences, prompt `a b` completion `x y` and prompt `c` completion `z`, become

    input_ids     a b x c      the last token of a sequence predicts nothing, and is left out
    position_ids  0 1 2 0
    predictors    1 2 3        the positions whose output predicts a completion token
    targets       x y z        the token each of them predicts
    owner         0 0 1        the sequence each target belongs to
    """

    input_ids: torch.Tensor  # [1, L]
    position_ids: torch.Tensor  # [1, L]
    segments: Segments
    predictors: torch.Tensor  # [N], in the order of the sequences
    targets: torch.Tensor  # [N]
    owner: torch.Tensor  # [N]


def build_pack(
    prompts: list[list[int]], completions: list[list[int]], device: str = "cpu", *, share_prompts: bool = False
) -> Pack:
    """Lay sequences (prompt + completion, token ids) end to end, long segments first, equal ones side by side.

    share_prompts: equal prompts are laid out once. A prompt has at least one token; ValueError if not.
    """
    trunks, branches = {}, {}  # what sees itself only; what also sees a trunk
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"sequence {number} has an empty prompt: no position predicts its first token")
        if share_prompts:
            trunks[tuple(prompt)] = prompt
            branches[number] = completion[:-1]
        else:
            trunks[number] = prompt + completion[:-1]

    ids, positions, keys, shapes, starts = [], [], [], [], {}
    for trunk in sorted(trunks, key=lambda trunk: -len(trunks[trunk])):
        starts[trunk] = len(ids)
        keys += range(len(ids), len(ids) + len(trunks[trunk]))
        shapes.append((len(trunks[trunk]), len(trunks[trunk])))  # queries, keys
        positions += range(len(trunks[trunk]))
        ids += trunks[trunk]
    for number in sorted(branches, key=lambda number: (-len(prompts[number]), -len(branches[number]))):
        before, tokens = len(prompts[number]), len(branches[number])
        trunk, start = starts[tuple(prompts[number])], len(ids)
        starts[number] = start
        if tokens:
            keys += [*range(trunk, trunk + before), *range(start, start + tokens)]
            shapes.append((tokens, before + tokens))
        positions += range(before, before + tokens)
        ids += branches[number]

    predictors, targets, owner = [], [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        last = starts[tuple(prompt) if share_prompts else number] + len(prompt) - 1  # it predicts the first
        first = starts[number] if share_prompts else last + 1
        predictors += [last, *range(first, first + len(completion) - 1)][: len(completion)]
        targets += completion
        owner += [number] * len(completion)

    row = torch.tensor([ids, positions], dtype=torch.long, device=device)  # [2, L]
    index = torch.tensor([predictors, targets, owner], dtype=torch.long, device=device)  # [3, N]
    cumulative = [[0, *accumulate(column)] for column in zip(*shapes, strict=True)]
    cu_queries, cu_keys = torch.tensor(cumulative, dtype=torch.int32, device=device)  # [S + 1] each
    runs = tuple((len(list(equal)), *shape) for shape, equal in groupby(shapes))
    key_index = torch.tensor(keys, dtype=torch.long, device=device) if share_prompts else None
    return Pack(row[:1], row[1:], Segments(runs, key_index, cu_queries, cu_keys), *index)


# ---------------------------------------------------------------------------- attention inside segments


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, segments: Segments | None = None, **kwargs
):
    """Causal attention inside each segment; query [1, H, L, D], key and value [1, H_kv, L, D] -> [1, L, H, D].

    On CUDA in 16 bits one variable-length kernel call, flash-attn's where it is installed, else PyTorch's; elsewhere
    one scaled_dot_product_attention a run of equal segments.
    """
    kernel = value.is_cuda and value.dtype.itemsize == 2 and (flash_attn_varlen_func or varlen_attn)
    return _attend(_varlen if kernel else _by_runs, query, key, value, segments, scaling, dropout, kwargs)


def masked_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, segments: Segments | None = None, **kwargs
):
    """The same with one L x K mask: slow, obvious, what tests and bench.py compare packed_attention with."""
    return _attend(_by_mask, query, key, value, segments, scaling, dropout, kwargs)


def _attend(inside, query, key, value, segments, scaling, dropout, kwargs):
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}: this model would be trained on another policy")
    if dropout:
        raise NotImplementedError(f"packed attention has no dropout, and the model asks for {dropout}")
    assert segments is not None, "packed attention needs segments: call the model through packed_logprobs"
    # [L, H, D]; under autocast normalised queries and keys are float32, values are not
    query, key, value = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    if segments.key_index is not None:
        key, value = key.index_select(0, segments.key_index), value.index_select(0, segments.key_index)  # [K, H_kv, D]
    return inside(query, key, value, segments, scaling)[None], None  # [1, L, H, D]


def _by_runs(query, key, value, segments, scaling):
    """Slices by `split`: its backward is one cat, that of indexing writes a zero tensor as long as the slot each."""
    runs, out = segments.runs, []
    parts = zip(
        runs,
        query.split([count * queries for count, queries, _ in runs]),
        *(states.split([count * keys for count, _, keys in runs]) for states in (key, value)),
        strict=True,
    )
    for (count, queries, keys), *states in parts:
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in states)  # [count, H, queries or keys, D]
        mask = None if queries == keys else _causal(queries, keys, q.device)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        out.append(attended.transpose(1, 2).flatten(0, 1))  # [count * queries, H, D]
    return torch.cat(out)


def _by_mask(query, key, value, segments, scaling):
    blocks = [_causal(queries, keys, query.device) for count, queries, keys in segments.runs for _ in range(count)]
    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))  # [1, H, L or K, D]
    mask, grouped = torch.block_diag(*blocks).bool(), q.shape[1] != k.shape[1]  # [L, K]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)[0].transpose(0, 1)


def _causal(queries, keys, device):
    """[queries, keys] bool: the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _varlen(query, key, value, segments, scaling):
    """Flash kernels; where a segment has more keys than queries, they too let the last query see every key."""
    longest = [max(shape) for shape in zip(*(run[1:] for run in segments.runs), strict=True)]
    where = (segments.cu_queries, segments.cu_keys, *longest)
    if flash_attn_varlen_func:
        return flash_attn_varlen_func(query, key, value, *where, softmax_scale=scaling, causal=True)
    signature = inspect.signature(varlen_attn).parameters  # torch 2.12 asks for enable_gqa, 2.11 does not know it
    grouped = {"enable_gqa": True} if "enable_gqa" in signature else {}
    return varlen_attn(query, key, value, *where, scale=scaling, window_size=(-1, 0), **grouped)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionInterface.register(MASKED, masked_attention)


# ---------------------------------------------------------------------------- log-probabilities


def packed_logprobs(model, pack: Pack, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [N] of the pack's completion tokens under the policy that samples at `temperature`.

    `model` is a causal LM loaded with `attn_implementation=packing.ATTENTION`, whose logits are its output embedding
    of its last hidden state and nothing more (rollout.load_policy checks it). Entropies, in nats, carry no gradient.
    """
    hidden = model.base_model(
        input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, segments=pack.segments
    ).last_hidden_state[0]  # [L, hidden]
    head, vocab_size = model.get_output_embeddings(), model.vocab_size
    # index_select, because what indexing does backward adds up in parallel: in no fixed order where a prompt is shared
    return token_logprobs(hidden.index_select(0, pack.predictors), head, pack.targets, temperature, vocab_size)


def token_logprobs(
    hidden, head, targets, temperature=1.0, vocab_size=None, head_logits=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [N] of targets [N] from hidden states [N, hidden], at most `head_logits` logits at a time.

    Of the head only the first `vocab_size` rows are tokens (Qwen3 pads it). Chunks are computed again in the backward
    pass: there is never more than one chunk's logits, softmax and gradient. Float32, or wider.
    """
    rows = (head_logits or HEAD_LOGITS) // head.out_features
    if len(hidden) <= rows:
        return _chunk_logprobs(hidden, head, targets, temperature, vocab_size)
    chunks = [
        checkpoint(
            _chunk_logprobs, part, head, some, temperature, vocab_size, use_reentrant=False, preserve_rng_state=False
        )
        for part, some in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropy = (torch.cat(columns) for columns in zip(*chunks, strict=True))
    return logprobs, entropy


def _chunk_logprobs(hidden, head, targets, temperature, vocab_size):
    logits = head(hidden)[:, :vocab_size]  # [n, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    every = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, dim=-1)  # [n, V]
    logprobs = every.gather(1, targets[:, None]).squeeze(1)  # [n]; before the entropy, which is not computed again then
    with torch.no_grad():
        entropy = every.exp().mul_(every).sum(dim=-1).neg()  # [n]
    return logprobs, entropy


def packs_exactly(model) -> bool:
    """Whether two packed sequences have the log-probs that the model itself gives to each: not so if it ignores the
    attention interface, scales or caps its logits, or (in training mode) has dropout."""
    sequences = torch.tensor([[0, 1, 2], [2, 1, 0]], device=model.device)
    pack, was_training = build_pack([[0], [2]], [[1, 2], [1, 0]], model.device), model.training
    try:
        with torch.no_grad():
            ours, _ = packed_logprobs(model, pack)
            model.eval().set_attn_implementation("sdpa")
            logits = model(sequences, use_cache=False).logits[:, :-1, : model.vocab_size]  # [2, 2, V]
    except (AssertionError, NotImplementedError, TypeError, ValueError):
        return False
    model.train(was_training).set_attn_implementation(ATTENTION)
    return torch.allclose(
        ours, logits.log_softmax(dim=-1).gather(2, sequences[:, 1:, None]).flatten().to(ours.dtype), atol=1e-4
    )


# ---------------------------------------------------------------------------- a picture


def draw(pack_tokens: int = 72, window: int = 4, seed: int = 2) -> str:
    """Twelve sequences of three prompts, padded and packed, as text: a character a token, digits for prompts, a letter
    for each completion, dots where nothing is."""
    rng = random.Random(seed)
    prompts = [[ord(digit)] * rng.randint(5, 12) for digit in "123"]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    completions = [[ord(letter)] * min(50, int(rng.lognormvariate(2.6, 0.6))) for letter in "abcdefghijkl"]
    totals = [len(prompt) + len(completion) - 1 for prompt, completion in zip(prompts, completions, strict=True)]
    width = [max(totals[start : start + 4]) for start in range(0, 12, 4)]

    lines = ["padded, 4 to a micro-batch"]
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        lines.append("  " + "".join(map(chr, prompt + completion[:-1])).ljust(width[number // 4], "."))
    lines.append(f"  {4 * sum(width)} tokens, {sum(totals) / sum(width) / 4:.0%} of them real")
    for share in (False, True):
        words = ([prompt[0] for prompt in prompts], [len(prompt) for prompt in prompts]) if share else ()
        packs = plan_packs(totals, pack_tokens, window, *words)
        lines += ["", f"packed, window {window}" + ", shared prompts" * share]
        for pack in packs:
            slot = build_pack([prompts[i] for i in pack], [completions[i] for i in pack], share_prompts=share)
            lines.append("  " + "".join(map(chr, slot.input_ids[0].tolist())).ljust(pack_tokens, "."))
        slots = [slot_tokens(pack, totals, *words) for pack in packs]
        whole, but_last = (pack_density(some, pack_tokens) for some in (slots, slots[:-1]))
        lines.append(
            f"  {sum(slots)} tokens in {len(slots)} slots: density {whole:.0%}, {but_last:.0%} without the last"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw())
