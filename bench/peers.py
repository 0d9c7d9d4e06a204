"""
How long an accuracy takes with TRL, and with train.py, on one core.

    pip install -r requirements-trl.txt
    PYTHONPATH=integrations python -m bench peers

All runs have the same task, model, completions a step, loss, optimizer, schedule and evaluation.
TRL's are tuned: one micro-batch for GRPOTrainer and four for DPPOTrainer, fused AdamW, no tracker.
Seconds are CPU time of the loop without evaluation. The same command resumes after a stop.
"""

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import config
import train
from bench import JsonFile, made_by
from runtime import log, timer

ARMS = {  # options of DPPOConfig, or of GRPOConfig if there are none; or flags of train.py
    "TRL": {},
    "TRL, DPPOTrainer, nonzero": {"completion_rule": "nonzero"},
    "TRL, DPPOTrainer": {"completion_rule": "adaptive"},
    "train.py, grpo": "--method grpo",
    "train.py, nonzero": "--method nonzero",
    "train.py": "--method adaptive",
}
COMPLETIONS, STEPS, EVERY, PROBLEMS = 128, 100, 10, 150  # evaluated every 10 steps, on 150 problems
FLAGS = f"--steps {STEPS} --loss dr_grpo --lr 6e-4 --lr-schedule linear --save-every 0"
ROWS = Path("runs/peers.jsonl")


def main(
    arms: tuple[str, ...] = tuple(ARMS),
    group_size: int = 8,
    seeds: int = 5,
    json_file: JsonFile = ROWS,
) -> None:
    """Train all arms; `python -m bench results` shows the rows.

    Args:
        arms: names of ARMS
        group_size: completions of a prompt; a step has 128 of all prompts
        seeds: of each arm
    """
    rows = log.cut_rows(json_file, lambda row: True)  # without a half-written line
    for seed in range(seeds):
        for arm in arms if seed % 2 else arms[::-1]:
            run = {"arm": arm, "group_size": group_size, "seed": seed}
            if not any(run.items() <= row.items() for row in rows):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    row = pool.submit(make_one, run).result()
                log.append_rows(json_file, [row])
                print(f"{arm}, seed {seed}: {row['curve']}", flush=True)


def make_one(run: dict) -> dict:
    """The row of a run that is made here; its curve is [[step, accuracy, seconds], ..]."""
    torch.set_num_threads(1)
    options, size = ARMS[run["arm"]], run["group_size"]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{FLAGS} --prompts-per-step {COMPLETIONS // size} --group-size {size}"
        flags += f" --seed {run['seed']} --out-dir {folder}/out"
        if isinstance(options, str):
            curve, rest = run_ours(config.parse_config(f"{flags} {options}".split()))
        else:
            curve, rest = run_trl(config.parse_config(flags.split()), options, folder)
    return run | {"rest": rest, "curve": curve} | made_by()


class Watch:
    """The curve of a run, and a clock of CPU seconds that stands still while it is evaluated."""

    curve, started, preparing = (), 0.0, 0.0

    def see(self, step: int, judge: train.Trainer) -> dict:  # before the first step, and after each
        now = time.process_time()
        if step == 0:
            self.started = now
        elif step % EVERY == 0:
            accuracy = round(judge.accuracy(PROBLEMS, "final"), 5)
            self.curve += ([step, accuracy, round(now - self.started, 3)],)
            self.started += time.process_time() - now
        return {}


def run_ours(cfg: config.Config) -> tuple[list, float]:
    """(curve, rest) of train.py."""
    watch = Watch()

    class Watched(train.Trainer):
        def evaluate(self, step):
            return watch.see(step, self)

    train.run(Watched(cfg))
    return watch.curve, timer.measured_rest(log.read_rows(Path(cfg.out_dir, "log.jsonl"))[1:])


def run_trl(cfg: config.Config, options: dict, folder: str) -> tuple[list, float]:
    """(curve, rest) of TRL's GRPOTrainer; (curve, None) of DPPOTrainer, if it has options."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from dppo_trl import DPPOConfig, DPPOTrainer

    judge, watch = train.Trainer(cfg), Watch()  # of the same problems and reward; it evaluates
    cfg = judge.cfg
    problems = [{"prompt": problem.text, "answer": problem.answer} for problem in judge.train_set]
    tiny = Path(train.__file__).parent / "tasks" / "arithmetic-base"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny, padding_side="left")
    adamw = torch.optim.AdamW(model.parameters(), cfg.lr, (0.9, 0.95), weight_decay=0.0, fused=True)
    rate = lambda done: config.learning_rate(cfg, done + 1, 1.0)
    micro = COMPLETIONS // 4 if options else COMPLETIONS
    args = (DPPOConfig if options else GRPOConfig)(
        output_dir=f"{folder}/trl", max_steps=STEPS, seed=cfg.seed, max_grad_norm=cfg.grad_clip,
        per_device_train_batch_size=micro, gradient_accumulation_steps=COMPLETIONS // micro,
        num_generations=cfg.group_size, max_completion_length=cfg.max_new_tokens,
        loss_type="dr_grpo", scale_rewards="none", beta=0.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        **options,
    )  # fmt: skip

    class Timed(DPPOTrainer if options else GRPOTrainer):
        def _prepare_inputs(self, inputs):  # all of a step but training
            watch.preparing -= time.process_time()
            found = super()._prepare_inputs(inputs)
            watch.preparing += time.process_time()
            return found

    class Watching(transformers.TrainerCallback):
        def on_step_end(self, _args, state, *_others, **_options):
            judge.model.load_state_dict(model.state_dict())
            watch.see(state.global_step, judge)

        on_train_begin = on_step_end

    Timed(
        model, lambda completions, answer, **_others: list(map(judge.reward, completions, answer)),
        args=args, train_dataset=Dataset.from_list(problems), processing_class=tokenizer,
        callbacks=[Watching()], optimizers=(adamw, torch.optim.lr_scheduler.LambdaLR(adamw, rate)),
    ).train()  # fmt: skip
    rest = watch.preparing / (watch.curve[-1][-1] - watch.preparing)
    return watch.curve, None if options else rest  # a pruned step does not show it
