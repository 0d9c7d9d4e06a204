"""
What a run starts from: problems, models and prompts, from the names that a user gives.

All of it happens once, before the first step. transformers reads a model; if it cannot, an
InputError has its words. A model is accepted if it has exactly the weights of its files, all of
them full and finite, and if it can be packed exactly. Else it might be another model than the one
that was saved.
"""

import contextlib
import copy
import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from huggingface_hub import file_exists, try_to_load_from_cache
from safetensors import safe_open
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import has_file, logging

import chat_format
import data
import decoder
import lora
import packing
import rewards
import rollout
from config import Config
from dppo import seed_for
from engines import hf, memory, vllm_engine
from runtime import InputError, checkpoint, log, ranks
from runtime.device import cast_weights, fuse_norms
from tasks import arithmetic, gguf
from update import trainer_logprobs

# What --engine names. vLLM is started by whoever asks for it: see `make_sampling`.
ENGINES = {"loop": None, "hf": hf}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


class Models(NamedTuple):
    """What is trained, what samples, and what the KL term compares with."""

    model: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    policy: torch.nn.Module  # samples; the model itself unless its weights are sharded or cast
    reference: torch.nn.Module | None  # the model that the run began with; None without --beta
    base: dict | None  # for a checkpoint's base.json; None without --lora and --beta


def load_problems(cfg: Config, reward: Callable | None = None) -> tuple:
    """(problems of --data, problems to evaluate on if there are evaluations, their two rewards).
    `reward` replaces the data's own."""
    if reward:
        rewards.takes_row(reward)  # raises if it cannot be called
    limit = cfg.eval_problems if cfg.eval_every else 0
    sets = ranks.broadcast(data.problem_sets, cfg.data, cfg.eval_data, limit, reward)
    names = (cfg.data, cfg.eval_data or cfg.data)
    return *sets, *(reward or data.reward_function(name) for name in names)


def model_folder(model: str) -> str:
    """The folder, or the hub id, of a --model value."""
    if Path(model).name == "checkpoint":  # of a run, whose file system may have no links
        model = str(checkpoint.newest(Path(model).parent) or model)
    return str(arithmetic.BASE) if model == "tiny" else gguf.model_folder(model)


def check_memory(cfg: Config) -> None:
    """InputError if no step can fit into the GPU, and a note if it may not. Reads only a config."""
    source = ranks.broadcast(model_folder, cfg.model)
    try:
        check_files(source, Path(source))
        shape = AutoConfig.from_pretrained(lora.base_of(source) or source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except Exception:  # load_models will say what is wrong with the model
        return
    command = f"{ranks.launcher()} {shlex.join(sys.argv)}"
    _, total = torch.cuda.mem_get_info()
    if note := memory.check(model, cfg, ranks.world(), total, command):
        ranks.say(note)


def load_models(cfg: Config, saved: Path | None) -> Models:
    """The models of --model, or of a checkpoint that the run resumes from."""
    base = cfg.model
    if cfg.beta or cfg.lora or not saved:
        base = ranks.broadcast(model_folder, base)
    source = str(base if cfg.lora else saved or base)
    apart = memory.samples_apart(cfg)
    # In turns: on the host, a model of 8B takes 30 GiB while it is read.
    load = functools.partial(ranks.in_turns, load_policy)
    model, tokenizer = load(source, cfg.device, samples=not apart)
    reference = None
    if cfg.beta and cfg.lora:
        reference = model  # without its adapters: see lora.base_alone
    elif cfg.beta:
        reference = load(base, cfg.device, samples=False)[0].requires_grad_(False)
    base = None
    if frozen := model if cfg.lora else reference:
        base = {"model": cfg.model, "fingerprint": frozen.fingerprint}
        check_base(saved, cfg.model, frozen.fingerprint)
    data.fix_date(tokenizer, ranks.broadcast(checkpoint.first_date, cfg.out_dir))
    if cfg.gradient_checkpointing:
        checkpoint_layers(model)
    if cfg.lora:
        if lora.base_of(source):
            way_out = "save the merged model (docs/running.md), and train that"
            raise InputError(f"--lora {cfg.lora}: --model {cfg.model} is an adapter: {way_out}")
        cast_weights(model, cfg.dtype)
        lora.inject(model, cfg.lora, seed_for(cfg.seed, "lora"))
        if saved:
            lora.load(model, saved)
    policy = model
    if cfg.shard == "fsdp":
        for sharded in filter(None, (model, reference)):
            shard(sharded, cfg.device)
    if apart:
        policy = load(source, cfg.device, cfg.dtype)[0].requires_grad_(False)
    return Models(model, tokenizer, policy, reference, base)


def encode(cfg, model, tokenizer, problems: list) -> tuple[list, list[list[int]]]:
    """(problems, token ids) of the problems whose prompts leave room for a completion."""
    if not problems:
        return [], []
    room = model.longest - cfg.max_new_tokens
    if room <= 0:
        longest = f"a sequence has at most {model.longest} tokens, prompt included"
        raise InputError(f"--max-new-tokens {cfg.max_new_tokens}: {longest}; lower it")
    return data.encode_prompts(
        problems, tokenizer, room, cfg.prompt_format, cfg.thinking, cfg.instruction, model
    )


def make_sampling(cfg: Config, models: Models, prompts, show_progress: bool) -> rollout.Sampling:
    """How the run samples, after it has said how much memory it will take. Starts vLLM for --engine
    vllm and checks its log-probs."""
    engine, share = cfg.engine, cfg.vllm_memory
    longest = max(map(len, prompts))
    if cfg.device == "cuda":
        _, total = torch.cuda.mem_get_info()
        sizes = (models.model, cfg, longest, ranks.world())
        ranks.say(memory.report(*sizes, total))
        share = share or memory.vllm_share(memory.plan(*sizes), total)
    if engine == "vllm":
        engine = vllm_engine.Engine(
            models.model.name_or_path, vocab_size=models.model.vocab_size,
            max_tokens=longest + cfg.max_new_tokens, sequences=cfg.rollout_batch,
            dtype=cfg.dtype, device=cfg.device, memory=share,
        )  # fmt: skip
    how = sampling(
        models.model, models.tokenizer, cfg.max_new_tokens, engine, temperature=cfg.temperature,
        batch_size=cfg.rollout_batch, show_progress=show_progress,
    )  # fmt: skip
    if cfg.engine == "vllm":
        longest = sorted(prompts, key=len)[-4:]  # vLLM caches whole blocks of prompts
        logprobs = lambda rollouts: trainer_logprobs(models.policy, rollouts, cfg)
        engine.check(models.policy, longest, how, logprobs)
    return how


def sampling(model, tokenizer, max_new_tokens: int, engine="loop", **options) -> rollout.Sampling:
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
    needs weights of that type, or each would be cast for every token. If it `samples`, the logits
    of its short forward are checked, see decoder.py."""
    model, tokenizer = read(name)
    kinds = sorted({*(getattr(model.config, "layer_types", None) or ["full_attention"])})
    try:
        tokens = max(tokenizer.get_vocab().values()) + 1  # Qwen3 pads its head beyond these
        model.vocab_size = min(tokens, model.config.vocab_size)
        model.longest = model.config.max_position_embeddings
        packs = kinds == ["full_attention"] and packs_exactly(model, model.longest)
        why = ""
    except Exception as error:  # its config and its code may lack anything
        packs, why = False, f" ({data.in_words(error)})"
    if not packs:
        window = getattr(model.config, "sliding_window", None)
        rope = getattr(model.config, "rope_parameters", None)
        raise InputError(
            f"--model {name} cannot be packed exactly{why}: that needs full attention, rotations "
            f"that do not depend on other sequences, and logits that are a linear map of the last "
            f"hidden state. It has the layers {kinds}, sliding_window {window} and rope {rope}"
        )
    fuse_norms(model)
    if samples:
        decoder.check(model)
    cast_weights(model, dtype)
    return model.to(device), tokenizer


def read(name: str):
    """(model, tokenizer) as transformers reads them, in float32, with an adapter merged. InputError
    in its words, if it cannot, or if the model would not be the one that was saved."""
    shown, source = name, name
    options = {"trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would print a table of the names of missing weights
    try:
        types = check_files(name, Path(name))
        base = lora.base_of(name)
        own = Path(name) / "base.json"
        if base and not Path(base).exists() and own.exists():  # it has moved: by the user's name
            base = model_folder(log.read_json(own)["model"])
        if base:
            shown, source = f"{name}, an adapter of {base},", base
            types |= check_files(base, Path(base))
        if Path(source).is_dir():  # loading is instant; a download keeps its progress bar
            logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(source, **options)
        check_quantization(config, types)
        model, names = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, attn_implementation=packing.ATTENTION,
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
        own_tokenizer = not base or has_file(name, "tokenizer_config.json")
        tokenizer = AutoTokenizer.from_pretrained(name if own_tokenizer else base, **options)
        # For checkpoints. A call changes the tokenizer's padding and truncation settings.
        tokenizer.as_loaded = copy.deepcopy(tokenizer)
        check_weights(model, names)
        model.fingerprint = of_base = fingerprint(model.parameters())
        if base:
            model = lora.merge(model, name)
            model.fingerprint = of_base + fingerprint(lora.stored(name).values())
    except Exception as error:  # transformers, safetensors and tokenizers raise errors of any kind
        where = "" if Path(source).exists() else " (there is no such folder)"
        why = data.in_words(error)
        raise InputError(f"--model {shown} cannot be loaded{where}: {why}") from None
    finally:
        logging.set_verbosity(verbosity)
    if base:
        check_base(Path(name), base, of_base)
    kind, saved_as = type(model).__name__, config.architectures or []
    code = getattr(config, "auto_map", None) or tokenizer.init_kwargs.get("auto_map")
    if code or (saved_as and kind not in saved_as):
        ranks.say(f"note: --model {name} names {code or saved_as}; it is read as {kind} instead")
    return model, tokenizer


def fingerprint(weights) -> int:
    """A number that identifies a model as it was read: the sum of its weights' bits, as integers.

    It depends neither on the order of the sum nor on names and shapes, which transformers may
    change when it saves. `read` gives each model its own as `model.fingerprint`."""
    total = 0
    for weight in weights:
        bits = weight.detach().contiguous().view(INTEGERS[weight.itemsize])
        total += bits.sum(dtype=torch.int64).item()
    return total


def check_base(folder: Path | None, model: str, found: int) -> None:
    """InputError if the checkpoint in a folder was trained on, or compared with, other weights than
    the model has: its base.json holds their fingerprint."""
    path = folder and folder / "base.json"
    if path and path.exists() and log.read_json(path)["fingerprint"] != found:
        raise InputError(
            f"{folder} was trained beside other weights than {model} now has: restore those"
        )


def check_files(name: str, folder: Path) -> set[str]:
    """The types of the weights in a folder. An exception if it is no model and no adapter, or has a
    file that is not whole, which transformers would ignore or not name."""
    kinds = ("config.json", "adapter_config.json")
    here = folder.exists() or any(try_to_load_from_cache(name, kind) for kind in kinds)
    # Asked once: transformers asks for 30 s.
    if not here and not any(file_exists(name, kind) for kind in kinds):
        raise ValueError("the hub has no config.json of this name")
    if folder.is_file():
        raise ValueError(f"it is a file: give its folder, {folder.parent}")
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*")]
    if weights and [*folder.glob("adapter*")]:
        raise ValueError("it has an adapter beside a model: give a folder with one of them")
    types = set()
    kinds = ("config", "generation_config", "tokenizer*", "*.index")
    paths = [path for kind in kinds for path in folder.glob(f"{kind}.json")]
    for path in [*paths, *folder.glob("*.safetensors")]:
        try:
            if path.suffix == ".json":
                content = json.loads(path.read_text(encoding="utf-8"))
            else:
                with safe_open(path, "pt") as weights:
                    keys = [key for key in weights.offset_keys() if "weight" in key]
                    types |= {weights.get_slice(key).get_dtype() for key in keys}
        except Exception as error:
            why = data.in_words(error)
            pointer = ": if it is a Git LFS pointer, run `git lfs pull`"
            if isinstance(error, OSError):  # nothing is wrong with what it holds
                pointer = ""
            raise ValueError(f"{path} cannot be read ({why}){pointer}") from None
        if path.name == "config.json" and "model_type" not in content:
            weights = checkpoint.newest(folder) or "a folder with weights"
            raise ValueError(f"it is the folder of a run or an evaluation: give {weights}")
    return types


def check_quantization(config, types: set[str]) -> None:
    """ValueError for codes in place of weights."""
    quantization = getattr(config, "quantization_config", None)
    if quantization or not types <= {"F64", "F32", "F16", "BF16"}:
        method = (quantization or {}).get("quant_method") or sorted(types)
        raise ValueError(
            f"it is quantized ({method}), and only full weights can be trained: use the bfloat16 "
            f"or float32 model that it was made from"
        )


def check_weights(model, names: dict) -> None:
    """ValueError unless the model has exactly the weights of its files, all of them finite."""
    wrong = [
        f"{len(keys)} {kind} (such as {min(keys)})"
        for kind in ("missing", "mismatched", "unexpected")
        if (keys := names[f"{kind}_keys"])
    ]
    if wrong:
        raise ValueError(
            f"its weights are not those of {type(model).__name__}: {', '.join(wrong)}. Save the "
            f"whole model, without a wrapper (_orig_mod.), adapter or quantization"
        )
    for key, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{key} holds NaN or infinity: use another checkpoint")


@torch.no_grad()
def packs_exactly(model, longest: int = 3) -> bool:
    """Whether the model gives four sequences the same log-probs packed as in two batches of two.

    Two begin at position 0. The other two end at the last position of the longest sequence. The
    log-probs differ if the model ignores the attention interface, rotates tokens by the last
    position in the slot (longrope), scales or caps its logits, or (in training mode) has dropout.
    Raises whatever a model of another build does."""
    sequences = torch.tensor([[0, 1, 2], [2, 1, 0]], device=model.device)
    starts = (0, longest - 3)
    pack = packing.build_pack([[0], [2]] * 2, [[1, 2], [1, 0]] * 2, model.device)
    pack.position_ids[:, 4:] += starts[1]  # each sequence has two tokens before its last one
    was_training = model.training
    theirs = []
    ours, _ = packing.packed_logprobs(model, pack)  # [8]
    model.eval().set_attn_implementation("sdpa")
    for start in starts:
        positions = torch.arange(start, start + 3, device=model.device).expand(2, 3)
        logits = model(sequences, position_ids=positions, use_cache=False).logits  # [2, 3, V]
        every = logits[:, :-1, : model.vocab_size].log_softmax(dim=-1)  # [2, 2, V]
        theirs.append(every.gather(2, sequences[:, 1:, None]).flatten())  # [4]
    model.train(was_training).set_attn_implementation(packing.ATTENTION)
    return torch.allclose(ours, torch.cat(theirs).to(ours.dtype), atol=1e-4)


def checkpoint_layers(model) -> None:
    """Recompute each layer's activations in the backward pass. Raises InputError for dropout."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.23
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; sampling restores the mode
    exact = False
    with contextlib.suppress(NotImplementedError):  # packed attention has no dropout
        exact = packs_exactly(model)
    if not exact:
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
