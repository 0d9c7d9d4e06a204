"""
The flags of train.py: what each one means, what it may be, and what it is when it is not given.

Bad values end in an InputError that names the flag, the value and the way out, before anything is loaded or written.
"""

import contextlib
import difflib
import io
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import tyro

import baselines
import data
import rollout
import sampler
from data import InputError

METHODS = {  # --method is no more than this choice of --prompt-rule and --completion-rule
    "grpo": ("none", "none"),
    "grpo_zero": ("none", "zero"),
    "dppo": ("dppo", "dppo"),
    "dppo_floor": ("dppo_floor", "dppo_floor"),
    "cppo": ("none", "cppo"),
    "greso": ("greso", "none"),
    "pps": ("pps", "pps"),
}
LOSS_CLIPS = {  # --eps-low and --eps-high where they are not given: the papers'; cispo: no lower bound, and TRL's 5
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}


@dataclass
class Config:
    # method
    method: Literal["grpo", "grpo_zero", "dppo", "dppo_floor", "cppo", "greso", "pps"] = "pps"  # the two rules
    # before rollout; auto: the method's; dppo by its own history, pps ours, dppo_floor and greso biased
    prompt_rule: Literal["auto", "none", "uniform", "dppo", "pps", "dppo_floor", "greso"] = "auto"
    # after reward; zero drops what contributes 0, dppo by |advantage|, pps ours; cppo, cppo_batch, dppo_floor biased
    completion_rule: Literal["auto", "none", "zero", "dppo", "pps", "uniform", "cppo", "cppo_batch", "dppo_floor"] = (
        "auto"
    )
    prompt_prune_rate: float | None = None  # r_q: share dropped (dppo: chance, if of low history); default 0.3, pps 0.6
    completion_prune_rate: float | None = None  # r_o: share dropped (dppo: chance, if below the mean); default 0.7
    cppo_allocation: bool = False  # with cppo: roll out 1 / (1 - r_o) times the prompts, to fill the update
    check_every: int = 0  # steps between running checks that the pruning of both levels is unbiased; 0 = never
    # loss
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "grpo"  # ratio, clip and denominator
    eps_low: float | None = None  # the ratio is clipped to 1 - eps_low; default: the loss's own, 0.2 for grpo
    eps_high: float | None = None  # and 1 + eps_high, also for cispo (TRL gives the sum)
    importance_cap: float | None = (
        None  # correct each token for its sampler, by at most this; 0: no; default 2 for vllm, fsdp in bfloat16
    )
    beta: float = 0.0  # of the KL term (k3) to the model the run began with; 0: no reference model
    mask_truncated: bool = False  # completions cut off by max_new_tokens carry no loss
    # model and data
    model: str = "tiny"  # tiny (the embedded base model), a hub id such as Qwen/Qwen3-0.6B, or a folder
    data: str = "arithmetic"  # arithmetic, arithmetic-mixed, gsm8k, math, dapo or a file
    eval_data: str | None = None  # default: the held-out split, or the last 5 % of what is trained on
    prompt_format: Literal["auto", "chat", "plain"] = "auto"  # auto: chat where the tokenizer has a template
    thinking: bool = False  # let the chat template open a thought
    # batch
    steps: int = 60  # rollout batches, each good for minibatches x epochs optimizer updates
    prompts_per_step: int | None = None  # Q: candidates of a step and the denominator; default 32, pps 64
    group_size: int = 16  # G: completions per prompt
    minibatches: int = 1  # optimizer updates in one pass over a step's prompts
    epochs: int = 1  # passes over a step's prompts, each with draws of its own
    max_new_tokens: int | None = None  # default: what the embedded task needs, 1,024 for files
    temperature: float = 1.0  # of sampling; the log-probs carry it
    engine: Literal["compact", "hf", "vllm"] = "compact"  # what samples: our loop, transformers' generate, vLLM
    vllm_memory: float = 0.3  # share of the GPU's memory that vLLM may take while it samples
    rollout_batch: int = 512  # sequences sampled at once; bounds the memory of the key-value cache
    # optimizer
    lr: float | None = None  # default: 6e-4 for tiny, 1e-6 otherwise
    warmup: int = 5  # steps over which the learning rate rises
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None  # after warm-up; default: linear (to 0) for tiny
    grad_clip: float = 1.0  # largest gradient norm
    weight_decay: float = 0.0  # AdamW's
    # packing and machine
    pack_tokens: int | None = None  # tokens in a slot; default: 2,048 on the CPU, 8,192 on CUDA
    pack_window: int = 64  # sequences the packer looks at
    share_prompts: bool | None = None  # completions of a prompt in one slot forward it once; default: on the CPU
    gradient_checkpointing: bool = False  # layers are computed again in the backward pass: less memory, more time
    shard: Literal["none", "fsdp"] = "none"  # fsdp: weights, gradients and Adam's state are split over the ranks
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the arithmetic (weights stay float32); bfloat16 on CUDA
    # run
    seed: int = 0  # of everything that is drawn
    out_dir: str = "out"  # holds the log, the checkpoint and run.png
    resume: bool = False  # continue the run in out_dir, with its own settings
    eval_every: int = 20  # steps between evaluations; 0 = never
    eval_problems: int = 300  # at most so many, 4 completions each
    save_every: int = 20  # steps between checkpoints; 0 = never
    keep_checkpoints: int = 2  # the newest
    track: str | None = None  # wandb, trackio or a module of yours that has their calls


FREE_TO_CHANGE = (  # when resuming: what is not part of the experiment
    "steps", "device", "vllm_memory", "rollout_batch", "pack_tokens", "pack_window", "share_prompts",
    "gradient_checkpointing", "shard", "out_dir", "resume", "eval_every", "save_every", "keep_checkpoints", "track",
    "check_every",
)  # fmt: skip


def parse_config(argv: list[str]) -> Config:
    """The Config of a command line; with --resume, on top of what the run in out_dir was started with."""
    cfg = _parse(argv, Config())
    stored = Path(cfg.out_dir) / "config.json"
    if cfg.resume and stored.exists():
        run = Config(**json.loads(stored.read_text())["config"])
        cfg = _parse(argv, run)
        for field in fields(Config):
            now, then = getattr(cfg, field.name), getattr(run, field.name)
            free = field.name in FREE_TO_CHANGE and (field.name != "steps" or run.lr_schedule == "constant")
            if now != then and not free:
                flag = field.name.replace("_", "-")
                raise InputError(
                    f"--{flag} {now}: the run in {cfg.out_dir} has {then}; leave it, or use another --out-dir"
                )
    return cfg


def _parse(argv: list[str], default: Config) -> Config:
    """tyro's parser, with its complaint folded into one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            cfg, unknown = tyro.cli(Config, args=argv, default=default, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        lines = [line for line in complaint.getvalue().splitlines() if not line.startswith("╭")]  # without the title
        words = " ".join(" ".join(lines).translate({ord(c): " " for c in "─│╰╯"}).split())
        raise InputError(words.split(" Argument helptext")[0].split(" For full helptext")[0]) from None
    if unknown:
        known = [f"--{field.name.replace('_', '-')}" for field in fields(Config)]
        near = difflib.get_close_matches(unknown[0].replace("_", "-"), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        if unknown[0].split("=")[0].replace("_", "-") in ("--top-p", "--top-k", "--min-p", "--repetition-penalty"):
            hint = "what is trained must be the distribution that was sampled, whole; eval.py has such flags"
        raise InputError(f"unknown flag {unknown[0]}: {hint}")
    return cfg


def resolve(cfg: Config) -> Config:
    """Check every value and fill in the defaults that depend on others; InputError names the value."""
    device = rollout.choose_device(cfg.device)
    rules = dict(zip(("prompt_rule", "completion_rule"), METHODS[cfg.method], strict=True))
    cfg = replace(cfg, **{name: rule for name, rule in rules.items() if getattr(cfg, name) == "auto"})
    eps_low, eps_high = LOSS_CLIPS[cfg.loss]
    defaults = {
        "prompt_prune_rate": {"none": 0.0, "greso": 0.0, "pps": 0.6}.get(cfg.prompt_rule, 0.3),
        "prompts_per_step": 64 if cfg.prompt_rule == "pps" else 32,  # pps: a wider choice, fewer rollouts
        "completion_prune_rate": 0.0 if cfg.completion_rule in ("none", "zero") else 0.7,
        "eps_low": eps_low,
        "eps_high": eps_high,
        "max_new_tokens": max(data.max_new_tokens(name) for name in (cfg.data, cfg.eval_data or cfg.data)),
        "lr": 6e-4 if cfg.model == "tiny" else 1e-6,
        "lr_schedule": "linear" if cfg.model == "tiny" else "constant",
        "pack_tokens": 2048 if device == "cpu" else 8192,
        "share_prompts": device == "cpu",
    }
    dtype = ("float32" if device == "cpu" else "bfloat16") if cfg.dtype == "auto" else cfg.dtype
    other_sampler = cfg.engine == "vllm" or (cfg.shard == "fsdp" and dtype == "bfloat16")  # its arithmetic is not ours
    defaults["importance_cap"] = 2.0 if other_sampler else 0.0
    missing = {name: value for name, value in defaults.items() if getattr(cfg, name) is None}
    cfg = replace(cfg, device=device, dtype=dtype, **missing)

    def check(name, good, rule):
        if not good(getattr(cfg, name)):
            raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: must be {rule}")

    for name, rule, idle in (
        ("prompt_prune_rate", cfg.prompt_rule, ("none", "greso")),
        ("completion_prune_rate", cfg.completion_rule, ("none", "zero")),
    ):
        check(name, lambda r: 0 <= r < 1, "at least 0 and below 1: at 1 nothing is kept, and no weight can mend it")
        if rule in idle:
            flag = name.replace("prune_rate", "rule").replace("_", "-")
            hint = f"0 with --{flag} {rule} (--method {cfg.method}), which has no rate: choose another rule or method"
            check(name, lambda r: r == 0, hint)
    counts = (
        "steps", "prompts_per_step", "minibatches", "epochs", "max_new_tokens", "rollout_batch", "pack_tokens",
        "pack_window", "eval_problems", "keep_checkpoints",
    )  # fmt: skip
    for name in counts:
        check(name, lambda count: count >= 1, "at least 1")
    check("group_size", lambda size: size >= 2, "at least 2: a group of one has no advantage")
    for name in ("lr", "temperature", "grad_clip"):
        check(name, lambda value: 0 < value < math.inf, "above 0 and finite")
    for name in ("beta", "warmup", "weight_decay", "eval_every", "save_every", "check_every"):
        check(name, lambda value: 0 <= value < math.inf, "at least 0")
    check("eps_low", lambda eps: 0 < eps < 1 or (cfg.loss == "cispo" and eps == 1), "above 0 and below 1")
    check("importance_cap", lambda cap: cap == 0 or 1 <= cap < math.inf, "0 (no correction) or at least 1")
    check("vllm_memory", lambda share: 0 < share < 1, "above 0 and below 1")
    check("eps_high", lambda eps: 0 < eps < math.inf, "above 0")
    if cfg.cppo_allocation and cfg.completion_rule not in ("cppo", "cppo_batch"):
        raise InputError(f"--cppo-allocation: belongs to --method cppo, not to --completion-rule {cfg.completion_rule}")
    ranked = {"cppo": cfg.group_size, "cppo_batch": cfg.prompts_per_step // cfg.minibatches * cfg.group_size}
    if size := cfg.group_size if cfg.cppo_allocation else ranked.get(cfg.completion_rule):
        check("completion_prune_rate", lambda r: baselines.kept_count(size, r) > 0, f"lower: it keeps none of {size}")
    if cfg.prompt_rule in sampler.FIXED_SIZE:
        kept = sampler.kept_prompts(num_candidates(cfg), cfg.prompt_prune_rate)
        few = (
            f"lower: it keeps {kept} of {num_candidates(cfg)} prompts, and each of {cfg.minibatches} updates needs one"
        )
        check("prompt_prune_rate", lambda r: kept >= cfg.minibatches, few)
    if cfg.prompt_rule == "greso":
        check("check_every", lambda n: n == 0, "0 with --prompt-rule greso: it has no un-pruned batch to compare with")
    divides = f"a divisor of the step's {num_candidates(cfg)} prompts, so that every update has the planned size"
    check("minibatches", lambda count: num_candidates(cfg) % count == 0, divides)
    return cfg


def num_candidates(cfg: Config) -> int:
    """How many prompts a step considers: --prompts-per-step, or what CPPO's allocation makes of it."""
    if cfg.cppo_allocation:
        return baselines.allocated_prompts(cfg.prompts_per_step, cfg.group_size, cfg.completion_prune_rate)
    return cfg.prompts_per_step


def check_prompts(cfg: Config, prompts: int) -> None:
    """InputError if a step asks for more prompts than there are."""
    asked = num_candidates(cfg)
    if prompts < asked:
        allocated = f", which --cppo-allocation makes {asked}" if cfg.cppo_allocation else ""
        raise InputError(f"--prompts-per-step {cfg.prompts_per_step}{allocated}: the data holds only {prompts} prompts")
    if cfg.prompt_rule == "greso" and prompts < 2 * asked:
        message = f"--prompt-rule greso: its first round is 1.5 x {asked} prompts of {prompts}"
        raise InputError(f"{message}, too few: lower --prompts-per-step")


def warnings(cfg: Config, steps_per_epoch: int) -> list[str]:
    """What a user may not expect of a resolved Config: above all, what is not the unbiased gradient of its loss."""
    said = []
    if cfg.completion_rule in baselines.BIASED and cfg.completion_prune_rate > 0:
        said.append(f"--completion-rule {cfg.completion_rule} is biased: it keeps by rank, not at random")
    if cfg.prompt_rule in ("dppo", "dppo_floor", "greso") and cfg.steps <= steps_per_epoch:
        said.append(f"--prompt-rule {cfg.prompt_rule} drops nothing in the first {steps_per_epoch} steps, an epoch")
    if cfg.prompt_rule == "greso":
        said.append("--prompt-rule greso is biased: what it skips has no weight when it comes back, and it refills")
    if cfg.prompt_prune_rate > 0:
        if cfg.prompt_rule == "dppo_floor":
            said.append("--prompt-rule dppo_floor is biased: it keeps by rank, not at random")
        if cfg.loss in ("dapo", "cispo"):
            said.append(
                f"--loss {cfg.loss} estimates the un-pruned batch's tokens where prompts are pruned: consistent at "
                "best, not exact; --loss grpo, dr_grpo and gspo, or --prompt-rule none, have no such estimate"
            )
        if cfg.epochs > 1:
            said.append(
                "--epochs above 1 with pruned prompts is inexact: later epochs see parameters that depend on the "
                "step's one prompt draw; --prompt-rule none avoids it"
            )
    if cfg.engine == "vllm" and "pps" in (cfg.prompt_rule, cfg.completion_rule):
        said.append("--engine vllm tells pps an upper bound of each completion's size: unbiased, a little noisier")
    if cfg.beta > 0 and cfg.completion_rule == "zero" and not cfg.mask_truncated:
        said.append("--completion-rule zero drops nothing with --beta above 0: the KL term is never exactly zero")
    if cfg.loss == "gspo" and cfg.dtype == "bfloat16" and cfg.eps_high < 1e-2 and not cfg.importance_cap:
        said.append(
            f"--loss gspo clips at {cfg.eps_high:g}, and sampler and trainer may differ by more in bfloat16: watch "
            "clip_ratio/region_mean and sampling/sampling_logp_difference/mean; --importance-cap 2 measures ratios anew"
        )
    return said
