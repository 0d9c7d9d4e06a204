"""
What a run starts from: problems, models and prompts, from the names that a user gives.

All of it happens once, before the first step. Bad input raises InputError.
"""

import bisect
import copy
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import chat_format
import data
import packing
import problem_files
import rollout
from config import Config
from engines import check_decoder, compact, hf, vllm_engine
from runtime import InputError, checkpoint, ranks
from runtime.device import cast_weights, fuse_norms
from tasks import arithmetic, gguf
from update import trainer_logprobs

# What --engine names. vLLM is started by whoever asks for it: see `make_sampling`.
ENGINES = {"plain": None, "compact": compact, "hf": hf}
# What transformers reads of a folder.
FILES = ("config.json", "tokenizer*.json", "model*.safetensors*", "pytorch_model*.bin*")
# What other programs put before the names of weights, and how to save them without it.
PREFIXES = {
    "_orig_mod.": "save the model that was compiled, which is its _orig_mod",
    "module.": "save the model inside the wrapper, which is its module",
    "base_model.model.": "merge the adapter with merge_and_unload() and save the result",
}


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
    fingerprint: int | None  # of the model that --model names; None if it was not read


def load_problems(cfg: Config, reward: Callable | None = None) -> Problems:
    """The problems of --data and --eval-data, and their rewards unless `reward` replaces them."""
    of_training_file = cfg.eval_data is None
    name = cfg.eval_data or cfg.data
    load = data.train_problems
    train = ranks.broadcast(load, cfg.data, hold_out=of_training_file, reward=reward)
    evaluated = []
    if cfg.eval_every:
        options = {"of_training_file": of_training_file, "reward": reward}
        evaluated = ranks.broadcast(data.eval_problems, name, cfg.eval_problems, **options)
        data.say_common(train, evaluated)
    own, eval_own = reward or data.reward_function(cfg.data), reward or data.reward_function(name)
    return Problems(train, evaluated, own, eval_own)


def model_folder(model: str) -> str:
    """The folder, or the hub id, of a --model value."""
    return str(arithmetic.BASE) if model == "tiny" else gguf.model_folder(model)


def load_models(cfg: Config, saved: Path | None) -> Models:
    """The models of --model, or of a checkpoint that the run resumes from."""
    base = cfg.model
    renamed = saved and base != checkpoint.stored_config(Path(cfg.out_dir))["model"]
    if cfg.beta or renamed or not saved:
        base = ranks.broadcast(model_folder, base)
    source = str(saved or base)
    if Path(source).is_dir():  # loading is instant; a download keeps its progress bar
        transformers.utils.logging.disable_progress_bar()
    apart = cfg.shard == "fsdp" or (cfg.dtype == "bfloat16" and cfg.engine != "vllm")
    model, tokenizer = load_policy(source, cfg.device, samples=not apart)
    named = None  # the model of --model, where it is not the one that is trained from here on
    if cfg.beta or renamed:
        named = load_policy(base, cfg.device, samples=False)[0].requires_grad_(False)
    began_with = named or (None if saved else model)
    fingerprint = began_with and checkpoint.fingerprint(began_with)
    reference = named if cfg.beta else None
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    policy = model
    if cfg.shard == "fsdp":
        for sharded in filter(None, (model, reference)):
            shard(sharded, cfg.device)
    if apart:
        policy = load_policy(source, cfg.device, cfg.dtype)[0].requires_grad_(False)
    return Models(model, tokenizer, policy, reference, source, fingerprint)


def encode(cfg: Config, models: Models, problems: list) -> tuple[list, list[list[int]]]:
    """(problems, token ids) of the problems whose prompts leave room for a completion."""
    if not problems:
        return [], []
    room = prompt_room(models.model, cfg.max_new_tokens)
    return data.encode_prompts(
        problems, models.tokenizer, room, cfg.prompt_format, cfg.thinking, cfg.instruction,
        models.model,
    )  # fmt: skip


def prompt_room(model, max_new_tokens: int) -> int:
    """The number of tokens that a prompt may have."""
    if max_new_tokens >= model.longest:
        longest = f"the model's longest sequence, with the prompt, has {model.longest} tokens"
        raise InputError(f"--max-new-tokens {max_new_tokens}: {longest}; lower it")
    return model.longest - max_new_tokens


def make_optimizer(cfg: Config, parameters) -> torch.optim.Optimizer:
    """The optimizer. Before each step, train.py multiplies the learning rate that each of its
    parameter groups has here by the schedule; checkpoints hold its state."""
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
    ends = chat_format.end_tokens(tokenizer, model)
    if not ends:
        raise InputError(
            f"--model {model.name_or_path}: nothing names its end token, so completions would not "
            f"end: set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
        )
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return rollout.Sampling(max_new_tokens, ends, pad, engine=engine, **options)


# ---------------------------------------------------------------------------- one model


def load_policy(name: str, device: str, dtype: str = "float32", samples: bool = True):
    """(model, tokenizer) from a hub id or a folder, without remote code.

    The model has packed attention, and `model.longest` is the number of tokens that a sequence may
    have. The tokenizer is as it was saved. Training needs float32 weights; sampling in bfloat16
    needs weights of that type, or each would be cast for every token. If it `samples`, it is
    compared with the fast decoder, see engines/check_decoder.py."""
    model, tokenizer = read(name)
    tokens = max(tokenizer.get_vocab().values()) + 1  # Qwen3 pads its head beyond these
    model.vocab_size = min(tokens, model.config.vocab_size)
    if broken := [key for key, weight in model.named_parameters() if not weight.isfinite().all()]:
        weights = f"{len(broken)} of its weights, such as {broken[0]}"
        raise InputError(f"--model {name}: {weights}, hold NaN or infinity: use another checkpoint")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    window = getattr(model.config, "sliding_window", None)
    attention = (
        f"attention with a window of {window} tokens" if window else f"layers {sorted(kinds)}"
    )
    refusal = f"--model {name} has {attention}: only full attention can be packed here"
    if kinds != {"full_attention"}:
        raise InputError(refusal)
    model.longest = longest_sequence(model)
    if not packs_exactly(model, model.longest):
        if window:
            raise InputError(refusal)
        raise InputError(
            f"--model {name} cannot be packed exactly: it has attention of its own, or its logits "
            "are more than its output embedding applied to its last hidden state"
        )
    if samples and model.longest < model.config.max_position_embeddings:
        ranks.say(
            f"note: the rotary embedding (rope) of --model {name} changes in sequences of more "
            f"than {model.longest} tokens, so prompt and completion are limited to that"
        )
    fuse_norms(model)
    exact = None if dtype == "float32" or not samples else check_decoder.logits(model)
    cast_weights(model, dtype)
    model = model.to(device)
    if samples:
        check_decoder.compare(model, exact)
    return model, tokenizer


def read(name: str):
    """(model, tokenizer) by transformers, in float32. InputError if it cannot read them, or if it
    would make up weights."""
    folder = Path(name).expanduser()
    # transformers ignores a generation config that it cannot read, and with it the end tokens.
    if problem := _about_place(name, folder) or _about_file(folder / "generation_config.json"):
        raise InputError(f"--model {name} cannot be loaded: {problem}")
    options = {"trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of the names of missing weights
    try:
        _check_kind(AutoConfig.from_pretrained(name, **options))
        model, names = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation=packing.ATTENTION,
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        # What checkpoints hold: a call resets the file's padding and truncation.
        tokenizer.as_loaded = copy.deepcopy(tokenizer)
    except Exception as error:  # transformers, safetensors and tokenizers raise errors of any kind
        files = sorted(path for name in FILES for path in folder.glob(name))
        reason = next(filter(None, map(_about_file, files)), "") or _in_one_line(error)
        raise InputError(f"--model {name} cannot be loaded: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)

    if names["mismatched_keys"]:
        key, of_file, of_config = sorted(names["mismatched_keys"])[0]
        shapes = f"{key} has the shape {[*of_file]} in the file, and {[*of_config]} by config.json"
        raise InputError(f"--model {name} cannot be loaded: {shapes}, which is another model's")
    missing, unexpected = sorted(names["missing_keys"]), sorted(names["unexpected_keys"])
    if missing:
        raise InputError(f"--model {name}: {_about_names(missing, unexpected)}")
    if unexpected:
        ranks.say(f"note: --model {name} has weights that it does not use, such as {unexpected[0]}")
    return model, tokenizer


def _about_place(name: str, folder: Path) -> str:
    """Why no model can be there; "" if one can be, also on the hub."""
    if folder.is_file():
        return "it is a file; name the folder that it is in"
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return "there is no such folder"
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return "it is an adapter; merge it into its model with merge_and_unload(), and save that"
    return ""


def _check_kind(model_config) -> None:
    """ValueError unless the config is that of a language model of text alone."""
    senses = {"vision_config", "audio_config"} & {*model_config.sub_configs}
    if "vision_config" in senses:
        raise ValueError("it is a vision-language model, and only text models can be trained")
    if senses:
        raise ValueError("it is a multimodal model, and only text models can be trained")
    if model_config.is_encoder_decoder:
        raise ValueError("it is an encoder-decoder model; only decoders can be trained")


def _in_one_line(error: Exception) -> str:
    """The reason for which transformers cannot load a model."""
    said = " ".join(str(error).split())[:400]
    if kind := re.search("model type `(pruned_[a-z0-9]+)`", said):
        return f"its type {kind[1]} needs `python -m related.pruned PROGRAM FLAGS`"
    if error.args == (packing.ATTENTION,):  # the table of this model's own attention lacks ours
        return "it has attention of its own, which cannot be packed"
    return said if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {said}"


def _about_names(missing: list[str], unexpected: list[str]) -> str:
    """What is wrong with the names of a model's weights, and how to mend it."""
    found = f"{len(missing)} of its weights are missing, such as {missing[0]}"
    for name in missing:
        for other in unexpected:
            if other.endswith(name):
                prefix = other.removesuffix(name)
                remedy = PREFIXES.get(prefix, "save it under the names of the model's own weights")
                return f"{found}; its names begin with {prefix!r} ({other}): {remedy}"
    instead = f"; it has {unexpected[0]} instead" if unexpected else ""
    return f"{found}{instead}: save the whole model with save_pretrained"


def _about_file(path: Path) -> str:
    """What is wrong with a file of a model's folder; "" if it can be opened, or is not there."""
    if not path.is_file():
        return ""
    if problem_files.is_lfs_pointer(path):
        return f"{path} is the pointer of Git LFS to a file: run `git lfs pull`"
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".bin" and not zipfile.is_zipfile(path):
            raise ValueError("it is no file of torch.save")
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        return f"{path} is not whole ({reason}): copy or download it again"
    return ""


@torch.no_grad()
def longest_sequence(model) -> int:
    """The number of tokens that a sequence may have: max_position_embeddings, or fewer.

    Some rotary embeddings (longrope, dynamic) rotate all tokens of a forward in another way if one
    of them is far enough from its beginning. Then a token's log-prob would depend on what else is
    in the slot, and on what is sampled after it. Up to this length that never happens.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if not most:
        raise InputError(
            f"--model {model.name_or_path}: its config has no max_position_embeddings, so nothing "
            f"says how long a sequence may be"
        )
    if not rotary:
        return most

    def rotations(length: int) -> torch.Tensor:
        """Those of the first three positions, beside the last one of this length."""
        positions = torch.tensor([[0, 1, 2, length - 1]], device=model.device)
        found = rotary(torch.zeros(1, device=model.device), positions)
        return torch.cat(found if isinstance(found, tuple) else (found,))[:, :3]

    try:
        exact = rotations(3)
    except TypeError as error:  # some take the kind of a layer, too
        problem = f"its rotary embedding cannot be checked ({error})"
        raise InputError(f"--model {model.name_or_path}: {problem}") from None
    if torch.equal(rotations(most), exact):
        return most
    changes = lambda length: not torch.equal(rotations(length), exact)
    return 2 + bisect.bisect_left(range(3, most), True, key=changes)


@torch.no_grad()
def packs_exactly(model, longest: int = 3) -> bool:
    """Whether four packed sequences get the log-probs that the model gives to two and two of them.

    Two begin at position 0. The other two end at the last position of the longest sequence. They
    get others if the model ignores the attention interface, scales or caps its logits, or (in
    training mode) has dropout."""
    sequences = torch.tensor([[0, 1, 2], [2, 1, 0]], device=model.device)
    starts = (0, longest - 3)
    pack = packing.build_pack([[0], [2]] * 2, [[1, 2], [1, 0]] * 2, model.device)
    pack.position_ids[:, 4:] += starts[1]  # each sequence has two tokens before its last one
    was_training = model.training
    theirs = []
    try:
        ours, _ = packing.packed_logprobs(model, pack)  # [8]
        model.eval().set_attn_implementation("sdpa")
        for start in starts:
            positions = torch.arange(start, start + 3, device=model.device).expand(2, 3)
            logits = model(sequences, position_ids=positions, use_cache=False).logits  # [2, 3, V]
            every = logits[:, :-1, : model.vocab_size].log_softmax(dim=-1)  # [2, 2, V]
            theirs.append(every.gather(2, sequences[:, 1:, None]).flatten())  # [4]
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    model.train(was_training).set_attn_implementation(packing.ATTENTION)
    return torch.allclose(ours, torch.cat(theirs).to(ours.dtype), atol=1e-4)


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
