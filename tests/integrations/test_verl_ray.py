"""dppo_verl.py in verl's real trainer: Ray workers, FSDP2 on gloo, TransferQueue, on a CPU.

tests/verl.sh runs these, which takes an hour; without verl they are skipped.
"""

import importlib
import re
import time

import pytest

pytest.importorskip("verl", reason="tests/verl.sh runs these, with verl")
pytest.importorskip("ray")
runs = importlib.import_module("verl_runs")
import data  # noqa: E402
from tasks import arithmetic  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
TRAINER = {"trainer.v1.trainer_mode": "nanodppo"}
OPTION = "+trainer.v1.nanodppo."
NONE = TRAINER | {f"{OPTION}completion_rule": "none"}
ZERO = TRAINER | {f"{OPTION}completion_rule": "zero"}
HANG = 1500  # seconds


def train(folder, changes, workers=1, prompts=64, log="log.jsonl", until=None, **environment):
    """verl's log of a run to its end, or until it has logged that many steps; then kill -9."""
    folder.mkdir(exist_ok=True)
    runs.write_data(folder, data.train_problems("arithmetic")[:prompts])
    environment["VERL_FILE_LOGGER_PATH"] = str(folder / log)
    base = arithmetic.BASE
    process, started = runs.start(base, folder, changes, workers, **environment), time.time()
    while process.poll() is None and (until is None or len(runs.log(folder, log)) < until):
        time.sleep(0.5)
        assert time.time() < started + HANG
    if until is None:
        assert process.returncode == 0, (folder / "output.txt").read_text()[-5000:]
    else:
        runs.stop(process)
    return runs.log(folder, log)


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
    print([norms(rows) for rows in (stock, none, zero)], [x["dppo/kept_tokens"] for x in zero])
    assert norms(none) == norms(stock)
    assert norms(zero) == pytest.approx(norms(stock), rel=1e-5)
    assert len(stock) == 3
    assert not any(name.startswith("dppo/") for row in none for name in row)
    for one, other in zip(zero, stock, strict=True):
        assert 0.1 < one["dppo/kept_tokens"] < 0.7
        assert one["critic/score/mean"] == other["critic/score/mean"], "of all rows"
        assert one["response_length/mean"] == other["response_length/mean"]
    page = (runs.ROOT / "docs" / "other-trainers.md").read_text()
    explained = set(re.findall(r"^\| `(dppo/\w+)` \|", page, re.MULTILINE))
    logged = {name for name in zero[0] if name.startswith("dppo/")}
    assert logged == explained - {"dppo/kept_prompts", "dppo/reward"}
    said = "nanodppo: completion_rule=zero"
    assert [said in (tmp_path / x / "output.txt").read_text() for x in ("stock", "zero")] == [0, 1]


def test_killed_and_resumed(tmp_path):
    """Two workers, two updates of a step, prompts and completions pruned, a KL loss; kill -9 after
    five steps, resumed from the checkpoint of step 4: the draws of steps 5 and 6 are those of a run
    that went through. Catches a history that is forgotten and a draw that starts over."""
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
    own = [name for name in whole[0] if name.startswith("dppo/")]
    assert len(own) == 6
    figures = lambda rows: [[row[name] for name in [*own, "actor/grad_norm"]] for row in rows]
    print(figures(whole), figures(resumed))
    for one, other in zip(whole[4:], resumed, strict=True):
        assert figures([one])[0] == pytest.approx(figures([other])[0], rel=1e-4)
    assert figures(whole)[4] == pytest.approx(figures(broken)[4], rel=1e-4)
    shares = [row["dppo/kept_prompts"] for row in whole]
    assert shares == [1.0] + [0.5] * 5, "of 4 candidates of an update, 2.4 are rounded to 2"
