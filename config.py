"""
How the flags of train.py are read, their defaults, and the checks of their values.

A bad value raises an InputError that names the flag, the value and a remedy before anything is
loaded or written.
"""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import data
import dppo
import flags
import sampler
from flags import Config, flag
from runtime import InputError, checkpoint
from runtime.device import choose_device, choose_dtype

FREE_TO_CHANGE = (  # when a run is resumed: settings that are not part of the experiment
    "steps", "device", "vllm_memory", "rollout_batch", "pack_tokens", "gradient_checkpointing",
    "shard", "out_dir", "resume", "eval_every", "save_every", "track",
)  # fmt: skip


# ---------------------------------------------------------------------------- the command line


def parse_config(argv: list[str]) -> Config:
    """The Config of a command line. With --resume, the defaults are the settings of that run."""
    cfg = flags.read(Config, argv)
    stored = Path(cfg.out_dir) / "config.json"
    if cfg.resume and not stored.exists() and cfg == Config(resume=True, out_dir=cfg.out_dir):
        raise InputError(f"--resume: {cfg.out_dir} holds no run, and no flag says what to start")
    if cfg.resume and stored.exists():
        run = Config(**checkpoint.stored_config(stored.parent))
        run = replace(run, out_dir=cfg.out_dir, resume=True)  # the folder may have been moved
        free = {*FREE_TO_CHANGE}
        if run.lr_schedule != "constant":
            free -= {"steps"}  # the schedule would change
        if run.lora or run.beta:
            free |= {"model"}  # it may have moved: models.check_base compares the weights
        cfg = flags.read(Config, argv, default=run)
        for name, then in vars(run).items():
            if getattr(cfg, name) != then and name not in free:
                raise InputError(
                    f"{flag(name)} {getattr(cfg, name)}: the run in {cfg.out_dir} has {then}; "
                    f"leave it, or use another --out-dir"
                )
    return cfg


# ---------------------------------------------------------------------------- defaults and checks


def resolve(cfg: Config) -> Config:
    """Fill in the defaults that depend on other flags, then check every value."""
    device = choose_device(cfg.device)
    dtype = choose_dtype(cfg.dtype, device)
    tiny = cfg.model == "tiny"
    prompt_rule, completion_rule = rules_of(cfg)
    cfg = replace(
        cfg,
        loss=cfg.loss or ("dr_grpo" if tiny else "grpo"),
        prompt_rule=cfg.prompt_rule or prompt_rule,
        completion_rule=cfg.completion_rule or completion_rule,
    )
    loss = _entry(cfg, "loss", dppo.LOSSES)
    eps_low, eps_high = loss.clip
    # Engine and trainer round differently if they are different programs, and in bfloat16, where
    # the engine has a copy of the weights.
    rounds_differently = cfg.engine == "vllm" or dtype == "bfloat16"
    defaults = {
        "prompt_prune_rate": _entry(cfg, "prompt_rule", sampler.PROMPT_RULES).rate or 0.0,
        "prompts_per_step": 16 if tiny else 64,
        "completion_prune_rate": _entry(cfg, "completion_rule", dppo.COMPLETION_RULES).rate or 0.0,
        "rest": dppo.REST,
        "scale_rewards": loss.scale_rewards,
        "eps_low": eps_low,
        "eps_high": eps_high,
        "importance_cap": 2.0 if rounds_differently else 0.0,
        "max_new_tokens": max(map(data.max_new_tokens, (cfg.data, cfg.eval_data or cfg.data))),
        "lr": 6e-4 if tiny else 1e-6,
        "lr_schedule": "linear" if tiny else "constant",
        "pack_tokens": 2048 if device == "cpu" else 8192,
    }
    if cfg.lora:
        # Ten times the rate of all weights, at any rank, as Schulman et al. found (LoRA Without
        # Regret, 2025, thinkingmachines.ai/blog/lora). With tiny 3e-3 was the best of four rates;
        # at 6e-3 one run of five collapsed.
        defaults["lr"] = 3e-3 if tiny else 1e-5
    missing = {name: value for name, value in defaults.items() if getattr(cfg, name) is None}
    cfg = replace(cfg, device=device, dtype=dtype, **missing)
    _check_values(cfg)
    return cfg


def rules_of(cfg: Config) -> tuple[str, str]:
    """The prompt rule and the completion rule of --method, which has the name of one or both.
    Rivals are loaded if one is asked for; else the core has no need of them."""
    levels = (sampler.PROMPT_RULES, dppo.COMPLETION_RULES)
    asked = {cfg.method, cfg.prompt_rule, cfg.completion_rule} - {None, "grpo"}
    if not asked <= {*levels[0], *levels[1]}:
        importlib.import_module("related.rivals")  # adds its rules
    _entry(cfg, "method", {"grpo": None, **levels[0], **levels[1]})
    of_prompts, of_completions = (cfg.method if cfg.method in rules else "none" for rules in levels)
    return of_prompts, of_completions


def _entry(cfg: Config, name: str, table: dict):
    """What a flag's value names in its table. InputError if it names nothing."""
    value = getattr(cfg, name)
    known = f"one of {', '.join(table)}, unless the program that adds it is run"
    require(cfg, name, value in table, known)
    return table[value]


def can_drop(rule: dppo.Rule | dppo.BiasedRule, prune_rate: float) -> bool:
    return prune_rate > 0 or rule.rate is None


def prunes_prompts(cfg: Config) -> bool:
    """Whether a resolved Config drops prompts at random, before rollout."""
    rule = sampler.PROMPT_RULES[cfg.prompt_rule]
    return cfg.prompt_rule != "none" and can_drop(rule, cfg.prompt_prune_rate)


def require(cfg, name: str, good: bool, rule: str) -> None:
    """InputError if a value is not good; `rule` says what it must be."""
    if not good:
        raise InputError(f"{flag(name)} {getattr(cfg, name)}: must be {rule}")


def _check_values(cfg: Config) -> None:
    """InputError for a value that would be ignored, or train nothing or something else."""
    for level, table in (("prompt", sampler.PROMPT_RULES), ("completion", dppo.COMPLETION_RULES)):
        name, rule = f"{level}_prune_rate", getattr(cfg, f"{level}_rule")
        is_rule = isinstance(table[rule], (dppo.Rule, dppo.BiasedRule))  # others set their weights
        require(cfg, f"{level}_rule", is_rule, "a dppo.Rule or a dppo.BiasedRule")
        rate = getattr(cfg, name)
        limits = "at least 0 and below 1: at 1 nothing is kept, and no weight can mend it"
        require(cfg, name, 0 <= rate < 1, limits)
        without = f"0 with --{level}-rule {rule}, which has no rate"
        require(cfg, name, rate == 0 or table[rule].rate is not None, without)
    for name in (
        "steps", "prompts_per_step", "minibatches", "max_new_tokens", "rollout_batch",
        "pack_tokens", "eval_problems",
    ):  # fmt: skip
        require(cfg, name, getattr(cfg, name) >= 1, "at least 1")
    for name in ("lr", "temperature", "rest", "eps_high"):
        require(cfg, name, 0 < getattr(cfg, name) < math.inf, "above 0 and finite")
    for name in ("beta", "warmup", "grad_clip", "eval_every", "save_every"):
        require(cfg, name, 0 <= getattr(cfg, name) < math.inf, "at least 0 and finite")
    require(cfg, "group_size", cfg.group_size >= 2, "at least 2: a group of one has no advantage")
    good = 0 < cfg.eps_low < 1 or cfg.eps_low == dppo.LOSSES[cfg.loss].clip[0]  # cispo: 1
    require(cfg, "eps_low", good, "above 0 and below 1")
    cap = cfg.importance_cap
    correct = cap == 0 or 1 <= cap < math.inf
    require(cfg, "importance_cap", correct, "0 (no correction) or at least 1")
    good = cfg.lora == 0 or (cfg.lora > 0 and cfg.shard == "none")
    require(cfg, "lora", good, "at least 0, and 0 with --shard fsdp, which shards trained weights")
    total = cfg.prompts_per_step
    divisor = f"a divisor of the step's {total} prompts, so that every update has the planned size"
    require(cfg, "minibatches", total % cfg.minibatches == 0, divisor)
    if cfg.prompt_rule == "uniform":
        each = total // cfg.minibatches
        some = round((1.0 - cfg.prompt_prune_rate) * each) > 0
        require(cfg, "prompt_prune_rate", some, f"lower: an update would keep 0 of {each} prompts")


def check_prompts(cfg: Config, prompts: int) -> None:
    """InputError if the data hold fewer prompts than a step needs."""
    few = f"at most {prompts}, which is all that the data hold without those held out"
    require(cfg, "prompts_per_step", prompts >= cfg.prompts_per_step, few)


def learning_rate(cfg: Config, step: int, highest: float) -> float:
    """Warm-up to `highest`, then --lr-schedule; a decay reaches almost 0 in the last step."""
    remaining = min(1.0, (cfg.steps + 1 - step) / max(1, cfg.steps + 1 - cfg.warmup))
    cosine = (1 - math.cos(math.pi * remaining)) / 2
    decay = {"constant": 1.0, "linear": remaining, "cosine": cosine}[cfg.lr_schedule]
    return highest * min(1.0, step / max(1, cfg.warmup)) * decay


def warnings(cfg: Config) -> list[str]:
    """What may surprise a user of a resolved Config, above all a gradient that is not unbiased."""
    notes = []
    for level, table in (("completion", dppo.COMPLETION_RULES), ("prompt", sampler.PROMPT_RULES)):
        name = getattr(cfg, f"{level}_rule")
        rule, rate = table[name], getattr(cfg, f"{level}_prune_rate")
        if isinstance(rule, dppo.BiasedRule) and can_drop(rule, rate):
            notes.append(f"--{level}-rule {name} changes the expected gradient: {rule.biased}")
    if (cfg.lora or cfg.beta) and checkpoint.NUMBERED.fullmatch(Path(cfg.model).name):
        notes.append(f"{cfg.model} must stay: to resume this run, and for the adapters of --lora")
    return notes
