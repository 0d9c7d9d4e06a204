"""transformers' own model.generate, which is slower than rollout.py's loop, for comparison."""

import torch
from transformers import GenerationConfig, LogitsProcessorList

import rollout


def sample(
    model, prompt_ids, sampling: rollout.Sampling, *, group_size: int, seed: int, keys
) -> rollout.Rollouts:
    """See rollout.sample."""
    options = {"group_size": group_size, "seed": seed, "keys": keys}
    # The model's own generation config would fill in what a call omits.
    given, model.generation_config = model.generation_config, GenerationConfig()
    try:
        return rollout.in_batches(generate, model, prompt_ids, sampling, **options)
    finally:
        model.generation_config = given


def generate(model, prompts, group_size: int, record: rollout.Record) -> None:
    """Sample a batch by one call of model.generate. We draw each token with our random numbers, and
    return scores that allow only that token."""
    ids, mask = rollout.pad_left([p for p in prompts for _ in range(group_size)], model.device)
    rows = torch.arange(len(ids), device=model.device)

    def draw(sequences, logits):
        t = sequences.shape[1] - ids.shape[1]
        _, token, _ = record.draw(logits, rows, rows, t, shares=False)
        return torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)

    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=record.sampling.max_new_tokens,
        eos_token_id=record.sampling.eos_ids,
        pad_token_id=record.sampling.pad_id,
    )
    draws = LogitsProcessorList([draw])
    model.generate(ids, attention_mask=mask, logits_processor=draws, generation_config=config)
