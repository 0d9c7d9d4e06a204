"""dppo_verl.py in verl's real trainer: Ray workers, FSDP2 on gloo, TransferQueue, on a CPU.

tests/verl.sh runs these, which takes an hour; without verl they are skipped.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
import pandas as pd

import data
from tasks import arithmetic

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAINER = {"trainer.v1.trainer_mode": "nanodppo"}
OPTION = "+trainer.v1.nanodppo."
NONE = TRAINER | {f"{OPTION}completion_rule": "none"}
ZERO = TRAINER | {f"{OPTION}completion_rule": "zero"}
HANG = 1500  # seconds
SETTINGS = {  # of the embedded task on a CPU; the data and the log are in the current folder
    "data.train_files": "train.parquet", "data.val_files": "train.parquet",
    "data.train_batch_size": 8, "data.max_prompt_length": 32, "data.max_response_length": 32,
    "data.seed": 0, "data.dataloader_num_workers": 0,
    "reward.custom_reward_function.path": __file__, "reward.num_workers": 1,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": arithmetic.BASE,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{ACTOR}.strategy": "fsdp2",
    f"+{ACTOR}.fsdp_config.mixed_precision":
        "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    f"{ACTOR}.use_torch_compile": False, f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
    f"{ACTOR}.optim.lr": 6e-4, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{ROLLOUT}.name": "cpu", f"{ROLLOUT}.n": 4, f"{ROLLOUT}.free_cache_engine": False,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096,
    f"{ROLLOUT}.calculate_log_probs": True, f"{ROLLOUT}.agent.num_workers": 1,
    f"{ROLLOUT}.agent.default_agent_loop": "plain", f"{ROLLOUT}.tensor_model_parallel_size": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "trainer.device": "cpu", "trainer.nnodes": 1, "trainer.default_local_dir": "checkpoints",
    "trainer.logger": "[file]", "trainer.val_before_train": False, "trainer.test_freq": -1,
    "ray_kwargs.ray_init.num_cpus": 16, "+ray_kwargs.ray_init.include_dashboard": False,
}  # fmt: skip


def compute_score(data_source, solution_str, ground_truth, **options):
    """The embedded task's reward, as verl calls it."""
    return data.reward_function("arithmetic")(solution_str, ground_truth)


def train(folder, changes, workers=1, steps=3):
    """verl's log of a run, or of what is left of it: a dict for each step."""
    folder.mkdir(exist_ok=True)
    problems = data.train_problems("arithmetic")[:64]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for text, answer in {problem.text: problem.answer for problem in problems}.items()
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    log = folder / f"log-{steps}.jsonl"
    sizes = {
        "trainer.n_gpus_per_node": workers, "+ray_kwargs.ray_init.num_gpus": workers,
        "trainer.total_training_steps": steps,
    }  # fmt: skip
    flags = [f"{name}={value}" for name, value in (SETTINGS | sizes | changes).items()]
    folders = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "tests" / "integrations")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders), "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_PATH": str(log), "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    with open(folder / "output.txt", "a") as output:
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *flags], cwd=folder, env=environment,
            stdout=output, stderr=output, timeout=HANG, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "output.txt").read_text()[-5000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def norms(rows):
    return [row["actor/grad_norm"] for row in rows]


@pytest.mark.parametrize("workers", [1, 2])
def test_none_and_zero_are_verls_trainer(tmp_path, workers):
    """Three steps. With both rules none, verl's gradient norms to the last digit. Without the
    completions whose advantage is 0, to 1e-5. Catches whatever the tests without Ray replace, a
    start that does not say that it prunes, and a figure that the page does not explain.

    Adam multiplies rounding errors in its first steps, hence a lower learning rate.
    """
    slow = {f"{ACTOR}.optim.lr": 1e-4}
    stock = train(tmp_path / "stock", slow, workers)
    none = train(tmp_path / "none", slow | NONE, workers)
    zero = train(tmp_path / "zero", slow | ZERO, workers)
    assert norms(none) == norms(stock)
    assert norms(zero) == pytest.approx(norms(stock), rel=1e-5)
    assert len(stock) == 3
    assert not any(name.startswith("dppo/") for row in none for name in row)
    for one, other in zip(zero, stock, strict=True):
        assert 0.1 < one["dppo/kept_tokens"] < 0.7
        assert one["critic/score/mean"] == other["critic/score/mean"], "of all rows"
        assert one["response_length/mean"] == other["response_length/mean"]
    page = (ROOT / "docs" / "other-trainers.md").read_text()
    explained = set(re.findall(r"^\| `(dppo/\w+)` \|", page, re.MULTILINE))
    logged = {name for name in zero[0] if name.startswith("dppo/")}
    assert logged == explained - {"dppo/kept_prompts", "dppo/reward"}
    said = "nanodppo: completion_rule=zero"
    assert [said in (tmp_path / x / "output.txt").read_text() for x in ("stock", "zero")] == [0, 1]


def test_resumed(tmp_path):
    """Two workers, two updates of a step, prompts and completions pruned, a KL loss; resumed after
    step 4: the draws of steps 5 and 6 are those of a run that went through. Catches a history that
    is forgotten and a draw that starts over."""
    options = TRAINER | {
        f"{OPTION}prompt_rule": "uniform", f"{OPTION}prompt_prune_rate": 0.4,
        f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.use_kl_loss": True, "trainer.save_freq": 2,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 4096,
    }  # fmt: skip
    whole = train(tmp_path / "whole", options, 2, steps=6)
    train(tmp_path / "broken", options, 2, steps=4)
    resumed = train(tmp_path / "broken", options, 2, steps=6)
    assert [row["training/global_step"] for row in resumed] == [5, 6]
    own = [name for name in whole[0] if name.startswith("dppo/")]
    assert len(own) == 6
    for one, other in zip(whole[4:], resumed, strict=True):
        for name in (*own, "actor/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    shares = [row["dppo/kept_prompts"] for row in whole]
    assert shares == [1.0] + [0.5] * 5, "of 4 candidates of an update, 2.4 are rounded to 2"
