"""Runs of verl's main_ppo on the embedded task, on a CPU, for test_verl_ray.py. It does not import
verl."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def settings(model, folder, workers=1):
    """verl's options for the embedded task on a CPU."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "data.train_files": f"{folder}/train.parquet", "data.val_files": f"{folder}/val.parquet",
        "data.train_batch_size": 8, "data.max_prompt_length": 32, "data.max_response_length": 32,
        "data.seed": 0, "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": __file__,
        "reward.num_workers": 1,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2", f"+{actor}.fsdp_config.mixed_precision": FLOAT32,
        f"{actor}.use_torch_compile": False, f"{actor}.ppo_mini_batch_size": 8,
        f"{actor}.use_dynamic_bsz": True, f"{actor}.ppo_max_token_len_per_gpu": 4096,
        f"{actor}.optim.lr": 6e-4, f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{rollout}.name": "cpu", f"{rollout}.n": 4, f"{rollout}.free_cache_engine": False,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": 4096,
        f"{rollout}.calculate_log_probs": True, f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.default_agent_loop": "plain",
        f"{rollout}.tensor_model_parallel_size": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu", "trainer.n_gpus_per_node": workers, "trainer.nnodes": 1,
        "trainer.logger": "[file]", "trainer.val_before_train": False, "trainer.test_freq": -1,
        "trainer.total_training_steps": 3, "trainer.default_local_dir": f"{folder}/checkpoints",
        "ray_kwargs.ray_init.num_cpus": 16, "+ray_kwargs.ray_init.num_gpus": workers,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }  # fmt: skip


def compute_score(data_source, solution_str, ground_truth, **options):
    """The embedded task's reward, as verl calls it."""
    import data

    return data.reward_function("arithmetic")(solution_str, ground_truth)


def start(model, folder, changes, workers=1, **environment):
    """A Popen of verl's main_ppo, with the embedded task's data in `folder`."""
    options = settings(model, folder, workers) | changes
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{name}={value}" for name, value in options.items()]
    folders = [str(ROOT / name) for name in ("", "integrations", "tests/integrations")]
    paths = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": paths, "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_PATH": f"{folder}/log.jsonl", "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore",
    } | environment  # fmt: skip
    with open(Path(folder, "output.txt"), "a") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)


def stop(process):
    """Kills a run and what it has started, Ray's processes included, unless it has ended."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def log(folder, name="log.jsonl"):
    """verl's log, a dict for each step."""
    path = Path(folder, name)
    rows = path.read_text().splitlines() if path.exists() else []
    return [json.loads(row)["data"] for row in rows]


def write_data(folder, problems):
    """The embedded task as parquet, the way verl reads it, and each prompt once."""
    import pandas as pd

    problems = list({problem.text: problem for problem in problems}.values())
    for name, split in (("train", problems), ("val", problems[:4])):
        rows = [
            {
                "prompt": [{"role": "user", "content": problem.text}],
                "data_source": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"index": i},
            }
            for i, problem in enumerate(split)
        ]
        pd.DataFrame(rows).to_parquet(Path(folder, f"{name}.parquet"))
