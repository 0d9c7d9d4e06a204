"""
Dense prompt packing: lay sequences of very different lengths end to end in slots of a fixed size.

    plan_packs       integers only: which sequence goes into which slot
    build_pack       tensors: one slot, its segments end to end, with positions that restart in each
    packed_logprobs  log-probabilities of a slot's completion tokens, a chunk of logits at a time

Sequences never attend to each other. The boundaries of segments reach the attention function
explicitly, through transformers' AttentionInterface, and are never inferred from position ids.
transformers' own detection of packed sequences is silently off unless `use_cache=False`, and it
builds an L x L mask.

Completions of one prompt may share it: its tokens are forwarded once, as a segment of their own,
and each completion is a segment that attends to the prompt and to itself. The result is the same
function of the weights.

Packing cannot change the objective: nothing is dropped, split or truncated, and the multiplier of a
sequence in the loss belongs to the sequence, not to its slot.

Notebook 03 draws it. Source: arXiv:2603.04135 section 4.3 (window-based greedy). The details are
our reconstruction; shared prompts are our addition. Letters: L tokens in a slot, S segments in it,
K keys they attend to, N completion tokens to predict, H heads, D head width, V vocabulary.
"""

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, chain, groupby

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from runtime.device import send

WINDOW = 64  # sequences that the packer chooses from at a time
ATTENTION = "packed"  # packed_attention is registered under this name
# Logits of one chunk: 883 tokens of Qwen3's vocabulary, 0.5 GiB in float32; four copies are live.
HEAD_LOGITS = 2**27


# ------------------------------------------------------------------------- the plan


def plan_packs(
    lengths: list[int],
    pack_tokens: int,
    window: int,
    prompts: list[int] | None = None,
    prompt_lengths: list[int] | None = None,
) -> list[list[int]]:
    """Assign each sequence to a slot of `pack_tokens` tokens; a slot is a list of indices.

    The planner sees a window of `window` sequences in arrival order. The oldest opens a slot, so
    none starves. Then the longest that fits is added and the window refilled, until none fits. A
    sequence longer than a slot gets a slot of its own. The plan is deterministic; ties go to the
    older sequence. A window of 1 is next-fit. If the window holds everything, the order of arrival
    does not matter, so the longest goes first: first-fit-decreasing (if prompts are not shared).

    `prompts` says which prompt each sequence continues, and `prompt_lengths` how many of its
    `lengths` are the prompt. Then a slot holds a prompt once: further sequences of that prompt cost
    less by the prompt's length, and are placed before sequences of other prompts.

        >>> plan_packs([5, 3, 4, 2, 6], pack_tokens=10, window=3)
        [[0, 2], [1, 4], [3]]
    """
    arriving = deque(range(len(lengths)))
    if window >= len(lengths):
        arriving = deque(sorted(arriving, key=lambda index: -lengths[index]))
    prompt_of = prompts or [None] * len(lengths)
    waiting = []  # the window, the oldest first
    slots = []
    while arriving or waiting:
        slot, room = [], pack_tokens
        held = {}  # the prompts in this slot, with their lengths
        while True:
            while arriving and len(waiting) < window:
                waiting.append(arriving.popleft())
            cost = {index: lengths[index] - held.get(prompt_of[index], 0) for index in waiting}
            fitting = [index for index in waiting if cost[index] <= room]
            if not slot:
                index = waiting[0]
            elif fitting:
                # the longest, of a prompt in this slot if there is one; the oldest of equal ones
                index = max(fitting, key=lambda index: (prompt_of[index] in held, lengths[index]))
            else:
                break
            waiting.remove(index)
            slot.append(index)
            room -= cost[index]
            if prompts:
                held[prompt_of[index]] = prompt_lengths[index]
        slots.append(slot)
    return slots


def shares_prompts(device) -> bool:
    """Whether a slot holds a prompt once for all of its completions there. Without it, an update of
    SmolLM2 takes 2.5 times as long on a CPU; CUDA's kernels gain nothing."""
    return torch.device(device).type == "cpu"


# ------------------------------------------------------------------------- one slot


@dataclass
class Segments:
    """What the tokens of a slot may attend to.

    A segment's queries are its own tokens. Its keys are its own tokens, preceded by those of its
    prompt if the prompt is a segment of its own. The last query sees all keys, the one before it
    all but one, and so on."""

    runs: tuple[tuple[int, int, int], ...]  # adjacent equal segments: (count, queries, keys)
    key_index: torch.Tensor | None  # [K] slot positions of the keys, by segment; None: the queries'
    cu_queries: torch.Tensor  # [S + 1] int32, cumulative
    cu_keys: torch.Tensor  # [S + 1] int32


@dataclass
class Pack:
    """One slot. Prompt `a b` with completion `x y`, and prompt `c` with completion `z`, become

    input_ids     a b x c      without each sequence's last token, which predicts nothing
    position_ids  0 1 2 0
    predictors    1 2 3        the positions whose output predicts a completion token
    targets       x y z        the token that each of them predicts
    owner         0 0 1        the sequence that each target belongs to
    """

    input_ids: torch.Tensor  # [1, L]
    position_ids: torch.Tensor  # [1, L]
    segments: Segments
    predictors: torch.Tensor  # [N], in the order of the sequences
    targets: torch.Tensor  # [N]
    owner: torch.Tensor  # [N]
    num_sequences: int


def build_pack(
    prompts: list[list[int]], completions: list[list[int]], device="cpu", *, share_prompts=False
) -> Pack:
    """Lay sequences (prompt + completion, token ids) end to end: long segments first, so that equal
    ones are adjacent. With share_prompts, equal prompts are laid out once. An empty prompt raises
    ValueError."""
    # 1. Which segments there are. A trunk attends to itself, and a branch also to its trunk.
    trunks, branches = {}, {}
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            problem = "has an empty prompt: no position predicts its first token"
            raise ValueError(f"sequence {number} {problem}")
        if share_prompts:
            trunks[tuple(prompt)] = prompt
            branches[number] = completion[:-1]
        else:
            trunks[number] = prompt + completion[:-1]

    # 2. Lay them out. `starts` has the place of each in the slot.
    ids, positions, starts = [], [], {}
    keys, shapes = [], []  # the places that queries attend to; (queries, keys) of each segment

    def lay(name, tokens, first_position, attended):
        starts[name] = len(ids)
        places = range(len(ids), len(ids) + len(tokens))
        positions.extend(range(first_position, first_position + len(tokens)))
        ids.extend(tokens)
        if tokens:
            keys.extend([*attended, *places])
            shapes.append((len(tokens), len(attended) + len(tokens)))

    for name in sorted(trunks, key=lambda name: -len(trunks[name])):
        lay(name, trunks[name], 0, ())
    for number in sorted(branches, key=lambda n: (-len(prompts[n]), -len(branches[n]))):
        trunk, length = starts[tuple(prompts[number])], len(prompts[number])
        lay(number, branches[number], length, range(trunk, trunk + length))

    # 3. Who predicts what. A prompt's last token predicts its completion's first, and each token of
    # the completion the next one.
    predictors, targets, owner = [], [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        after_prompt = starts[tuple(prompt) if share_prompts else number] + len(prompt)
        first = starts[number] if share_prompts else after_prompt  # the place of its first token
        if completion:
            predictors += [after_prompt - 1, *range(first, first + len(completion) - 1)]
        targets += completion
        owner += [number] * len(completion)

    # 4. One copy to the device.
    runs = tuple((len(list(equal)), *shape) for shape, equal in groupby(shapes))
    queries, cumulative_keys = ([0, *accumulate(column)] for column in zip(*shapes, strict=True))
    columns = [ids, positions, predictors, targets, owner, queries, cumulative_keys, keys]
    buffer = send(torch.tensor([*chain(*columns)]), device)
    parts = buffer.split([*map(len, columns)])
    ids, positions, predictors, targets, owner, queries, cumulative_keys, keys = parts
    key_index = keys if share_prompts else None
    segments = Segments(runs, key_index, queries.int(), cumulative_keys.int())
    return Pack(ids[None], positions[None], segments, predictors, targets, owner, len(prompts))


# ------------------------------------------------------------------------- attention


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, segments=None, **kwargs
):
    """Causal attention inside each segment; query [1, H, L, D], key and value [1, H_kv, L, D] ->
    [1, L, H, D].

    On CUDA in 16 bits it is one call of PyTorch's variable-length kernel, elsewhere one
    scaled_dot_product_attention for each run of equal segments."""
    kwargs["dropout"] = dropout or None
    for name in ("sliding_window", "softcap", "s_aux", "dropout"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"packed attention has no {name}, so its log-probs would not be those of this model"
            )
    # Under autocast, normalized queries and keys are float32 while values are not.
    dtype = value.dtype
    query, key, value = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    if segments.key_index is not None:
        key = key.index_select(0, segments.key_index)  # [K, H_kv, D]
        value = value.index_select(0, segments.key_index)  # [K, H_kv, D]
    inside = _varlen if value.is_cuda and dtype.itemsize == 2 else _by_runs
    return inside(query, key, value, segments, scaling)[None], None  # [1, L, H, D]


def _by_runs(query, key, value, segments, scaling):
    """One call for each run of equal segments. We slice by `split`, because its backward is one
    cat. The backward of each index slice would write a zero tensor as long as the slot."""
    runs = segments.runs
    parts = zip(
        runs,
        query.split([count * queries for count, queries, _ in runs]),
        *(states.split([count * keys for count, _, keys in runs]) for states in (key, value)),
        strict=True,
    )
    out = []
    for (count, queries, keys), *states in parts:
        # [count, H, queries or keys, D]
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in states)
        mask = None
        if queries != keys:  # the last query sees every key
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        options = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, **options)
        out.append(attended.transpose(1, 2).flatten(0, 1))  # [count * queries, H, D]
    return torch.cat(out)


def _varlen(query, key, value, segments, scaling):
    """A flash kernel; with more keys than queries it too lets the last query see every key."""
    longest = [max(shape) for shape in zip(*(run[1:] for run in segments.runs), strict=True)]
    bounds = (segments.cu_queries, segments.cu_keys, *longest)
    causal = {"window_size": (-1, 0), "enable_gqa": True}
    return varlen_attn(query, key, value, *bounds, scale=scaling, **causal)


AttentionInterface.register(ATTENTION, packed_attention)


# ------------------------------------------------------------------------- log-probabilities


def packed_logprobs(
    model, pack: Pack, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [N] of the pack's completion tokens, for sampling at `temperature`.

    `model` is a causal LM loaded with `attn_implementation=packing.ATTENTION`. Its logits must be
    its output embedding applied to its last hidden state, and nothing more (models.load_policy
    checks it). Entropies, in nats, carry no gradient.
    """
    inputs = {"input_ids": pack.input_ids, "position_ids": pack.position_ids, "use_cache": False}
    output = model.base_model(**inputs, segments=pack.segments)
    # The backward pass of indexing would add gradients of a shared prompt in no fixed order.
    hidden = output.last_hidden_state[0].index_select(0, pack.predictors)  # [N, hidden]
    head = model.get_output_embeddings()
    return token_logprobs(hidden, head, pack.targets, temperature, model.vocab_size)


def token_logprobs(
    hidden, head, targets, temperature=1.0, vocab_size=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [N] of targets [N], given hidden states [N, hidden].

    Works in chunks of at most HEAD_LOGITS logits. Each chunk is recomputed in the backward pass,
    so that only one chunk's logits, softmax and gradient are live at a time. Only the first
    `vocab_size` rows of the head are tokens (Qwen3 pads it). Computes in float32 or wider.
    """
    rows = HEAD_LOGITS // head.out_features
    if len(hidden) <= rows:
        return _chunk_logprobs(hidden, head, targets, temperature, vocab_size)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    chunks = [
        checkpoint(_chunk_logprobs, part, head, some, temperature, vocab_size, **options)
        for part, some in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    logprobs, entropy = (torch.cat(columns) for columns in zip(*chunks, strict=True))
    return logprobs, entropy


def _chunk_logprobs(hidden, head, targets, temperature, vocab_size):
    logits = head(hidden)[:, :vocab_size]  # [n, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature if temperature != 1.0 else logits
    every = torch.log_softmax(logits, dim=-1)  # [n, V]
    # Gathered before the entropy, so that the backward pass need not recompute the entropy.
    logprobs = every.gather(1, targets[:, None]).squeeze(1)  # [n]
    with torch.no_grad():
        entropy = every.exp().mul_(every).sum(dim=-1).neg()  # [n]
    return logprobs, entropy
