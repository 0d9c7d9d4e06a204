"""dppo_trl.py on one process: micro-batches, whole runs. test_exact.py has what every trainer must
do; .ci/run runs the program of the page.
"""

from unittest import mock

import peft
import pytest
import torch
from exact import NONE, assert_same_history, calls_of, over_completions

import dppo_ceiling
import dppo_shared
from dppo import RuleError
from proof import relative_error

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
import trl
import trl_toy
from trl_toy import Toy, make

import dppo_trl


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
    toy, masks = Toy(loss_type="grpo", completion_prune_rate=0.6), []

    def record(_model, _args, options):
        if torch.is_grad_enabled():
            masks.append(options["attention_mask"])

    toy.trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    toy.gradient()
    rows = sum(map(len, masks))
    assert rows == sum(len(x["multiplier"]) for x in toy.plan()) < 16
    assert len(masks) == -(-rows // 4)
    assert all(mask.any(dim=0).all() for mask in masks)
    lengths = [int(mask.sum()) for x in masks for mask in x]
    assert lengths == sorted(lengths)
    assert toy.figures()["forwards"] == len(masks) / 4


def test_adapters_are_exact():
    """With peft_config, by enumeration; TRL's reference is the base without adapters. Catches a
    weight that multiplies only a part of an adapter's gradient."""
    shape = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    toy = Toy(peft_config=shape, loss_type="grpo")
    assert relative_error(over_completions(toy.gradient), toy.stock()) < 1e-12


def test_micro_batches_without_tokens():
    """Fails if a micro-batch whose completions are all masked has no column."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    rule = {"completion_rule": "uniform", "completion_prune_rate": 0.0}
    toy = Toy(mask_truncated_completions=True, **options, **rule)
    assert relative_error(toy.gradient(), toy.stock()) < 1e-12
    assert min(x["completion_mask"].sum() for x in toy.plan()) == 0, "else nothing was masked"


def test_log_probs_of_generate():
    """Energies come from the tokens that transformers' generate has sampled. Catches log-probs of
    another place or without the temperature, and a loss of TRL's that gets them."""
    trainer = make(prompts=trl_toy.MANY, learning_rate=0.0, max_steps=1, max_completion_length=48)
    with (
        calls_of(dppo_shared, "energy_of") as energies,
        calls_of(trl.GRPOTrainer, "_generate_and_score_completions") as generated,
    ):
        trainer.train()
    (((logprobs, mask), _energy),), ((_args, rows),) = energies, generated
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    attends = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    inputs = trainer.model, ids, attends, mask.shape[1]
    with torch.no_grad():
        wanted, *_ = trainer._get_per_token_logps_and_entropies(*inputs)
    assert mask.sum() < mask.numel()
    torch.testing.assert_close(logprobs * mask, wanted.float() * mask, atol=1e-5, rtol=1e-5)
    assert "sampling_per_token_logps" not in rows


def test_rewards_of_several_functions():
    """Fails if a reward has not TRL's weights, or if NaN of all functions is a reward."""
    trainer, nan = make(), torch.nan
    trainer.reward_weights = torch.tensor([2.0, 1.0])
    rewards = torch.tensor([[1.0, nan], [nan, nan], [0, 3], [1, 1]])
    with mock.patch.object(trl.GRPOTrainer, "_calculate_rewards", return_value=rewards):
        trainer._calculate_rewards()
    torch.testing.assert_close(trainer.rewards, torch.tensor([2, nan, 3, 3]), equal_nan=True)


def test_rest_without_pruning(monkeypatch):
    """Micro-steps of 10 seconds, the first of them with 13 of preparing, the others with 1. Catches
    a rest of one micro-step, and preparation that counts as training."""
    ends = [[0, 1, 14, 20], *([0, 1, 2, 10] for _ in range(3))]
    times = (40 * step + time for step, part in enumerate(ends) for time in part)
    monkeypatch.setattr(dppo_trl, "clock", lambda: next(times))
    toy = Toy(**NONE)
    toy.step()
    assert toy.figures() == {"rest": (13 + 3) / (7 + 3 * 9)}


def six_steps(folder, resume=None, prompts=trl_toy.MANY):
    """A run with both levels of pruning and a checkpoint every two steps, and all of it that must
    repeat: the mean of tokens, the log without its times, the weights."""
    trainer = make(
        prompts=prompts, max_steps=6, output_dir=str(folder), save_strategy="steps", save_steps=2,
        shuffle_dataset=True, prompt_rule="uniform", log_completions=True,
        num_completions_to_print=0,
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
    are those of the run that went through; and its log is not taken for a whole one. A checkpoint
    of other prompts is refused; one of GRPOTrainer, without dppo.pt, is taken."""
    whole, figures, weights = six_steps(tmp_path / "whole")
    four = tmp_path / "whole" / "checkpoint-4"
    resumed, again, weights_again = six_steps(tmp_path / "resumed", str(four))
    assert again == figures
    assert all(map(torch.equal, weights_again, weights))
    assert_same_history(whole.history, resumed.history)
    shares = [row["dppo/kept_prompts"] for row in whole.state.log_history[:6]]
    assert shares == [1.0] + [0.75] * 5, "the first batch gives the denominator"
    assert (tmp_path / "whole" / "completions" / dppo_ceiling.PRUNED).exists()
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
    text = trainer.model.config.get_text_config()
    for owner, name, value, message in (
        (trl, "__version__", "1.17.0", r"trl 1\.17\.0"),
        (text, "rope_parameters", None, "without rotary"),
        (trainer, "train_dataset", iter([]), "remembers every prompt"),
        (type(trainer.accelerator), "num_processes", 3, "3 processes must divide"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(RuleError, match=message):
                trainer.check()
    with pytest.raises(RuleError, match="args is of type GRPOConfig: give a DPPOConfig"):
        dppo_trl.DPPOTrainer(trainer.model, trl_toy.toy_reward, trl.GRPOConfig(use_cpu=True))
    with pytest.raises(RuleError, match="images: "):
        trainer.gather({"num_images": [1]}, None, None)
