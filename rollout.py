"""
Rollouts: G completions per prompt from the current policy, and the log-probabilities they had.

The distribution that samples and the one that is trained are the same: plain sampling at a
temperature that the log-probabilities include, without top-k, top-p or a repetition penalty
(eval.py may ask for those). The model's own generation config (Qwen3 ships temperature 0.6,
top-k 20, top-p 0.95) plays no part, except for its end tokens.

`sample` is the entry point of all three engines:
    compact  our own decoding loop, below. Completions of a prompt whose texts are equal so far are
             one row of the batch, and completions that have ended leave it. The default.
    hf       transformers' model.generate, the plain reference (engines/compact.py).
    vllm     vLLM in this process, for large models on GPUs (engines/vllm_engine.py).

Letters: K prompts, G completions each, T = max_new_tokens, B sequences sampled at once, W tokens
of their longest prompt, V vocabulary. In `compact`, n completions go on, R rows of the batch hold
their distinct texts, and C texts are one token longer.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm

import dppo
from engines import categorical, check_decoder, compact
from runtime.device import CHECK_EVERY, send


@dataclass
class Rollouts:
    """What sampling returns, on the CPU. Derive masks from `lengths`: pad may be an end token."""

    prompt_ids: list[list[int]]  # K prompts
    completion_ids: torch.Tensor  # [K, G, T] int64; arbitrary beyond a completion's length
    logprobs: torch.Tensor  # [K, G, T] float32, sampled tokens at the temperature; 0 beyond length
    entropy: torch.Tensor  # [K, G] float32, nats summed over the completion's tokens; vllm: NaN
    energy: torch.Tensor  # [K, G] float32, sum of |onehot(token) - softmax|^2; vllm: a bound of it
    lengths: torch.Tensor  # [K, G] int64, tokens sampled, end token included
    truncated: torch.Tensor  # [K, G] bool, cut off by max_new_tokens before an end token


@dataclass
class Sampling:
    """How to sample. Training needs the defaults of top_k, top_p and repetition_penalty: with other
    values, importance ratios would compare the policy with a distribution that it is not."""

    max_new_tokens: int  # T
    eos_ids: list[int]  # each ends a completion
    pad_id: int  # may be one of eos_ids
    temperature: float = 1.0  # log-probs include it; 0 is greedy, and log-probs are those at 1
    batch_size: int = 512  # sequences sampled at once, in whole groups; bounds the key-value cache
    engine: object = "compact"  # or "hf", or a vllm_engine.Engine
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    show_progress: bool = False

    @classmethod
    def for_policy(cls, model, tokenizer, max_new_tokens: int, **options) -> "Sampling":
        """With the end tokens and the pad token of a loaded policy; `options` are other fields."""
        ends = compact.eos_token_ids(model, tokenizer)
        return cls(max_new_tokens, ends, tokenizer.pad_token_id, **options)


def sample(
    model, prompt_ids: list[list[int]], sampling: Sampling, *, group_size: int, seed: int,
    keys=None, wanted=None,
) -> Rollouts:  # fmt: skip
    """Sample `group_size` completions of each prompt, shortest prompts first, batch by batch.

    wanted [K, G] bool, by default all: the others are not sampled, and their lengths are 0. vLLM
    samples whole groups, and so does temperature 0.

    A prompt has a key, by default its place in the list. A completion's random numbers follow from
    (seed, key, its place in the group). So, except for rounding, it does not depend on other
    prompts and completions, their order, the size of a batch, or the engine (of compact and hf;
    vLLM's samples depend on all prompts).

    Raises FloatingPointError if the model's logits are not finite.
    """
    keys = range(len(prompt_ids)) if keys is None else keys
    if sampling.temperature == 0 and group_size > 1:
        # Greedy completions are all equal, and generate and vLLM refuse to return several.
        one = sample(model, prompt_ids, sampling, group_size=1, seed=seed, keys=keys)
        _, *columns = vars(one).values()
        columns = (column.repeat_interleave(group_size, dim=1) for column in columns)
        return Rollouts(prompt_ids, *columns)
    if not isinstance(sampling.engine, str):
        seed = dppo.seed_for(seed, *keys)
        return sampling.engine.sample(model, prompt_ids, sampling, group_size=group_size, seed=seed)
    decode = {"compact": _compact, "hf": compact.generate}[sampling.engine]
    K, G, T = len(prompt_ids), group_size, sampling.max_new_tokens
    wanted = torch.ones(K, G, dtype=torch.bool) if wanted is None else wanted
    bar = {"desc": "rollout", "unit": " completions", "delay": 3, "leave": False}
    progress = tqdm(total=int(wanted.sum()), disable=not sampling.show_progress, **bar)
    uniforms = torch.empty(K, G, T, dtype=torch.float64)
    for key, of_prompt in zip(keys, uniforms, strict=True):
        categorical.fill(of_prompt, dppo.generator_for(seed, key))
    # Made before inference mode, whose own tensors training could not use.
    ids = torch.full((K, G, T), sampling.pad_id)
    statistics = torch.zeros(3, K, G, T)
    with progress, torch.inference_mode(), compact.plain_generation(model):
        order = sorted(range(K), key=lambda k: len(prompt_ids[k]))
        step = max(1, sampling.batch_size // G)
        for batch in (order[start : start + step] for start in range(0, K, step)):
            record = _Record(sampling, uniforms[batch], wanted[batch], model)
            decode(model, [prompt_ids[k] for k in batch], G, record, progress)
            ids[batch] = record.ids.cpu().view(-1, G, T)
            statistics[:, batch] = record.statistics.cpu().view(3, -1, G, T)
    return _finish(prompt_ids, ids, statistics, sampling, wanted)


def _finish(prompt_ids, ids, statistics, sampling, wanted) -> Rollouts:
    """Cut each completion after its first end token; ids [K, G, T], statistics [3, K, G, T]."""
    ends = torch.isin(ids, torch.tensor(sampling.eos_ids))
    ended = ends.any(dim=-1) | ~wanted  # [K, G]
    lengths = torch.where(ended, ends.int().argmax(dim=-1) + 1, ids.shape[-1]) * wanted
    inside = torch.arange(ids.shape[-1]) < lengths[..., None]  # [K, G, T]
    logprobs, others, spread = torch.where(inside, statistics, 0.0)
    entropy = -(others + logprobs.exp() * logprobs).sum(dim=-1)
    # (1 - p)^2 + sum of the others' p^2, which does not cancel for p near 1
    energy = (torch.expm1(logprobs).square() + spread.square()).sum(dim=-1)
    return Rollouts(prompt_ids, ids, logprobs, entropy, energy, lengths, ~ended)


# ------------------------------------------------------------------------- shared by both engines


class _Record:
    """What is sampled for K groups of G, B completions: draws each token from its distribution and
    records it; uniforms [K, G, T], wanted [K, G]."""

    def __init__(self, sampling: Sampling, uniforms, wanted, model):
        device, uniforms = model.device, uniforms.flatten(0, 1)
        shape = uniforms.shape
        self.wanted = send(wanted.flatten().nonzero()[:, 0], device)  # [n], of B
        self.sampling = sampling
        self.vocab_size = model.vocab_size
        self.eos = torch.tensor(sampling.eos_ids, device=device)
        self.uniforms = send(uniforms, device)  # [B, T]
        self.ids = torch.full(shape, sampling.pad_id, device=device)  # [B, T]
        # log-probs, and of the tokens not drawn the sum of p log p and the root of that of p^2
        self.statistics = torch.zeros(3, *shape, device=device)
        self.recent = []  # [3, n] of each token since the last check
        self.warpers = compact.warpers(sampling)

    def distribution(self, sequences, logits):
        """Log-probs [B, V] of the token after `sequences` [B, n]; padding of V is excluded."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits[:, : self.vocab_size]
        if self.warpers:
            logits = self.warpers(sequences, logits.to(dtype))
        scores = torch.log_softmax(logits, dim=-1, dtype=dtype)
        # Finite, so that 0 * log 0 is 0 for the tokens that top-k and top-p leave out.
        return scores.clamp_(min=torch.finfo(dtype).min) if self.warpers else scores

    def draw(self, active, row_of, step: int, scores):
        """Draw token `step` of completions `active` [n] from log-probs [R, V]: completion i from
        row row_of[i], or with None from row i. Returns the texts after it: their last tokens
        [C, 1], the rows [C] that they continue, ascending, and the text of each completion [n].
        With None there is one text for each completion, and no rows."""
        probs = scores.exp()  # [R, V]
        if self.sampling.temperature:
            token = categorical.draw(probs, self.uniforms[active, step, None], row_of)  # [n, 1]
        else:  # there is one completion of each prompt
            token = scores.argmax(dim=1, keepdim=True)
        if row_of is None:
            self.take(active, step, scores, probs, token)
            return token, None, None
        V = scores.shape[1]
        texts, text_of = torch.unique(row_of * V + token[:, 0], return_inverse=True)  # [C], [n]
        continued, token = texts // V, texts[:, None] % V
        if len(texts) > len(scores):
            scores, probs = scores[continued], probs[continued]  # [C, V]
        self.take(active, step, scores, probs, token, text_of)
        return token, continued, text_of

    def take(self, active, step: int, scores, probs, token, text_of=slice(None)):
        """Record token [C, 1] as token `step` of completions `active`, or token[text_of] if several
        have the same text. Overwrites probs [C, V], of scores [C, V]."""
        logprob = scores.gather(1, token)[:, 0]  # [C]
        probs.scatter_(1, token, 0.0)  # the others'
        others = (probs[:, None] @ scores[..., None]).flatten()  # the sum of p log p
        spread = torch.linalg.vector_norm(probs, dim=1)
        self.ids[active, step] = token[text_of, 0]
        statistics = torch.stack([logprob, others, spread]).float()  # [3, C]
        self.recent.append(statistics[:, text_of])

    def keep_recent(self, active, start: int):
        """Keep the statistics of the last tokens, from token `start`, of completions `active`."""
        stop = start + len(self.recent)
        self.statistics[:, active, start:stop] = torch.stack(self.recent, dim=2)
        self.recent.clear()

    def ended(self, active, start: int, stop: int):
        """Which of `active` drew an end token from `start` to `stop`, [n] on the CPU, for which the
        host waits. FloatingPointError if the model's logits were not finite."""
        self.keep_recent(active, start)
        ends = torch.isin(self.ids[active, start:stop], self.eos).any(dim=1)
        finite = self.statistics[0, active, start:stop].isfinite().all(dim=1)
        ends, finite = torch.stack([ends, finite]).cpu()
        if not finite.all():
            raise FloatingPointError(compact.NOT_FINITE)
        return ends


# ------------------------------------------------------------------------- engine: compact


def _compact(model, prompt_ids, group_size, record, progress):
    """Prefill each prompt once, then decode its completions in step. A row of the batch serves all
    completions whose texts are equal so far, and splits when they draw different tokens. At each
    check, completions that have ended leave.

    To know which tokens differ, the host needs them. Where it does not read every token, each
    completion has a row of its own from the start."""
    T, device = record.sampling.max_new_tokens, model.device
    every = CHECK_EVERY[device.type]
    logits, prompts, positions, bias, cache = compact.prefill(model, prompt_ids, T)
    W, ragged = prompts.shape[1], compact.is_ragged(prompt_ids)
    decode = check_decoder.decoder(model, W + T)
    active = record.wanted  # the completions that go on, [n]
    row_of = active // group_size  # the batch's row of each of them; None: a row of its own
    if every > 1 or group_size == 1:
        for layer in cache.layers:
            layer.keep(len(active), torch.arange(len(active)).to(device), row_of, most=len(active))
        logits, prompts, positions, bias = (x[row_of] for x in (logits, prompts, positions, bias))
        row_of = None
    for step in range(T):
        texts = None
        if record.warpers:
            one = active  # a completion of each row
            if row_of is not None:
                one = active.new_zeros(len(logits)).scatter_(0, row_of, active)
            texts = torch.cat([prompts, record.ids[one, :step]], dim=1)  # [R, W + step]
        scores = record.distribution(texts, logits)
        # Each text gets a row: the one of its number, if no row is free or new.
        token, continued, row_of = record.draw(active, row_of, step, scores)  # [C, 1], [C], [n]
        last = step + 1 == T
        if last or (step + 1) % every == 0:
            ended = record.ended(active, step // every * every, step + 1)
            live = 0 if last else len(active) - int(ended.sum())
            progress.update(len(active) - live)
            if live == 0:
                break
            if live < len(active) or len(token) > len(logits):
                *rows, row_of = compact.next_rows(continued, row_of, ended)
                going, text, source, copied_to, copied_from = (send(x, device) for x in rows)
                for layer in cache.layers:
                    layer.keep(len(text), copied_to, copied_from, most=live)
                active, token = active[going], token[text]
                prompts, positions, bias = (x[source] for x in (prompts, positions, bias))
        visible = bias[..., : W + step + 1] if ragged else None
        logits = decode(token, positions, step + 1, cache, visible)  # [R, V]
