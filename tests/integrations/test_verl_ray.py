"""dppo_verl.py in verl's real trainer: Ray workers, FSDP2 on gloo, TransferQueue, on a CPU. The
runs are of verl's main_ppo on the embedded task; verl_cpu.py has what they need on a CPU.

tests/verl.sh runs these, which takes an hour; without verl they are skipped.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
pytest.importorskip("ray")
import pandas as pd
import psutil

import data
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
SETTINGS = {
    "data.train_batch_size": 8, "data.max_prompt_length": 32, "data.max_response_length": 32,
    "data.seed": 0, "data.dataloader_num_workers": 0,
    "reward.custom_reward_function.path": f"{ROOT}/tests/integrations/verl_reward.py",
    "reward.num_workers": 1,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": arithmetic.BASE,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{ACTOR}.strategy": "fsdp2", f"+{ACTOR}.fsdp_config.mixed_precision": FLOAT32,
    f"{ACTOR}.use_torch_compile": False, f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
    f"{ACTOR}.optim.lr": 6e-4, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ROLLOUT}.name": "cpu", f"{ROLLOUT}.n": 4, f"{ROLLOUT}.free_cache_engine": False,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096,
    f"{ROLLOUT}.calculate_log_probs": True, f"{ROLLOUT}.agent.num_workers": 1,
    f"{ROLLOUT}.agent.default_agent_loop": "plain",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu", "trainer.nnodes": 1, "trainer.logger": "[file]",
    "trainer.val_before_train": False, "trainer.test_freq": -1,
    "trainer.total_training_steps": 3,
    "ray_kwargs.ray_init.num_cpus": 16, "+ray_kwargs.ray_init.include_dashboard": False,
}  # fmt: skip
TRAINER = {"trainer.v1.trainer_mode": "nanodppo"}
OPTION = "+trainer.v1.nanodppo."
NONE = TRAINER | {f"{OPTION}completion_rule": "none"}
ZERO = TRAINER | {f"{OPTION}completion_rule": "zero"}
HANG = 1500  # seconds


def write_data(folder):
    """64 problems of the embedded task as parquet, the way verl reads it, and each prompt once."""
    problems = data.train_problems("arithmetic", hold_out=True)[:64]
    problems = list({problem.text: problem for problem in problems}.values())
    rows = [
        {
            "prompt": [{"role": "user", "content": problem.text}],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": i},
        }
        for i, problem in enumerate(problems)
    ]
    pd.DataFrame(rows).to_parquet(folder / "problems.parquet")


def start(folder, log, changes, workers):
    """A process of verl's main_ppo."""
    options = SETTINGS | {
        "data.train_files": folder / "problems.parquet",
        "data.val_files": folder / "problems.parquet",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.n_gpus_per_node": workers,
        "+ray_kwargs.ray_init.num_gpus": workers,
    } | changes  # fmt: skip
    folders = [str(ROOT / name) for name in ("", "integrations", "tests/integrations")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": str(log),
        "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{name}={value}" for name, value in options.items()]
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)


def kill(process):
    """kill -9 of a run and of what it has started, Ray's processes included."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def train(folder, changes, workers=1, log="log.jsonl", until=None):
    """verl's log of a run to its end, or until it has logged that many steps; then kill -9."""
    folder.mkdir(exist_ok=True)
    write_data(folder)
    path = folder / log
    lines = lambda: path.read_text().splitlines() if path.exists() else []
    process, started = start(folder, path, changes, workers), time.time()
    while process.poll() is None and (until is None or len(lines()) < until):
        time.sleep(0.5)
        assert time.time() < started + HANG
    if until is None:
        assert process.returncode == 0, (folder / "output.txt").read_text()[-5000:]
    else:
        kill(process)
    return [json.loads(line)["data"] for line in lines()]


def norms(rows):
    return [row["actor/grad_norm"] for row in rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_none_and_zero_are_verls_trainer(tmp_path, workers):
    """Three steps. With both rules none, verl's gradient norms to the last digit. Without the
    completions whose advantage is 0, to 1e-5. Catches whatever the tests without Ray replace.

    Adam multiplies rounding errors in its first steps, hence a lower learning rate.
    """
    slow = {f"{ACTOR}.optim.lr": 1e-4}
    stock = train(tmp_path / "stock", slow, workers)
    none = train(tmp_path / "none", slow | NONE, workers)
    zero = train(tmp_path / "zero", slow | ZERO, workers)
    print([norms(rows) for rows in (stock, none, zero)], [x["dppo/kept_tokens"] for x in zero])
    assert norms(none) == norms(stock)
    assert norms(zero) == pytest.approx(norms(stock), rel=1e-5)
    assert len(stock) == 3
    assert not any(name.startswith("dppo/") for row in none for name in row)
    for one, other in zip(zero, stock, strict=True):
        assert 0.1 < one["dppo/kept_tokens"] < 0.7
        assert one["critic/score/mean"] == other["critic/score/mean"], "of all rows"
        assert one["response_length/mean"] == other["response_length/mean"]


def test_killed_and_resumed(tmp_path):
    """Two workers, two updates of a step, prompts and completions pruned, a KL loss; kill -9 after
    five steps, resumed from the checkpoint of step 4: the draws of steps 5 and 6 are those of a run
    that went through. The run says at its start that it prunes, and the page explains its log.

    Catches a history that is forgotten and a draw that starts over.
    """
    options = TRAINER | {
        f"{OPTION}prompt_rule": "uniform", f"{OPTION}prompt_prune_rate": 0.4,
        f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.use_kl_loss": True, "trainer.total_training_steps": 6, "trainer.save_freq": 2,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 4096,
    }  # fmt: skip
    whole = train(tmp_path / "whole", options, 2)
    broken = train(tmp_path / "broken", options, 2, until=5)
    resumed = train(tmp_path / "broken", options, 2, log="resumed.jsonl")
    assert [row["training/global_step"] for row in resumed] == [5, 6]
    own = {name for name in whole[0] if name.startswith("dppo/")}
    figures = lambda row: {name: row[name] for name in [*own, "actor/grad_norm"]}
    print([*map(figures, whole)], [*map(figures, resumed)])
    for one, other in ((whole[4], broken[4]), (whole[4], resumed[0]), (whole[5], resumed[1])):
        assert figures(one) == pytest.approx(figures(other), rel=1e-4)
    shares = [row["dppo/kept_prompts"] for row in whole]
    assert shares == [1.0] + [0.5] * 5, "of 4 candidates of an update, 2.4 are rounded to 2"

    said = (tmp_path / "whole" / "output.txt").read_text()
    assert "nanodppo: completion_rule=pps, " in said
    page = (ROOT / "docs" / "other-trainers.md").read_text()
    assert own == set(re.findall(r"^\| `(dppo/\w+)` \|", page, re.MULTILINE))
