"""transformers' own model.generate, which is slower than the compact engine, for comparison."""

import torch
from transformers import GenerationConfig, LogitsProcessorList

import rollout
from engines import compact, prefill
from runtime import NotFiniteError


def sample(
    model, prompt_ids, sampling: rollout.Sampling, *, group_size: int, seed: int, keys
) -> rollout.Rollouts:
    """See rollout.sample."""
    options = {"group_size": group_size, "seed": seed, "keys": keys}
    # The model's own generation config would fill in what a call omits.
    given, model.generation_config = model.generation_config, GenerationConfig()
    try:
        return compact.in_batches(_generate, model, prompt_ids, sampling, **options)
    finally:
        model.generation_config = given


def _generate(model, prompt_ids, group_size, record, progress) -> None:
    """Sample by one call of model.generate. We draw each token with our random numbers, and return
    scores that allow only that token."""
    repeated = [ids for ids in prompt_ids for _ in range(group_size)]
    sequences, mask = prefill.pad_left(repeated, model.device)
    B, width = sequences.shape
    active = torch.arange(B, device=model.device)

    def draw(sequences, logits):
        logprobs = record.distribution(logits)
        if logprobs.isnan().any():  # generate would go on with them
            raise NotFiniteError(compact.NOT_FINITE)
        token, _, _ = record.draw(active, None, sequences.shape[1] - width, logprobs)
        return torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)

    model.generate(
        sequences,
        attention_mask=mask,
        logits_processor=LogitsProcessorList([draw]),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=record.sampling.max_new_tokens,
            eos_token_id=record.sampling.eos_ids,
            pad_token_id=record.sampling.pad_id,
        ),
    )
    progress.update(B)
