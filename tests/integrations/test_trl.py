"""dppo_trl.py on one process: layouts, padding, whole runs. test_exact.py has what every trainer
must do.

tests/trl.sh builds an environment with TRL and runs these tests in it; without TRL they are
skipped.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from exact import NONE, assert_same_history, error

import dppo
from dppo import RuleError

pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
import trl
import trl_toy
from trl_toy import Toy, dppo_trl, make_trainer

PROMPTS = {"prompt_rule": "uniform", "prompt_prune_rate": 0.3}
ROWS = [{"prompt": text} for text in trl_toy.PROMPTS for _ in range(4)]


@pytest.mark.parametrize(
    ("loss", "accumulation", "generation", "iterations", "batch"),
    [
        ("bnpo", 1, 1, 1, 16), ("dapo", 8, 4, 1, 4), ("bnpo", 2, 4, 1, 4), ("grpo", 4, 4, 2, 4),
        ("bnpo", 2, 4, 2, 4), ("grpo", 8, 2, 2, 4), ("dapo", 2, 4, 1, 4),
    ],
)  # fmt: skip
def test_layouts_are_exact(loss, accumulation, generation, iterations, batch):
    """Updates of part of a generation batch, of several, and of one more than once; each window's
    draw is enumerated while the others keep everything.

    Catches a window that is cut in the wrong place, rows of another window in a draw's budget, and
    a second iteration that trains on the first one's draw.
    """
    options = {
        "gradient_accumulation_steps": accumulation, "steps_per_generation": generation,
        "num_iterations": iterations, "per_device_train_batch_size": batch, "loss_type": loss,
    }  # fmt: skip
    toy = Toy(**options)
    assert error(toy.over_windows(), toy.stock()) < 1e-12


def test_own_scales():
    """The advantages that are trained on and those of TRL's table of completions, where fewer
    prompts are rolled out than the table has room for. Catches TRL's own, or those of other rows.
    """
    rules = PROMPTS | {"prompt_prune_rate": 0.5}
    trainer = make_trainer(scale_rewards="variance", **rules, loss_type="grpo")
    trainer.model.train()
    found, logs = trainer._generate_and_score_completions(ROWS), trainer._logs
    assert len(logs["advantages"]) == len(logs["prompt"]) == 8
    rewards = torch.tensor(logs["rewards"]["toy_reward"]).view(-1, 4)
    wanted = dppo.group_advantages(rewards, "variance").flatten().float()
    assert torch.equal(torch.tensor(logs["advantages"]), wanted)
    assert torch.equal(found["advantages"].float(), wanted)


def test_large_evaluations():
    """An evaluation of more completions than the table of a generation batch has room for. Catches
    a table that is emptied beyond its last row."""
    options = {"num_generations_eval": 4, "per_device_eval_batch_size": 16}
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(scale_rewards="variance", **NONE, **options, **layout)
    trainer.model.eval()
    assert len(trainer._generate_and_score_completions(ROWS)["advantages"]) == 16
    assert len(trainer._logs["advantages"]) == trainer.args.generation_batch_size == 4


def test_evaluation_is_grpos():
    """Nothing is drawn while TRL evaluates. Catches a wrapper that forgets to ask."""
    trainer = Toy(**PROMPTS).trainer
    trainer.model.eval()
    with trl_toy.exact_world():
        rows = trainer._prepare_inputs([{"prompt": "a"}] * 4)
    assert len(rows["completion_ids"]) == 4
    assert "factor" not in rows
    assert trainer.so_far["draws"] == trainer.so_far["batches"] == 0


# ---------------------------------------------------------------------------- micro-batches


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
    assert rows == sum(len(x["place"]) for x in plan) < 16
    assert len(forwards) == len(plan) == -(-rows // 4)
    assert toy.trainer.plan[: 4 - len(plan)] == [None] * (4 - len(plan))
    for x, mask in zip(plan, forwards, strict=True):  # prompts of up to 3 tokens
        assert mask.shape[1] == 3 + x["completion_mask"].sum(dim=1).max()
    lengths = [int(mask.sum()) for x in forwards for mask in x]
    assert lengths == sorted(lengths)
    assert toy.figures()["forwards"] == len(plan) / 4
    dull = Toy(completion_rule="zero", **trl_toy.DULL)
    dull.gradient()
    assert [x["factor"].tolist() for x in dull.plan()] == [[0.0]], "one row, for other ranks"


@pytest.mark.parametrize(("kind", "narrowest"), [("llama", 1), ("gpt2", 8)])
def test_padding_on_the_left(kind, narrowest):
    """Prompts of 1 and 8 tokens. A Llama loses padding on the left; a GPT-2 must not, because it
    would move its positions. Catches a trimmed prompt, and a shift."""
    options = {"prompts": ["a", "b", "abcdefgh", "c"], "loss_type": "grpo"}
    options |= {"model": kind, "completion_rule": "zero"}
    toy = Toy(**options)
    assert error(toy.gradient(), toy.stock()) < 1e-4
    widths = [x["prompt_ids"].shape[1] for x in toy.plan()]
    assert (min(widths), max(widths)) == (narrowest, 8)
    toy = Toy(**options, pad_to_multiple_of=5)
    toy.gradient()
    (rows, *_) = toy.plan()
    assert (rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]) == (10, 10), "TRL's own"


def test_micro_batches_without_tokens():
    """Fails if a micro-batch whose completions are all masked has an infinite factor, which today's
    TRL never multiplies by, or no column."""
    options = {
        "loss_type": "bnpo", "mask_truncated_completions": True, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16,
    }  # fmt: skip
    toy = Toy(**options, completion_rule="uniform", completion_prune_rate=0.0)
    assert error(toy.gradient(), toy.stock()) < 1e-12
    assert min(x["completion_mask"].sum() for x in toy.plan()) == 0, "else nothing was masked"
    assert all(x["factor"].isfinite().all() for x in toy.plan())


def test_rewards_of_several_functions():
    """Fails if a reward has not TRL's weights, or if NaN of all functions is a reward."""
    trainer, nan = make_trainer(), torch.nan
    trainer.reward_weights = torch.tensor([2.0, 1.0])
    trainer.rewards = torch.tensor([[1.0, nan], [nan, nan], [0, 3], [1, 1]])
    wanted = torch.tensor([2, nan, 3, 3])
    torch.testing.assert_close(trainer.total_rewards(), wanted, equal_nan=True)


# ---------------------------------------------------------------------------- runs


def six_steps(folder, resume=None, prompts=trl_toy.MANY):
    """A run with both levels of pruning and a checkpoint every two steps, and all of it that must
    repeat: the counts, the weights, the log without its times."""
    trainer = make_trainer(
        prompts=prompts, max_steps=6, output_dir=str(folder), save_strategy="steps", save_steps=2,
        shuffle_dataset=True, **PROMPTS,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    times = ("step_time", "train_", "total_flos")
    rows = [
        {name: row[name] for name in row if not name.startswith(times)}
        for row in trainer.state.log_history
    ]
    return trainer, (trainer.so_far, rows), [x.detach() for x in trainer.model.parameters()]


def test_resumed_bit_for_bit(tmp_path):
    """A run goes on from the checkpoint of step 4: the log, the weights, the draws and the history
    are those of the run that went through. Catches a draw that starts over, a history that is
    forgotten, and a denominator that is. Resumed with other prompts, it says so."""
    whole, figures, weights = six_steps(tmp_path / "whole")
    four = str(tmp_path / "whole" / "checkpoint-4")
    resumed, again, weights_again = six_steps(tmp_path / "resumed", four)
    assert again == figures
    assert all(map(torch.equal, weights_again, weights))
    assert_same_history(whole.history, resumed.history)
    assert whole.so_far["draws"] == whole.so_far["batches"] == 6
    shares = [row["dppo/kept_prompts"] for row in whole.state.log_history[:6]]
    assert shares == [1.0] + [0.75] * 5, "the first batch gives the denominator"
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts"):
        six_steps(tmp_path / "other", four, trl_toy.MANY[:-1])


def test_other_runs_are_resumed(tmp_path, monkeypatch):
    """Fails if a run of GRPOTrainer, which has no dppo.pt, or one whose prompts were not pruned
    cannot go on with pruned prompts, or if every rank writes the file."""
    trainer = make_trainer(**PROMPTS, output_dir=str(tmp_path))
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert trainer.so_far["draws"] == 0
    torch.save({"so_far": trainer.so_far | {"draws": 7}}, tmp_path / "dppo.pt")
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert trainer.so_far["draws"] == 7
    monkeypatch.setattr(trl.GRPOTrainer, "_save_checkpoint", lambda *args: None)
    for writes in (False, True):
        monkeypatch.setattr(type(trainer.args), "should_save", writes)
        trainer._save_checkpoint(trainer.model, None)
        assert (tmp_path / "checkpoint-0" / "dppo.pt").exists() == writes


# ---------------------------------------------------------------------------- the page

PAGE = Path(trl_toy.__file__).parents[2].joinpath("docs", "other-trainers.md").read_text()


def test_the_page(policy_folder, monkeypatch, tmp_path):
    """The program of the page, word for word, with a small model by the name of the page's. Catches
    one that no longer runs, and a figure of the log that the page does not explain."""
    (name,) = re.findall(r'model="(.*)"', PAGE)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).symlink_to(policy_folder)
    monkeypatch.chdir(tmp_path)
    program = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
    names = {}
    exec(program, names)
    assert names["trainer"].state.global_step == 20
    explained = set(re.findall(r"^\| `(dppo/\w+)` \|", PAGE, re.MULTILINE))
    logged = {name for name in names["trainer"].state.log_history[0] if name.startswith("dppo/")}
    assert logged == explained - {"dppo/kept_prompts", "dppo/reward"}


def test_the_parser(monkeypatch, tmp_path):
    """TrlParser with the page's YAML file and a flag beside it. Catches options that are not in the
    configuration's class, and a file that no longer works."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "dppo.yaml"
    path.write_text(text)
    (line,) = re.findall(r"`args, = (.*)`", PAGE)
    flags = re.search(r"`python train_trl.py --config dppo.yaml (.*)`", PAGE)[1].split()
    monkeypatch.setattr(sys, "argv", ["train_trl.py", "--config", str(path), *flags, "--use_cpu"])
    names = {"TrlParser": trl.TrlParser, "DPPOConfig": dppo_trl.DPPOConfig}
    (args,) = eval(line, names)
    found = (args.prompt_rule, args.completion_prune_rate, args.scale_rewards)
    assert found == ("uniform", 0.8, "variance")
    monkeypatch.setattr(sys, "argv", ["train_trl.py", "--help"])
    with pytest.raises(SystemExit):
        eval(line, names)


# ---------------------------------------------------------------------------- refusals


def test_configurations_are_checked():
    """GRPOConfig has no rules: the sentence names the class that does. Catches defaults that are
    used without a word."""
    config = trl.GRPOConfig("out", use_cpu=True)
    with pytest.raises(RuleError, match="args is a GRPOConfig: DPPOTrainer needs a DPPOConfig"):
        dppo_trl.DPPOTrainer(trl_toy.model_folder("gpt2"), trl_toy.toy_reward, config)


def test_trainers_are_refused(monkeypatch):
    """Fails if methods of a TRL that nobody read are wrapped, or if a router's loss, environments,
    or ranks among which no group can be divided pass."""
    trainer = make_trainer(prompt_rule="dppo")
    scaled = make_trainer(scale_rewards="mean", **NONE)
    ranks, version = type(trainer.accelerator), r"trl 1\.17\.0: .*pip install 'trl==1\.16\.\*'"
    for refused, owner, name, value, message in (
        (trainer, trl, "__version__", "1.17.0", version),
        (scaled, trl, "__version__", "1.17.0", version),
        (trainer, trainer, "aux_loss_enabled", True, r"router_aux_loss_coef: .*set it to 0\.0"),
        (trainer, trainer, "environment_factories", [object], "no environment_factory"),
        (trainer, ranks, "num_processes", 3, "'dppo' .*3 processes must divide num_generations=4;"),
    ):
        refused.check()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(RuleError, match=message):
                refused.check()
    monkeypatch.setattr(ranks, "num_processes", 3)
    trainer.args.prompt_rule = "uniform"  # of fixed size
    trainer.check()
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    make_trainer(**NONE)


def test_images_are_refused(monkeypatch):
    """Fails if rows with images are pruned, whose pixels are not one row each."""
    images = lambda *args: {"num_images": [1]}
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", images)
    trainer = make_trainer()
    trainer.model.train()
    with pytest.raises(RuleError, match=r"images: .*set both rules to 'none'"):
        trainer._generate_and_score_completions([{"prompt": "a"}])
