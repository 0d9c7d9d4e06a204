"""
Rollouts: G completions per prompt from the current policy, with the log-probabilities they were sampled at.

The behaviour policy and the trained policy are the same distribution: plain sampling at a temperature that
the log-probabilities carry, no top-k, no top-p, no repetition penalty. The model's own generation config
(Qwen3 ships temperature 0.6, top-k 20, top-p 0.95) is set aside while sampling: transformers would fill
whatever a call leaves open from it.

Letters: K prompts, G completions each, T tokens of the longest completion, V vocabulary.
"""

import contextlib
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

import packing
from data import InputError


@dataclass
class Rollouts:
    """What sampling returns. Masks come from `lengths`, never from token values: pad may be an end token."""

    prompt_ids: list[list[int]]  # K prompts
    completion_ids: torch.Tensor  # [K, G, T] int64; beyond a completion's length: anything
    logprobs: torch.Tensor  # [K, G, T] float32, of the sampled tokens at the sampling temperature; 0 beyond
    entropy: torch.Tensor  # [K, G] float32, summed over the completion's tokens, in nats
    lengths: torch.Tensor  # [K, G] int64, tokens sampled, end token included
    truncated: torch.Tensor  # [K, G] bool, cut off by max_new_tokens before an end token


def eos_token_ids(model, tokenizer) -> list[int]:
    """Every token that ends a completion: the generation config's (a list for chat models), else the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


class _Recorder(LogitsProcessor):
    """Applies the temperature, and records log-prob and entropy of what is sampled; [B, V] is held for one step only."""

    def __init__(self, temperature: float, prompt_width: int, progress: tqdm):
        self.temperature, self.prompt_width, self.progress = temperature, prompt_width, progress
        self.logprobs, self.entropies = [], []  # one [B] a step
        self.scores = None  # [B, V] of the step being sampled

    def __call__(self, input_ids, scores):
        self.take(input_ids)
        self.scores = torch.log_softmax(scores.float() / self.temperature, dim=-1)  # [B, V]
        if not self.scores[:, 0].isfinite().all():  # a NaN or an infinity anywhere in a row spreads to all of it
            raise FloatingPointError("the model's logits are not finite")
        self.entropies.append(-(self.scores.exp() * self.scores).sum(-1))  # [B]
        self.progress.update()
        return self.scores

    def take(self, input_ids):
        """Read the log-prob of the newest token from the distribution it was drawn from."""
        if self.scores is not None:
            self.logprobs.append(self.scores.gather(1, input_ids[:, -1:]).squeeze(1))  # [B]


@contextlib.contextmanager
def _sampling_setup(model, config: GenerationConfig):
    """Plain generation settings and transformers' own attention while sampling; the model's after."""
    was_training, own_config = model.training, model.generation_config
    attention = model.config._attn_implementation
    model.eval()
    model.generation_config = config
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.generation_config = own_config
        model.train(was_training)


@torch.no_grad()
def sample(
    model,
    prompt_ids: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    eos_ids: list[int],
    pad_id: int,
    seed: int,
    show_progress: bool = False,
) -> Rollouts:
    """Sample `group_size` completions for each prompt. The draw is a function of (weights, prompts, seed).

    Raises FloatingPointError if the model's logits are not finite. No prompts: empty rollouts.
    """
    K, G, device = len(prompt_ids), group_size, model.device
    if K == 0:
        empty = torch.zeros(0, G, device=device)
        return Rollouts([], empty[..., None].long(), empty[..., None], empty, empty.long(), empty.bool())

    width = max(map(len, prompt_ids))  # left padding, so that all completions start in one column
    rows = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompt_ids], device=device)  # [K, width]
    real = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,  # the recorder applies ours, so that the log-probs carry it
        top_k=0,
        top_p=1.0,
        num_return_sequences=G,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
    )
    torch.manual_seed(seed)
    progress = tqdm(total=max_new_tokens, desc="rollout", unit="token", delay=3, leave=False, disable=not show_progress)
    recorder = _Recorder(temperature, width, progress)
    with _sampling_setup(model, config), progress:
        sequences = model.generate(
            input_ids=rows,
            attention_mask=real,
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
        )
    recorder.take(sequences)

    completion_ids = sequences[:, width:]  # [K * G, T]
    T = completion_ids.shape[1]
    ends = torch.isin(completion_ids, torch.tensor(eos_ids, device=device))  # [K * G, T]
    ended = ends.any(dim=1)
    lengths = torch.where(ended, ends.int().argmax(dim=1) + 1, T)  # up to the first end token
    sampled = torch.arange(T, device=device) < lengths[:, None]  # [K * G, T]
    logprobs = torch.stack(recorder.logprobs, dim=1) * sampled
    entropy = (torch.stack(recorder.entropies, dim=1) * sampled).sum(dim=1)  # [K * G]
    return Rollouts(
        prompt_ids,
        completion_ids.view(K, G, T),
        logprobs.view(K, G, T),
        entropy.view(K, G),
        lengths.view(K, G),
        ~ended.view(K, G),
    )


def load_policy(name: str, device: str):
    """(model, tokenizer) from a hub id or a folder: float32 weights, packed attention, a pad token, no remote code."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=packing.ATTENTION)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {name} cannot be loaded: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for parameter in model.parameters():  # loaded ones may be unaligned views of the file, and then the same
        parameter.data = parameter.data.clone()  # arithmetic can round differently from one load to the next
    return model.to(device), tokenizer
