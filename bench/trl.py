"""
TRL's GRPOTrainer on the embedded task, beside dppo_trl.DPPOTrainer and train.py: steps, work, and
the time to an accuracy.

    pip install -r requirements-trl.txt
    python -m bench trl --json runs/trl.json
"""

import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import transformers

import config
import data
import eval as evaluation
import models
from bench import JsonFile, run, sized, write_json
from dppo import seed_for
from runtime import log
from tasks import arithmetic

PPS = {"completion_rule": "pps", "completion_prune_rate": 0.7}
BOTH = PPS | {"prompt_rule": "uniform", "prompt_prune_rate": 0.6}
VARIANTS = {  # options of DPPOConfig, and how many times GRPO's prompts it considers in a step
    "TRL": (None, 1),
    "TRL, pps": (PPS, 1),
    "TRL, pps for prompts too": (BOTH, 2),  # 64 prompts, as sized("pps")
}
TIMED = ("grpo", "dppo", "pps")
GOAL = 0.9  # accuracy


def main(
    rounds: int = 4,
    steps: int = 6,
    micro_batches: tuple[int, ...] = (32, 128, 512),
    seeds: int = 3,
    json_file: JsonFile = None,
) -> None:
    """Time whole steps from the start of training, of TRL's GRPOTrainer, of DPPOTrainer and of
    train.py; and how long TRL with and without pruning needs to an accuracy.

    Base model, problems, reward, group size, lengths and learning rate are the same. Runs take
    turns; the first step of each does not count. DPPOTrainer has GRPOTrainer's best micro-batch.

    Args:
        rounds: runs of each trainer
        steps: steps of a run, all but the first of which are timed
        micro_batches: values of TRL's per_device_train_batch_size; a pilot run each finds the best
        seeds: runs of each of TRL's variants to an accuracy of 0.9 (avg@4 of 150 held-out problems,
            looked at every 3 of 60 steps); 0: none
        json_file: where to write the rows {trainer, seconds, ratio, ratio_low, ratio_high,
            all_seconds}; TRL's have the forwards and the token slots of a step's gradient, too
    """
    pilot = {size: statistics.median(trl_steps(size, steps, 0)[1:]) for size in micro_batches}
    best = min(pilot, key=pilot.get)
    rows = [
        {"trainer": f"TRL, pilot, micro-batches of {size}", "seconds": seconds}
        for size, seconds in pilot.items()
    ]
    work = {name: [] for name in VARIANTS}
    options = lambda name: {"variant": name, "work": work[name]}
    trainers = {name: functools.partial(trl_steps, best, **options(name)) for name in VARIANTS}
    trainers |= {method: functools.partial(our_steps, method) for method in TIMED}
    runs = {name: [] for name in trainers}
    for number, name in itertools.product(range(rounds), trainers):
        runs[name].append(trainers[name](steps, number)[1:])
    for name, times in runs.items():
        row = {"trainer": name} | compared(times, runs["TRL"])
        if work.get(name):
            forwards, slots = zip(*work[name], strict=True)
            row |= {"forwards": statistics.mean(forwards), "slots": statistics.mean(slots)}
        rows.append(row)
    arrivals = {name: [] for name in VARIANTS}
    for seed, name in itertools.product(range(seeds), VARIANTS):
        arrivals[name].append([arrival(name, seed, best)])
    for name, times in arrivals.items():
        if seeds:
            rows.append({"trainer": f"{name}, to {GOAL}"} | compared(times, arrivals["TRL"]))
    for row in rows:
        cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())
        print("  ".join(cells))
    write_json(json_file, rows)


def compared(times: list[list[float]], reference: list[list[float]]) -> dict:
    """Median seconds of all runs, and the ratio to the reference's run of the same number."""
    pairs = zip(times, reference, strict=True)
    ratios = sorted(statistics.median(own) / statistics.median(other) for own, other in pairs)
    return {
        "seconds": statistics.median(itertools.chain(*times)),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "all_seconds": times,
    }


def our_steps(method: str, steps: int, seed: int) -> list[float]:
    """Seconds of train.py's steps, each from the end of the one before; the first is unknown.

    A step ends when its rows are on disk.
    """
    ends, write = [], log.Log.write

    def timed(*args):
        write(*args)
        ends.append(time.perf_counter())

    with mock.patch.object(log.Log, "write", timed):
        run([*sized(method), "--steps", str(steps), "--seed", str(seed)])
    return [math.nan] + [end - start for start, end in itertools.pairwise(ends)]


def trl_steps(
    micro_batch: int,
    steps: int,
    seed: int,
    at_step: Callable | None = None,
    variant: str = "TRL",
    work: list | None = None,
) -> list[float]:
    """Seconds of TRL's steps, each from the end of the one before.

    at_step(model, step) is called after each step; if it returns True, training ends. Its own time
    does not count. `work` gets (forwards, token slots) of each step's gradient.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rules, times = VARIANTS[variant]
    config_class, trainer_class = GRPOConfig, GRPOTrainer
    if rules:
        sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # as if it were installed
        from dppo_trl import DPPOConfig, DPPOTrainer

        config_class, trainer_class = functools.partial(DPPOConfig, **rules), DPPOTrainer
    cfg = config.resolve(config.parse_config(sized("grpo")))
    base = str(arithmetic.BASE)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="left")
    problems = data.train_problems(cfg.data, hold_out=True)
    rows = [{"prompt": problem.text, "answer": problem.answer} for problem in problems]
    reward = data.reward_function(cfg.data)
    spent, gradient = [], [0, 0]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *args, **options):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, model, **options):
            spent.append(time.perf_counter() - self.began)
            if work is not None:
                work.append(tuple(gradient))
            control.should_training_stop |= bool(at_step and at_step(model, state.global_step))
            gradient[:] = [0, 0]
            self.began = time.perf_counter()

    def count(_model, _args, inputs):
        if torch.is_grad_enabled():
            gradient[:] = [gradient[0] + 1, gradient[1] + inputs["input_ids"].numel()]

    def score(completions, answer, **columns):
        return list(map(reward, completions, answer))

    with tempfile.TemporaryDirectory() as folder:
        options = config_class(
            output_dir=folder,
            max_steps=steps,
            seed=seed,
            use_cpu=cfg.device == "cpu",
            bf16=cfg.dtype == "bfloat16",
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=times
            * cfg.prompts_per_step
            * cfg.group_size
            // micro_batch,
            num_generations=cfg.group_size,
            max_completion_length=cfg.max_new_tokens,
            temperature=cfg.temperature,
            learning_rate=cfg.lr,
            lr_scheduler_type=cfg.lr_schedule,
            warmup_steps=cfg.warmup,
            max_grad_norm=cfg.grad_clip,
            loss_type="grpo",
            beta=0.0,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = trainer_class(
            model,
            score,
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        if work is not None:
            model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
    return spent


def arrival(variant: str, seed: int, micro_batch: int) -> float:
    """Seconds of training until the accuracy of 150 held-out problems reaches the goal; infinity if
    it does not in 60 steps."""
    cfg = config.resolve(config.parse_config(sized("grpo")))
    policy, tokenizer = models.load_policy(str(arithmetic.BASE), cfg.device)
    problems, prompt_ids = data.encode_prompts(data.eval_problems(cfg.data, 150), tokenizer, 400)
    sampling = models.sampling(policy, tokenizer, cfg.max_new_tokens)
    reward, seen = data.reward_function(cfg.data), [0.0]

    def at_step(model, step):
        if step % 3 == 0:
            model.vocab_size = len(tokenizer)
            args = (model, tokenizer, problems, prompt_ids, reward, sampling)
            draw = {"k": 4, "seed": seed_for(seed, step, "eval", 0)}
            rewards, _truncated = evaluation.sample_rewards(*args, **draw)
            seen.append(evaluation.avg_at_k(rewards))
        return seen[-1] >= GOAL

    times = trl_steps(micro_batch, 60, seed, at_step, variant)
    return sum(times) if seen[-1] >= GOAL else math.inf
