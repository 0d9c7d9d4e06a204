"""
What a run starts from: problems, models and prompts, from the names that a user gives.

All of it happens once, before the first step. Bad input raises InputError.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import packing
import rollout
from config import Config
from engines import check_decoder, compact, hf, vllm_engine
from runtime import InputError, ranks
from runtime.device import cast_weights, fuse_norms
from tasks import arithmetic, gguf
from update import trainer_logprobs

# What --engine names. vLLM is started by whoever asks for it: see `make_sampling`.
ENGINES = {"plain": None, "compact": compact, "hf": hf}


class Problems(NamedTuple):
    """What to train and to evaluate on. Rewards are functions of (completion, answer)."""

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


def model_folder(model: str) -> str:
    """The folder, or the hub id, of a --model value."""
    return str(arithmetic.BASE) if model == "tiny" else gguf.model_folder(model)


def load_models(cfg: Config, saved: Path | None) -> Models:
    """The models of --model, or of a checkpoint that the run resumes from."""
    base = cfg.model
    if cfg.beta or not saved:
        base = ranks.broadcast(model_folder, base)
    source = str(saved or base)
    if Path(source).is_dir():  # loading is instant; a download keeps its progress bar
        transformers.utils.logging.disable_progress_bar()
    apart = cfg.shard == "fsdp" or (cfg.dtype == "bfloat16" and cfg.engine != "vllm")
    model, tokenizer = load_policy(source, cfg.device, samples=not apart)
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    reference = None
    if cfg.beta:  # the model that the run began with, even on resume
        reference = load_policy(base, cfg.device, samples=False)[0].requires_grad_(False)
    policy = model
    if cfg.shard == "fsdp":
        for sharded in filter(None, (model, reference)):
            shard(sharded, cfg.device)
    if apart:
        policy = load_policy(source, cfg.device, cfg.dtype)[0].requires_grad_(False)
    return Models(model, tokenizer, policy, reference, source)


def encode(cfg: Config, models: Models, problems: list) -> tuple[list, list[list[int]]]:
    """(problems, token ids) of the problems whose prompts leave room for a completion."""
    if not problems:
        return [], []
    room = models.model.config.max_position_embeddings - cfg.max_new_tokens
    return data.encode_prompts(problems, models.tokenizer, room, cfg.prompt_format, cfg.thinking)


def make_optimizer(cfg: Config, parameters) -> torch.optim.Optimizer:
    """The optimizer. train.py gives all of its parameter groups the learning rate of the schedule
    before each step, and checkpoints hold its state."""
    return torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=(0.9, cfg.adam_beta2), weight_decay=cfg.weight_decay,
        fused=cfg.device == "cuda",
    )  # fmt: skip


def make_sampling(cfg: Config, models: Models, prompts, show_progress: bool) -> rollout.Sampling:
    """How the run samples. Starts vLLM for --engine vllm and checks its log-probs."""
    engine = cfg.engine
    if engine == "vllm":
        engine = vllm_engine.Engine(
            models.source, vocab_size=models.model.vocab_size,
            max_tokens=max(map(len, prompts)) + cfg.max_new_tokens, sequences=cfg.rollout_batch,
            dtype=cfg.dtype, device=cfg.device, memory=cfg.vllm_memory,
        )  # fmt: skip
    found = sampling(
        models.model, models.tokenizer, cfg.max_new_tokens, engine, temperature=cfg.temperature,
        batch_size=cfg.rollout_batch, show_progress=show_progress,
    )  # fmt: skip
    if cfg.engine == "vllm":
        longest = sorted(prompts, key=len)[-4:]  # vLLM caches whole blocks of prompts
        logprobs = lambda rollouts: trainer_logprobs(models.policy, rollouts, cfg)
        engine.check(models.policy, longest, found, logprobs)
    return found


def sampling(
    model, tokenizer, max_new_tokens: int, engine="compact", **options
) -> rollout.Sampling:
    """How to sample from a loaded policy, with its end tokens and its pad token. `engine` is a name
    of ENGINES or an engine, such as a vllm_engine.Engine. `options` are other fields."""
    engine = ENGINES[engine] if isinstance(engine, str) else engine
    ends = eos_token_ids(model, tokenizer)
    return rollout.Sampling(max_new_tokens, ends, tokenizer.pad_token_id, engine=engine, **options)


def eos_token_ids(model, tokenizer) -> list[int]:
    """Every token that ends a completion. The generation config names them, for chat models in a
    list; if it does not, the tokenizer's end token is the only one."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError("neither the generation config nor the tokenizer names an end token")
    return ids if isinstance(ids, list) else [ids]


# ---------------------------------------------------------------------------- one model


def load_policy(name: str, device: str, dtype: str = "float32", samples: bool = True):
    """(model, tokenizer) from a hub id or a folder, without remote code.

    The model has packed attention; the tokenizer has a pad token. Training needs float32 weights;
    sampling in bfloat16 needs weights of that type, or each would be cast for every token. If it
    `samples`, it is compared with the fast decoder, see engines/check_decoder.py."""
    try:
        options = {"dtype": torch.float32, "attn_implementation": packing.ATTENTION}
        model = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if kind := re.search("model type `(pruned_[a-z0-9]+)`", reason):
            reason = f"its type {kind[1]} needs `python -m related.pruned PROGRAM FLAGS`"
        raise InputError(f"--model {name} cannot be loaded: {reason}") from None
    tokens = max(tokenizer.get_vocab().values()) + 1  # Qwen3 pads its head beyond these
    model.vocab_size = min(tokens, model.config.vocab_size)
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        problem = f"layers of kinds {sorted(kinds)}: only full attention can be packed here"
        raise InputError(f"--model {name} has {problem}")
    if not packs_exactly(model):
        raise InputError(
            f"--model {name} cannot be packed exactly: it has attention of its own, or its logits "
            "are more than its output embedding applied to its last hidden state"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    fuse_norms(model)
    exact = None if dtype == "float32" or not samples else check_decoder.logits(model)
    cast_weights(model, dtype)
    model = model.to(device)
    if samples:
        check_decoder.compare(model, exact)
    return model, tokenizer


def packs_exactly(model) -> bool:
    """Whether two packed sequences get the log-probs that the model itself gives to each of them.

    They do not if the model ignores the attention interface, scales or caps its logits, or (in
    training mode) has dropout."""
    sequences = torch.tensor([[0, 1, 2], [2, 1, 0]], device=model.device)
    pack = packing.build_pack([[0], [2]], [[1, 2], [1, 0]], model.device)
    was_training = model.training
    try:
        with torch.no_grad():
            ours, _ = packing.packed_logprobs(model, pack)
            model.eval().set_attn_implementation("sdpa")
            logits = model(sequences, use_cache=False).logits  # [2, 3, padded V]
    except (AssertionError, NotImplementedError, TypeError, ValueError):
        return False
    model.train(was_training).set_attn_implementation(packing.ATTENTION)
    every = logits[:, :-1, : model.vocab_size].log_softmax(dim=-1)  # [2, 2, V]
    theirs = every.gather(2, sequences[:, 1:, None]).flatten()  # [4]
    return torch.allclose(ours, theirs.to(ours.dtype), atol=1e-4)


def checkpoint_layers(model) -> None:
    """Recompute each layer's activations in the backward pass. Raises InputError for dropout."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.23
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; sampling restores the mode
    if not packs_exactly(model):
        raise InputError(
            "--gradient-checkpointing: this model has dropout, which training mode would enable"
        )


def shard(model, device: str) -> None:
    """--shard fsdp: leave this rank its share of the weights, gathered around packed_logprobs."""
    ranks.shard(model, device)

    def packed_logprobs(pack, *, temperature):
        logprobs, entropy = packing.packed_logprobs(model, pack, temperature=temperature)
        return logprobs.clone(), entropy  # it may be a view, which FSDP warns about

    model.packed_logprobs = packed_logprobs
    register_fsdp_forward_method(model, "packed_logprobs")  # FSDP hooks only `forward` by itself
