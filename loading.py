"""
What a run starts from: problems, models and prompts, from the names that a user gives.

All of it happens once, before the first step. Bad input raises InputError.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import arithmetic
import data
import rollout
import vllm_engine
from config import Config
from runtime import gguf, ranks
from update import checkpoint_layers, shard, trainer_logprobs


class Problems(NamedTuple):
    """What to train and to evaluate on. Rewards are functions of (completion, gold)."""

    train: list[data.Problem]
    eval: list[data.Problem]  # [] if the run is not evaluated
    reward: Callable
    eval_reward: Callable


class Models(NamedTuple):
    """What is trained, what samples, and what the KL term compares with."""

    model: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    policy: torch.nn.Module  # samples; the model itself unless its weights are shared or cast
    reference: torch.nn.Module | None  # the model that the run began with; None without --beta
    source: str  # the folder or hub id of the weights


def load_problems(cfg: Config, reward: Callable | None = None) -> Problems:
    """The problems of --data and --eval-data, and their rewards unless `reward` replaces them."""
    of_training_file = cfg.eval_data is None
    name = cfg.eval_data or cfg.data
    own, eval_own = reward or data.reward_function(cfg.data), reward or data.reward_function(name)
    load = data.train_problems
    train = ranks.broadcast(load, cfg.data, hold_out=of_training_file, reward=own)
    evaluated = []
    if cfg.eval_every:
        options = {"of_training_file": of_training_file, "reward": eval_own}
        evaluated = ranks.broadcast(data.eval_problems, name, cfg.eval_problems, **options)
    return Problems(train, evaluated, own, eval_own)


def load_models(cfg: Config, saved: Path | None) -> Models:
    """The models of --model, or of a checkpoint that the run resumes from."""
    base = cfg.model
    if base == "tiny" and (cfg.beta or not saved):
        base = str(ranks.broadcast(arithmetic.base_folder))
    elif cfg.beta or not saved:
        base = ranks.broadcast(gguf.model_folder, base)
    source = str(saved or base)
    if Path(source).is_dir():  # loading is instant; a download keeps its progress bar
        transformers.utils.logging.disable_progress_bar()
    model, tokenizer = rollout.load_policy(source, cfg.device)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    reference = None
    if cfg.beta:  # the model that the run began with, even on resume
        reference = rollout.load_policy(base, cfg.device)[0].requires_grad_(False)
    policy = model
    if cfg.shard == "fsdp":
        for sharded in filter(None, (model, reference)):
            shard(sharded, cfg.device)
    if cfg.shard == "fsdp" or (cfg.dtype == "bfloat16" and cfg.engine != "vllm"):
        policy = rollout.load_policy(source, cfg.device, cfg.dtype)[0].requires_grad_(False)
    return Models(model, tokenizer, policy, reference, source)


def encode(cfg: Config, models: Models, problems: list) -> tuple[list, list[list[int]]]:
    """(problems, token ids) of the problems whose prompts leave room for a completion."""
    if not problems:
        return [], []
    room = models.model.config.max_position_embeddings - cfg.max_new_tokens
    return data.encode_prompts(problems, models.tokenizer, room, cfg.prompt_format, cfg.thinking)


def make_sampling(cfg: Config, models: Models, prompts, show_progress: bool) -> rollout.Sampling:
    """How the run samples. Starts vLLM for --engine vllm and checks its log-probs."""
    sampling = rollout.Sampling.for_policy(
        models.model, models.tokenizer, cfg.max_new_tokens, temperature=cfg.temperature,
        batch_size=cfg.rollout_batch, engine=cfg.engine, show_progress=show_progress,
    )  # fmt: skip
    if cfg.engine == "vllm":
        sampling.engine = vllm_engine.Engine(
            models.source, vocab_size=models.model.vocab_size,
            max_tokens=max(map(len, prompts)) + cfg.max_new_tokens, sequences=cfg.rollout_batch,
            dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        )  # fmt: skip
        longest = sorted(prompts, key=len)[-4:]  # vLLM caches whole blocks of prompts
        logprobs = lambda rollouts: trainer_logprobs(models.policy, rollouts, cfg)
        sampling.engine.check(models.policy, longest, sampling, logprobs)
    return sampling
