"""
TRL's GRPOTrainer on the embedded task: its steps timed beside train.py's, and whole runs for the race.

    pip install -r requirements-trl.txt
    python bench.py trl --json runs/trl.json
    python bench.py race --methods trl,grpo,pps --seeds 1
"""

import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import transformers
import tyro

import arithmetic
import config
import data
import eval as evaluation
import log
import rollout
import train
from sampler import seed_for

TIMED = ("grpo", "dppo", "pps")
MICRO_BATCH = 32  # the fastest of `bench.py trl` on 2 cores


def main(
    rounds: int = 4,
    steps: int = 6,
    micro_batches: tuple[int, ...] = (32, 128, 512),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Whole steps of TRL's GRPOTrainer and of train.py: same base model, problems, reward, group size, lengths and
    learning rate, from the start of training. Runs alternate; the first step of each is left out.

    Args:
        rounds: runs of each
        steps: steps of a run, of which all but the first are timed
        micro_batches: TRL's per_device_train_batch_size; a pilot run of each finds the best
        json_file: where to write the rows {trainer, seconds, ratio, ratio_low, ratio_high, all_seconds}
    """
    pilot = {size: statistics.median(trl_steps(size, steps, 0)[1:]) for size in micro_batches}
    best = min(pilot, key=pilot.get)
    trainers = {"TRL": lambda *words: trl_steps(best, *words)[1:]}
    trainers |= {method: functools.partial(_our_steps, method) for method in TIMED}
    runs = {name: [] for name in trainers}
    for number, name in itertools.product(range(rounds), trainers):
        runs[name].append(trainers[name](steps, number))
    rows = [{"trainer": f"TRL, pilot, micro-batches of {size}", "seconds": seconds} for size, seconds in pilot.items()]
    for name, times in runs.items():
        pairs = zip(times, runs["TRL"], strict=True)
        ratios = sorted(statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs)
        seconds = statistics.median(itertools.chain(*times))
        rows.append({"trainer": name, "seconds": seconds, "ratio": statistics.median(ratios), "ratio_low": ratios[0],
                     "ratio_high": ratios[-1], "all_seconds": times})  # fmt: skip
    for row in rows:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1) + "\n")


def _our_steps(method: str, steps: int, seed: int) -> list[float]:
    """Seconds of train.py's steps but the first, each from the end of the one before, log and all."""
    ends, line = [], log.console_line
    log.console_line = lambda *words: ends.append(time.perf_counter()) or line(*words)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--method", method, "--steps", str(steps), "--seed", str(seed), "--out-dir", f"{folder}/run"]
        train.main(config.parse_config([*words, "--eval-every", "0", "--save-every", "0"]))
    log.console_line = line
    return [end - start for start, end in itertools.pairwise(ends)]


def trl_steps(
    micro_batch: int, steps: int, seed: int, lr: float | None = None, at_step: Callable | None = None
) -> list[float]:
    """Seconds of TRL's steps, each from the end of the one before. at_step(model, step, seconds, tokens generated) is
    called before step 1, as step 0, and after each, outside of them. `lr`: None for train.py's."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    cfg = config.resolve(config.Config(method="grpo"))  # the prompts of a step are GRPO's
    base = str(arithmetic.base_folder())
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="left")
    problems, reward = data.train_problems(cfg.data, hold_out=True), data.reward_function(cfg.data)
    table = Dataset.from_list([{"prompt": problem.text, "gold": problem.answer} for problem in problems])
    spent, generated, sequences = [], [0], cfg.prompts_per_step * cfg.group_size

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *words, **options):
            spent.append(0.0)
            self.next(model, 0)

        def on_step_end(self, args, state, control, model, **options):
            spent.append(time.perf_counter() - self.began)
            self.next(model, state.global_step)

        def next(self, model, step):
            if at_step:
                at_step(model, step, spent[-1], generated[0])
            self.began, generated[0] = time.perf_counter(), 0

    def judge(completions, completion_ids, gold, **columns):
        generated[0] += sum(map(len, completion_ids))
        return [reward(completion, answer) for completion, answer in zip(completions, gold, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=steps, seed=seed, use_cpu=cfg.device == "cpu", bf16=cfg.dtype == "bfloat16",
            per_device_train_batch_size=micro_batch, gradient_accumulation_steps=sequences // micro_batch,
            num_generations=cfg.group_size, max_completion_length=cfg.max_new_tokens, temperature=cfg.temperature,
            learning_rate=lr or cfg.lr, lr_scheduler_type=cfg.lr_schedule, warmup_steps=cfg.warmup,
            max_grad_norm=cfg.grad_clip, loss_type="grpo", beta=0.0, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, judge, args=arguments, train_dataset=table, processing_class=tokenizer, callbacks=[Clock()]
        )
        trainer.train()
    return spent[1:]


def curve(
    steps: int, seed: int, lr: float | None, every: int, eval_data: str, eval_problems: int
) -> tuple[config.Config, list[dict]]:
    """The configuration and the log's rows, as train.py has them, of one run of TRL's trainer."""
    cfg = config.resolve(config.Config(method="grpo", lr=lr, seed=seed, steps=steps))
    _, tokenizer = rollout.load_policy(str(arithmetic.base_folder()), cfg.device)
    problems, prompt_ids = data.encode_prompts(data.eval_problems(eval_data, eval_problems), tokenizer, 400)
    sampling = rollout.Sampling(cfg.max_new_tokens, [tokenizer.eos_token_id], tokenizer.pad_token_id)
    reward, rows = data.reward_function(eval_data), []

    def at_step(model, step, seconds, generated):
        row = {"step": step, "step_time": seconds, "tokens/generated": generated, "tokens/trained": generated}
        if step % every == 0 or step == steps:
            model.vocab_size = len(tokenizer)
            score = evaluation.sample_rewards(
                model, tokenizer, problems, prompt_ids, reward, sampling, k=4, seed=seed_for(seed, step, "eval", 0)
            )
            row["eval/avg@4"] = evaluation.avg_at_k(score[0])
        rows.append(row)

    trl_steps(MICRO_BATCH, steps, seed, cfg.lr, at_step)
    return cfg, rows
