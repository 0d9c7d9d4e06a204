"""dppo_trl.py on one process: micro-batches, whole runs. test_exact.py has what every trainer must
do; .ci/run runs the program of the page.
"""

import re
from unittest import mock

import peft
import pytest
import torch
from exact import assert_same_history, over_completions
from toy import ROOT

from dppo import RuleError
from proof import relative_error

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
import trl
import trl_toy
from trl_toy import Toy, make


def test_evaluation_is_grpos():
    """Nothing is drawn while TRL evaluates. Catches a wrapper that forgets to ask."""
    trainer = Toy(prompt_rule="uniform").trainer
    trainer.model.eval()
    with trl_toy.exact_world():
        rows = trainer._prepare_inputs([{"prompt": "a"}] * 4)
    assert len(rows["completion_ids"]) == 4
    assert "multiplier" not in rows


def test_dropped_rows_are_not_forwarded():
    """The rows that a gradient is taken of are those that were kept, in the fewest micro-batches
    and without padding that all of them share. Catches work that is only masked."""
    toy, forwards = Toy(loss_type="grpo", completion_prune_rate=0.6), []

    def record(_model, _args, options):
        if torch.is_grad_enabled():
            forwards.append(options["attention_mask"])

    toy.trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    toy.gradient()
    rows, plan = sum(map(len, forwards)), toy.plan()
    assert rows == sum(len(x["multiplier"]) for x in plan) < 16
    assert len(forwards) == len(plan) == -(-rows // 4)
    assert toy.trainer.plan[: 4 - len(plan)] == [None] * (4 - len(plan))
    assert all(mask.any(dim=0).all() for mask in forwards)
    lengths = [int(mask.sum()) for x in forwards for mask in x]
    assert lengths == sorted(lengths)
    assert toy.figures()["forwards"] == len(plan) / 4
    padded = Toy(pad_to_multiple_of=5)
    padded.gradient()
    assert all(x["completion_ids"].shape[1] == 10 for x in padded.plan()), "TRL's own"


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_adapters_are_exact(beta):
    """With peft_config, by enumeration; TRL's reference is the base without adapters. Catches a
    weight that multiplies only a part of an adapter's gradient."""
    shape = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    toy = Toy(peft_config=shape, beta=beta, loss_type="grpo")
    assert relative_error(over_completions(toy.gradient), toy.stock()) < 1e-12


def test_micro_batches_without_tokens():
    """Fails if a micro-batch whose completions are all masked has no column."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    rule = {"completion_rule": "uniform", "completion_prune_rate": 0.0}
    toy = Toy(mask_truncated_completions=True, **options, **rule)
    assert relative_error(toy.gradient(), toy.stock()) < 1e-12
    assert min(x["completion_mask"].sum() for x in toy.plan()) == 0, "else nothing was masked"


def test_rewards_of_several_functions():
    """Fails if a reward has not TRL's weights, or if NaN of all functions is a reward."""
    trainer, nan = make(), torch.nan
    trainer.reward_weights = torch.tensor([2.0, 1.0])
    rewards = torch.tensor([[1.0, nan], [nan, nan], [0, 3], [1, 1]])
    with mock.patch.object(trl.GRPOTrainer, "_calculate_rewards", return_value=rewards):
        assert trainer._calculate_rewards() is rewards
    wanted = torch.tensor([2, nan, 3, 3])
    torch.testing.assert_close(trainer.rewards, wanted, equal_nan=True)


def six_steps(folder, resume=None, prompts=trl_toy.MANY):
    """A run with both levels of pruning and a checkpoint every two steps, and all of it that must
    repeat: the mean of tokens, the log without its times, the weights."""
    trainer = make(
        prompts=prompts, max_steps=6, output_dir=str(folder), save_strategy="steps", save_steps=2,
        shuffle_dataset=True, prompt_rule="uniform",
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    times = ("step_time", "train_", "total_flos")
    rows = [
        {name: row[name] for name in row if not name.startswith(times)}
        for row in trainer.state.log_history
    ]
    return trainer, (trainer.mean_tokens, rows), [x.detach() for x in trainer.model.parameters()]


def test_resumed_bit_for_bit(tmp_path):
    """A run goes on from the checkpoint of step 4: the log, the weights, the draws and the history
    are those of the run that went through. Catches a draw that starts over, a history that is
    forgotten, a denominator that is, and a figure that the page does not explain. Resumed with
    other prompts, it says so; a checkpoint of GRPOTrainer, without dppo.pt, is taken."""
    whole, figures, weights = six_steps(tmp_path / "whole")
    four = tmp_path / "whole" / "checkpoint-4"
    resumed, again, weights_again = six_steps(tmp_path / "resumed", str(four))
    assert again == figures
    assert all(map(torch.equal, weights_again, weights))
    assert_same_history(whole.history, resumed.history)
    shares = [row["dppo/kept_prompts"] for row in whole.state.log_history[:6]]
    assert shares == [1.0] + [0.75] * 5, "the first batch gives the denominator"
    logged = {name for name in whole.state.log_history[0] if name.startswith("dppo/")}
    page = ROOT.joinpath("docs", "other-trainers.md").read_text()
    assert logged == set(re.findall(r"`(dppo/\w+)`", page))
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts"):
        six_steps(tmp_path / "other", str(four), trl_toy.MANY[:-1])
    (four / "dppo.pt").unlink()
    _trainer, (_mean, rows), _weights = six_steps(tmp_path / "stock", str(four))
    assert rows[4]["dppo/kept_prompts"] == 1.0


def test_zero_trains_like_grpo():
    """Three steps without the completions whose advantage is 0. Catches random numbers that TRL
    draws and the pruned step does not: its next samples would be others."""
    weights = []
    for rule in ("none", "nonzero"):
        trainer = make(prompts=trl_toy.MANY, completion_rule=rule, max_steps=3)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert trainer.state.log_history[0]["dppo/kept_completions"] < 1
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_trainers_are_refused(monkeypatch):
    """Fails if methods of a TRL that nobody read are wrapped, or if positions that padding moves,
    images, or ranks among which no group can be divided pass."""
    trainer = make(prompt_rule="dppo")
    ranks, version = type(trainer.accelerator), r"trl 1\.17\.0: .*pip install 'trl==1\.16\.\*'"
    text = trainer.model.config.get_text_config()
    for owner, name, value, message in (
        (trl, "__version__", "1.17.0", version),
        (text, "rope_parameters", None, "gpt_neox: without rotary .*use another model"),
        (ranks, "num_processes", 3, "'dppo' .*3 processes must divide num_generations=4;"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(RuleError, match=message):
                trainer.check()
    trainer.check()
    with pytest.raises(RuleError, match=r"images: .*set both rules to 'none'"):
        trainer.gather({"num_images": [1]}, None, None)
