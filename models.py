"""
What a run starts from: problems, models and prompts, from the names that a user gives.

All of it happens once, before the first step. transformers reads a model; if it cannot, an
InputError has its words. A model is accepted if it has exactly the weights of its files, all of
them full and finite, and if it can be packed exactly. Else it might be another model than the one
that was saved.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
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
from config import Config, require
from dppo import seed_for
from engines import hf, memory
from runtime import InputError, checkpoint, in_words, log, ranks
from runtime.device import cast_weights, fuse_norms
from tasks import arithmetic
from update import trainer_logprobs

# What --engine names; None is our loop. vLLM is started, see `sampling`.
ENGINES = {"loop": None, "hf": hf}
PACKING = ("layer_types", "sliding_window", "rope_parameters")  # what decides whether a model packs
WHOLE = {"F64", "F32", "F16", "BF16"}  # types of weights that are no codes
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
    if model == "smollm2" or model.lower().endswith(".gguf"):
        from tasks import gguf

        return gguf.model_folder(model)
    return str(arithmetic.BASE) if model == "tiny" else model


def check_memory(cfg: Config) -> None:
    """InputError if no step can fit into the GPU. Reads only a config: before data are loaded."""
    source = ranks.broadcast(model_folder, cfg.model)
    try:
        shape = AutoConfig.from_pretrained(lora.base_of(source) or source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
    except Exception:  # load_models will say what is wrong with the model
        return
    memory.check(model, cfg, ranks.world(), torch.cuda.mem_get_info()[1])


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
    chat_format.fix_date(tokenizer, ranks.broadcast(checkpoint.first_date, cfg.out_dir))
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
    limit = f"below {model.longest}, the most tokens of a sequence with its prompt"
    require(cfg, "max_new_tokens", room > 0, limit)
    return chat_format.encode_prompts(
        problems, tokenizer, room, cfg.prompt_format, cfg.thinking, cfg.instruction, model
    )


def make_sampling(cfg: Config, models: Models, prompts, show_progress: bool) -> rollout.Sampling:
    """How the run samples. Says what an update takes of a GPU's memory: InputError if it cannot
    fit. Starts vLLM for --engine vllm and checks its log-probs."""
    share = cfg.vllm_memory
    if cfg.device == "cuda":
        _, total = torch.cuda.mem_get_info()
        parts = memory.plan(models.model, cfg, ranks.world())
        ranks.say(memory.check(models.model, cfg, ranks.world(), total))
        share = share or memory.vllm_share(parts, total)
    most_tokens = max(map(len, prompts)) + cfg.max_new_tokens
    how = sampling(
        cfg, models.model, models.tokenizer, most_tokens, batch_size=cfg.rollout_batch,
        vllm_memory=share, show_progress=show_progress,
    )  # fmt: skip
    if cfg.engine == "vllm":
        some = sorted(prompts, key=len)[-4:]  # the longest: vLLM caches whole blocks of prompts
        logprobs = lambda rollouts: trainer_logprobs(models.policy, rollouts, cfg)
        how.engine.check(models.policy, some, how, logprobs)
    return how


def sampling(
    cfg, model, tokenizer, most_tokens: int, *, batch_size: int, vllm_memory=None, **options
) -> rollout.Sampling:
    """How to sample from a loaded policy, with its end tokens and its pad token. Starts vLLM, for
    sequences of at most `most_tokens`. `options` are other fields."""
    ends = chat_format.end_tokens(tokenizer, model)
    if not ends:
        raise InputError(f"--model {cfg.model}: nothing names its end token: set eos_token")
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if cfg.engine == "vllm":
        from engines import vllm_engine

        engine = vllm_engine.Engine(
            model.name_or_path, vocab_size=model.vocab_size, max_tokens=most_tokens,
            sequences=batch_size, dtype=cfg.dtype, device=cfg.device, memory=vllm_memory,
        )  # fmt: skip
    else:
        engine = ENGINES[cfg.engine]
    return rollout.Sampling(
        cfg.max_new_tokens, ends, pad, temperature=cfg.temperature, batch_size=batch_size,
        engine=engine, **options,
    )  # fmt: skip


# ---------------------------------------------------------------------------- one model


def load_policy(name: str, device: str, dtype: str = "float32", samples: bool = True):
    """(model, tokenizer) from a hub id or a folder, as `read` gives them.

    Training needs float32 weights; sampling in bfloat16 needs weights of that type, or each would
    be cast for every token. If it `samples`, the logits of its short forward are checked, see
    decoder.py."""
    model, tokenizer = read(name)
    fuse_norms(model)
    if samples:
        decoder.check(model)
    cast_weights(model, dtype)
    return model.to(device), tokenizer


def read(name: str):
    """(model, tokenizer) as transformers reads them, without remote code, in float32, with an
    adapter merged. InputError in its words, if it cannot, if the model would not be the one that
    was saved, or if packing would change what it computes.

    The model has packed attention. `model.longest` is the number of tokens that a sequence may
    have, and `model.fingerprint` that of what was read. The tokenizer is as it was saved."""
    source = name
    options = {"trust_remote_code": False}
    try:
        types = stored_types(Path(name))
        base = lora.base_of(name)
        if base:
            stored = Path(name) / "base.json"
            if not Path(base).exists() and stored.exists():  # it has moved: by the user's name
                base = model_folder(log.read_json(stored)["model"])
            source = base
            types |= stored_types(Path(base))
        if Path(source).is_dir():  # loading is instant; a download keeps its progress bar
            logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(source, **options)
        if codes := getattr(config, "quantization_config", None) or sorted(types - WHOLE):
            raise ValueError(f"it is quantized ({codes}): use the model that it was made from")
        model, names = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, attn_implementation=packing.ATTENTION,
            output_loading_info=True, ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
        check_weights(model, names)
        own_tokenizer = not base or has_file(name, "tokenizer_config.json")
        tokenizer = AutoTokenizer.from_pretrained(name if own_tokenizer else base, **options)
        # For checkpoints. A call changes the tokenizer's padding and truncation settings.
        tokenizer.as_loaded = copy.deepcopy(tokenizer)
        model.fingerprint = fingerprint(model.parameters())
        if base:
            check_base(Path(name), base, model.fingerprint)
            model = lora.merge(model, name)
            model.fingerprint += fingerprint(lora.stored(name).values())
            model.set_attn_implementation(packing.ATTENTION)
        tokens = max(tokenizer.get_vocab().values()) + 1  # Qwen3 pads its head beyond these
        model.vocab_size = min(tokens, model.config.vocab_size)
        model.longest = model.config.max_position_embeddings
        layers = {*(getattr(config, "layer_types", None) or ["full_attention"])}
        if layers != {"full_attention"} or not packs_exactly(model, model.longest):
            kinds = {name: getattr(config, name, None) for name in PACKING}
            raise ValueError(
                f"packing would change it, which needs full attention, rotations that do not "
                f"depend on other sequences, and logits that are a linear map: {kinds}"
            )
    except InputError:
        raise
    except Exception as error:  # transformers, safetensors and tokenizers raise errors of any kind
        where = "" if Path(source).exists() else " (there is no such folder)"
        raise InputError(f"--model {name} cannot be loaded{where}: {in_words(error)}") from None
    if not own_tokenizer and has_file(name, "chat_template.jinja"):
        ranks.say(f"note: {name} has a chat template without a tokenizer: {base}'s is used")
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


def stored_types(folder: Path) -> set[str]:
    """The types of the weights in a folder. An exception for what transformers would not notice: an
    adapter beside a model, and a generation config that is not whole."""
    if [*folder.glob("adapter*")] and [*folder.glob("model*"), *folder.glob("pytorch_model*")]:
        raise ValueError("it has an adapter beside a model: give a folder with one of them")
    if (folder / "generation_config.json").exists():
        log.read_json(folder / "generation_config.json")
    types = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                keys = [key for key in file.offset_keys() if "weight" in key]
                types |= {file.get_slice(key).get_dtype() for key in keys}
        except Exception as error:  # which does not name the file
            raise ValueError(f"{path} cannot be read ({in_words(error)})") from None
    return types


def check_weights(model, names: dict) -> None:
    """ValueError unless the model has exactly the weights of its files, all of them finite."""
    for kind in ("missing", "mismatched", "unexpected"):
        if keys := names[f"{kind}_keys"]:
            few = f"{len(keys)} weights are {kind}, such as {min(keys)}"
            raise ValueError(f"{few}: save the whole model, without a wrapper or an adapter")
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
