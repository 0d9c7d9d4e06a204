"""
The seconds of a step of TRL's GRPOTrainer, of dppo_trl.DPPOTrainer and of train.py on the embedded
task.

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
from pathlib import Path
from unittest import mock

import torch
import transformers

import config
import data
from bench import JsonFile, run, sized, write_json
from runtime import log
from tasks import arithmetic

PPS = {"completion_rule": "pps", "completion_prune_rate": 0.7}
BOTH = PPS | {"prompt_rule": "uniform", "prompt_prune_rate": 0.6}
VARIANTS = {  # options of DPPOConfig, and how many times GRPO's prompts it considers in a step
    "TRL": (None, 1),
    "TRL, pps": (PPS, 1),
    "TRL, pps for prompts too": (BOTH, 2),  # 64 prompts, as sized("pps")
}
METHODS = ("grpo", "dppo", "pps")  # of train.py


def main(
    rounds: int = 4, steps: int = 6, micro_batch: int = 32, json_file: JsonFile = None
) -> None:
    """Time whole steps from the start of training.

    Base model, problems, reward, group size, lengths and learning rate are the same. Runs take
    turns; the first step of each does not count.

    Args:
        rounds: runs of each trainer
        steps: steps of a run, all but the first of which are timed
        micro_batch: TRL's per_device_train_batch_size; 32 was faster than 128 and 512
        json_file: where to write the rows {trainer, seconds, ratio, ratio_low, ratio_high,
            all_seconds}
    """
    trainers = {name: functools.partial(trl_steps, name, micro_batch) for name in VARIANTS}
    trainers |= {method: functools.partial(our_steps, method) for method in METHODS}
    times = {name: [] for name in trainers}
    for number, name in itertools.product(range(rounds), trainers):
        times[name].append(trainers[name](steps, number)[1:])
    rows = [{"trainer": name} | compared(times[name], times["TRL"]) for name in times]
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


def trl_steps(variant: str, micro_batch: int, steps: int, seed: int) -> list[float]:
    """Seconds of TRL's steps, each from the end of the one before."""
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
    problems = data.train_problems(cfg.data, hold_out=True)
    reward = data.reward_function(cfg.data)
    ends = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **options):
            ends.append(time.perf_counter())

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
        trainer_class(
            transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            score,
            args=options,
            train_dataset=Dataset.from_list(
                [{"prompt": problem.text, "answer": problem.answer} for problem in problems]
            ),
            processing_class=transformers.AutoTokenizer.from_pretrained(base, padding_side="left"),
            callbacks=[Clock()],
        ).train()
    return [math.nan] + [end - start for start, end in itertools.pairwise(ends)]
