"""
The flags of train.py: how they are read, their defaults, and the checks of their values.

A bad value raises an InputError that names the flag, the value and a remedy before anything is
loaded or written.
"""

import importlib
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import tyro

import data
import dppo
import lora
import sampler
from flags import Config
from runtime import InputError, checkpoint
from runtime.device import choose_device, choose_dtype

# Pairs of a prompt rule and a completion rule. The name of a rule is a method, too.
METHODS = {"grpo": ("none", "none")}
FREE_TO_CHANGE = (  # when a run is resumed: settings that are not part of the experiment
    "steps", "device", "vllm_memory", "rollout_batch", "pack_tokens", "gradient_checkpointing",
    "shard", "out_dir", "resume", "eval_every", "save_every", "track",
)  # fmt: skip
RULES = (dppo.Rule, dppo.BiasedRule)


# ---------------------------------------------------------------------------- the command line


def parse_config(argv: list[str]) -> Config:
    """The Config of a command line. With --resume, the defaults are the settings of that run."""
    cfg = tyro.cli(Config, args=argv)
    stored = Path(cfg.out_dir) / "config.json"
    if cfg.resume and os.path.exists(stored):
        settings = checkpoint.stored_config(stored.parent)
        if unknown := settings.keys() - {field.name for field in fields(Config)}:
            raise InputError(
                f"--resume: the run in {cfg.out_dir} is from another version, which had "
                f"{', '.join(map(flag, sorted(unknown)))}: use another --out-dir"
            )
        run = Config(**settings)
        run = replace(run, out_dir=cfg.out_dir)  # the folder may have been moved
        cfg = tyro.cli(Config, args=argv, default=run)
        for field in fields(Config):
            now, then = getattr(cfg, field.name), getattr(run, field.name)
            free = field.name in FREE_TO_CHANGE
            if field.name == "model" and (run.lora or run.beta):
                free = True  # it may have moved: models.check_base compares the weights
            if field.name == "steps" and run.lr_schedule != "constant":
                free = False  # the schedule would change
            if now != then and not free:
                raise InputError(
                    f"{flag(field.name)} {now}: the run in {cfg.out_dir} has {then}; leave it, or "
                    f"use another --out-dir"
                )
    return cfg


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


# ---------------------------------------------------------------------------- defaults and checks


def resolve(cfg: Config) -> Config:
    """Fill in the defaults that depend on other flags, then check every value."""
    device = choose_device(cfg.device)
    tiny = cfg.model == "tiny"
    cfg = replace(cfg, loss=cfg.loss or ("dr_grpo" if tiny else "grpo"))
    prompt_rule, completion_rule = rules_of(cfg)
    cfg = replace(
        cfg,
        prompt_rule=cfg.prompt_rule or prompt_rule,
        completion_rule=cfg.completion_rule or completion_rule,
    )
    _check_entries(cfg)
    prompt_rule = sampler.PROMPT_RULES[cfg.prompt_rule]
    completion_rule = dppo.COMPLETION_RULES[cfg.completion_rule]
    dtype = choose_dtype(cfg.dtype, device)
    # Engine and trainer round differently if they are different programs, and in bfloat16, where
    # the engine has a copy of the weights.
    rounds_differently = cfg.engine == "vllm" or dtype == "bfloat16"
    eps_low, eps_high = dppo.LOSSES[cfg.loss].clip
    defaults = {
        "prompt_prune_rate": prompt_rule.rate or 0.0,
        "prompts_per_step": 16 if tiny else 64,
        "completion_prune_rate": completion_rule.rate or 0.0,
        "rest": dppo.REST,
        "scale_rewards": dppo.LOSSES[cfg.loss].scale_rewards,
        "eps_low": eps_low,
        "eps_high": eps_high,
        "importance_cap": 2.0 if rounds_differently else 0.0,
        "max_new_tokens": max(map(data.max_new_tokens, (cfg.data, cfg.eval_data or cfg.data))),
        "lr": 6e-4 if tiny else 1e-6,
        "lr_schedule": "linear" if tiny else "constant",
        "pack_tokens": 2048 if device == "cpu" else 8192,
    }
    if cfg.lora:
        # tiny: 3e-3 was the best of four rates, and at 6e-3 one run of five collapsed
        defaults["lr"] = 3e-3 if tiny else lora.learning_rate(defaults["lr"])
    missing = {name: value for name, value in defaults.items() if getattr(cfg, name) is None}
    cfg = replace(cfg, device=device, dtype=dtype, **missing)
    _check_values(cfg)
    _check_updates(cfg)
    return cfg


def rules_of(cfg: Config) -> tuple[str, str]:
    """The prompt rule and the completion rule of --method. Rivals are loaded if one is asked for;
    else the core has no need of them."""
    ours = {*METHODS, *sampler.PROMPT_RULES, *dppo.COMPLETION_RULES}
    asked = {cfg.method, cfg.prompt_rule, cfg.completion_rule} - {None}
    if not asked <= ours:
        importlib.import_module("related.rivals")  # adds its rules
    prompt_rules, completion_rules = sampler.PROMPT_RULES, dppo.COMPLETION_RULES
    name = cfg.method
    _check_name(cfg, "method", {**METHODS, **prompt_rules, **completion_rules})
    named = (name if name in prompt_rules else "none", name if name in completion_rules else "none")
    return METHODS.get(name, named)


def _check_name(cfg: Config, name: str, known: dict) -> None:
    """InputError if the value of a flag is not in its table."""
    value = getattr(cfg, name)
    if value not in known:
        names = ", ".join(known)
        raise InputError(
            f"{flag(name)} {value}: choose one of {names}, or run the program that adds it"
        )


def _check_entries(cfg: Config) -> None:
    """InputError for a rule or loss that is unknown, or whose entry is of the wrong kind."""
    for name, table, kind in (
        ("prompt_rule", sampler.PROMPT_RULES, RULES),
        ("completion_rule", dppo.COMPLETION_RULES, RULES),
        ("loss", dppo.LOSSES, dppo.Loss),
    ):
        _check_name(cfg, name, table)
        entry = table[getattr(cfg, name)]
        if not isinstance(entry, kind):
            maker = "dppo.Rule" if kind is RULES else "dppo.Loss"
            wrong = f"the entry {getattr(cfg, name)!r} is a {type(entry).__name__}"
            raise InputError(f"{wrong}: give it to {maker}(..)")
    denominator = dppo.LOSSES[cfg.loss].denominator
    dppo.check_known(f"denominator (loss {cfg.loss!r})", denominator, dppo.DENOMINATORS)
    scale_rewards = dppo.LOSSES[cfg.loss].scale_rewards
    dppo.check_known(f"scale_rewards (loss {cfg.loss!r})", scale_rewards, dppo.SCALES)


def can_drop(rule: dppo.Rule | dppo.BiasedRule, prune_rate: float) -> bool:
    return prune_rate > 0 or rule.rate is None


def prunes_prompts(cfg: Config) -> bool:
    """Whether a resolved Config drops prompts at random, before rollout."""
    rule = sampler.PROMPT_RULES[cfg.prompt_rule]
    return cfg.prompt_rule != "none" and can_drop(rule, cfg.prompt_prune_rate)


def require(cfg: Config, name: str, good: bool, rule: str) -> None:
    """InputError if a value is not good; `rule` says what it must be."""
    if not good:
        raise InputError(f"{flag(name)} {getattr(cfg, name)}: must be {rule}")


def _check_values(cfg: Config) -> None:
    """Check each value by itself."""
    for level in ("prompt", "completion"):
        name = f"{level}_prune_rate"
        rate = getattr(cfg, name)
        limits = "at least 0 and below 1: at 1 nothing is kept, and no weight can mend it"
        require(cfg, name, 0 <= rate < 1, limits)
        rule = getattr(cfg, f"{level}_rule")
        table = sampler.PROMPT_RULES if level == "prompt" else dppo.COMPLETION_RULES
        without = f"--{level}-rule {rule} (--method {cfg.method}), which has no rate"
        if rule == "adaptive":
            without += " but --rest"
        has_rate = rate == 0 or table[rule].rate is not None
        require(cfg, name, has_rate, f"0 with {without}: choose another rule or method")
    counts = (
        "steps", "prompts_per_step", "minibatches", "max_new_tokens", "rollout_batch",
        "pack_tokens", "eval_problems",
    )  # fmt: skip
    for name in counts:
        require(cfg, name, getattr(cfg, name) >= 1, "at least 1")
    require(cfg, "group_size", cfg.group_size >= 2, "at least 2: a group of one has no advantage")
    for name in ("lr", "temperature", "rest"):
        require(cfg, name, 0 < getattr(cfg, name) < math.inf, "above 0 and finite")
    for name in ("beta", "warmup", "grad_clip", "eval_every", "save_every"):
        require(cfg, name, 0 <= getattr(cfg, name) < math.inf, "at least 0 and finite")
    good = 0 < cfg.eps_low < 1 or cfg.eps_low == dppo.LOSSES[cfg.loss].clip[0]  # cispo: 1
    require(cfg, "eps_low", good, "above 0 and below 1")
    cap = cfg.importance_cap
    correct = cap == 0 or 1 <= cap < math.inf
    require(cfg, "importance_cap", correct, "0 (no correction) or at least 1")
    good = cfg.vllm_memory is None or 0 < cfg.vllm_memory < 1
    require(cfg, "vllm_memory", good, "above 0 and below 1")
    good = cfg.lora == 0 or (cfg.lora > 0 and cfg.shard == "none")
    require(cfg, "lora", good, "at least 0, and 0 with --shard fsdp, which shards trained weights")
    require(cfg, "eps_high", 0 < cfg.eps_high < math.inf, "above 0")


def _check_updates(cfg: Config) -> None:
    """Check that each update of a step has prompts."""
    total = cfg.prompts_per_step
    divisor = f"a divisor of the step's {total} prompts, so that every update has the planned size"
    require(cfg, "minibatches", total % cfg.minibatches == 0, divisor)
    if cfg.prompt_rule == "uniform":
        each = total // cfg.minibatches
        some = round((1.0 - cfg.prompt_prune_rate) * each) > 0
        require(cfg, "prompt_prune_rate", some, f"lower: an update would keep 0 of {each} prompts")


def learning_rate(cfg: Config, step: int, highest: float) -> float:
    """Warm-up to `highest`, then --lr-schedule; a decay reaches almost 0 in the last step."""
    remaining = min(1.0, (cfg.steps + 1 - step) / max(1, cfg.steps + 1 - cfg.warmup))
    cosine = (1 - math.cos(math.pi * remaining)) / 2
    decay = {"constant": 1.0, "linear": remaining, "cosine": cosine}[cfg.lr_schedule]
    return highest * min(1.0, step / max(1, cfg.warmup)) * decay


def check_prompts(cfg: Config, prompts: int) -> None:
    """InputError if the data hold fewer prompts than a step needs."""
    needed = cfg.prompts_per_step
    if prompts < needed:
        left = f"the data hold only {prompts} without those held out"
        raise InputError(f"--prompts-per-step {needed}: {left}; lower it")


def warnings(cfg: Config) -> list[str]:
    """What may surprise a user of a resolved Config, above all a gradient that is not unbiased."""
    notes = []
    prompt_rule, completion_rule = rules_of(cfg)
    by_method = cfg.prompt_rule == prompt_rule and prunes_prompts(cfg)
    if by_method and cfg.completion_rule != completion_rule:
        notes.append(
            f"prompts are pruned, too: by {cfg.prompt_rule}, the prompt rule of --method "
            f"{cfg.method}; --prompt-rule none keeps all"
        )
    for level, table in (("completion", dppo.COMPLETION_RULES), ("prompt", sampler.PROMPT_RULES)):
        name = getattr(cfg, f"{level}_rule")
        rule, rate = table[name], getattr(cfg, f"{level}_prune_rate")
        if isinstance(rule, dppo.BiasedRule) and can_drop(rule, rate):
            notes.append(f"--{level}-rule {name} changes the expected gradient: {rule.biased}")
    if cfg.engine == "vllm" and cfg.completion_rule in ("pps", "adaptive"):
        notes.append(
            f"--engine vllm gives {cfg.completion_rule} an upper bound of each completion's size: "
            f"still unbiased, a little noisier"
        )
    if (cfg.lora or cfg.beta) and checkpoint.NUMBERED.fullmatch(Path(cfg.model).name):
        notes.append(f"{cfg.model} must stay: to resume this run, and for the adapters of --lora")
    if cfg.beta > 0 and cfg.completion_rule == "nonzero" and not cfg.mask_truncated:
        why = "the KL term is never exactly zero"
        notes.append(f"--completion-rule nonzero drops nothing with --beta above 0: {why}")
    tight = cfg.loss == "gspo" and cfg.eps_high < 1e-2
    if tight and cfg.dtype == "bfloat16" and not cfg.importance_cap:
        notes.append(
            f"--loss gspo clips at {cfg.eps_high:g}, and in bfloat16 sampler and trainer differ by "
            f"more: watch clip_ratio/region_mean. With --importance-cap above 0, ratios are taken "
            f"from the trainer's own log-probs"
        )
    return notes
