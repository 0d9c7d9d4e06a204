"""dppo_trl.py on one process: layouts, padding, whole runs. test_exact.py has what every trainer
must do.

tests/trl.sh builds an environment with TRL and runs these tests in it; without TRL they are
skipped.
"""

import importlib
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from exact import NONE, error
from toy import in_processes

import dppo
from dppo import RuleError

trl = pytest.importorskip("trl", reason="tests/trl.sh runs these, with TRL")
trl_toy = importlib.import_module("trl_toy")  # after the line above: it needs TRL, too
dppo_trl, Toy, make_trainer = trl_toy.dppo_trl, trl_toy.Toy, trl_toy.make_trainer

PROMPTS = {"prompt_rule": "uniform"}


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


def test_logged_advantages():
    """TRL prints a table of completions. Catches one whose advantages are TRL's, or those of other
    rows, when fewer prompts are rolled out than the table has room for."""
    rules = PROMPTS | {"prompt_prune_rate": 0.5}
    trainer = make_trainer(scale_rewards="variance", **rules, loss_type="grpo")
    trainer.model.train()
    rows = [{"prompt": text} for text in trl_toy.PROMPTS for _ in range(4)]
    trainer._generate_and_score_completions(rows)
    logs = trainer._logs
    assert len(logs["advantages"]) == len(logs["prompt"]) == 8
    rewards = torch.tensor(logs["rewards"]["toy_reward"]).view(-1, 4)
    wanted = dppo.group_advantages(rewards, "variance").flatten()
    assert torch.equal(torch.tensor(logs["advantages"]), wanted.float())


def test_large_evaluations():
    """An evaluation of more completions than the table of a generation batch has room for. Catches
    a table that is emptied beyond its last row."""
    options = {"num_generations_eval": 4, "per_device_eval_batch_size": 16}
    layout = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = make_trainer(scale_rewards="variance", **NONE, **options, **layout)
    trainer.model.eval()
    rows = [{"prompt": text} for text in trl_toy.PROMPTS for _ in range(4)]
    found = trainer._generate_and_score_completions(rows)
    assert len(found["advantages"]) == 16
    assert len(trainer._logs["advantages"]) == trainer.args.generation_batch_size == 4


# ---------------------------------------------------------------------------- runs


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
    assert sum(mask.numel() for mask in forwards) < rows * (3 + 6)
    lengths = [int(mask.sum()) for x in forwards for mask in x]
    assert lengths == sorted(lengths)
    assert toy.figures()["forwards"] == len(plan) / 4
    dull = Toy(completion_rule="zero", **trl_toy.DULL)
    dull.gradient()
    assert [x["factor"].tolist() for x in dull.plan()] == [[0.0]], "one row, for other ranks"


@pytest.mark.parametrize(("kind", "narrowest"), [("llama", 1), ("gpt2", 8)])
def test_padding_on_the_left(tmp_path, kind, narrowest):
    """Prompts of 1 and 8 tokens, in float32. A Llama loses padding on the left; a GPT-2 must not,
    because it would move its positions. Catches a trimmed prompt, and a shift."""
    trl_toy.save_model(tmp_path / kind, kind, torch.float32)
    options = {"prompts": ["a", "b", "abcdefgh", "c"], "loss_type": "grpo"}
    options |= {"folder": tmp_path / kind, "completion_rule": "zero"}
    toy = Toy(**options)
    assert error(toy.gradient(), toy.stock()) < 1e-4
    widths = [x["prompt_ids"].shape[1] for x in toy.plan()]
    assert (min(widths), max(widths)) == (narrowest, 8)
    toy = Toy(**options, pad_to_multiple_of=5)
    toy.gradient()
    (rows, *_) = toy.plan()
    assert (rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1]) == (10, 10), "TRL's own"


def test_rewards_of_several_functions():
    """Fails if a reward has not TRL's weights, or if NaN of all functions is a reward."""
    trainer, nan = make_trainer(), torch.nan
    trainer.reward_weights = torch.tensor([2.0, 1.0])
    trainer.rewards = torch.tensor([[1.0, nan], [nan, nan], [0, 3], [1, 1]])
    wanted = torch.tensor([2, nan, 3, 3])
    torch.testing.assert_close(trainer.total_rewards(), wanted, equal_nan=True)


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


def test_killed_and_resumed(tmp_path):
    """kill -9 in step 5, resumed from the checkpoint of step 4: the log, the weights, the draws and
    the history are those of a run that went through. Catches a draw that starts over, a history
    that is forgotten, and a denominator that is.

    Resumed with other prompts, it says so.
    """
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    in_processes(1, trl_toy.train, whole, 0, None)
    in_processes(1, trl_toy.train, broken, 5, None, codes=[-signal.SIGKILL])
    assert {path.name for path in Path(broken).iterdir()} >= {"checkpoint-2", "checkpoint-4"}
    in_processes(1, trl_toy.train, broken, 0, True)
    one, other = (torch.load(f"{folder}/end.pt") for folder in (whole, broken))
    assert one[0] == other[0]
    assert one[0]["draws"] == one[0]["batches"] == 6
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=0, atol=0, equal_nan=True)
    assert not one[1]["past_advantage"].isnan().all()
    assert all(map(torch.equal, one[2], other[2]))
    assert one[3] == other[3]
    shares = [row["dppo/kept_prompts"] for row in one[3][:6]]
    assert shares == [1.0] + [0.75] * 5, "the first batch gives the denominator"
    with pytest.raises(RuleError, match=r"dppo\.pt: its history is of other prompts"):
        trl_toy.train(broken, 0, True, prompts=trl_toy.MANY[:-1])


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


PAGE = Path(trl_toy.__file__).parents[2].joinpath("docs", "other-trainers.md").read_text()


@pytest.fixture
def at_the_hub(policy_folder, monkeypatch, tmp_path):
    """The current folder has the page's model by its name: small and untrained."""
    (name,) = re.findall(r'model="(.*)"', PAGE)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).symlink_to(policy_folder)
    monkeypatch.chdir(tmp_path)


def test_the_page(at_the_hub):
    """The program of the page, word for word. Catches one that no longer runs, and a figure of the
    log that the page does not explain."""
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
    found = {name: getattr(args, name) for name in ("completion_prune_rate", "scale_rewards")}
    assert found == {"completion_prune_rate": 0.8, "scale_rewards": "variance"}
    assert args.prompt_rule == "uniform"
    monkeypatch.setattr(sys, "argv", ["train_trl.py", "--help"])
    with pytest.raises(SystemExit):
        eval(line, names)


def test_configurations_are_checked():
    """GRPOConfig has no rules: the sentence names the class that does. Catches defaults that are
    used without a word."""
    with pytest.raises(RuleError, match="args is a GRPOConfig: DPPOTrainer needs a DPPOConfig"):
        dppo_trl.DPPOTrainer(
            trl_toy.gpt2(), trl_toy.toy_reward, trl.GRPOConfig("out", use_cpu=True)
        )


def test_evaluation_is_grpos():
    """Nothing is drawn while TRL evaluates. Catches a wrapper that forgets to ask."""
    trainer = Toy(**trl_toy.BOTH).trainer
    trainer.model.eval()
    with trl_toy.exact_world():
        rows = trainer._prepare_inputs([{"prompt": "a"}] * 4)
    assert len(rows["completion_ids"]) == 4
    assert "factor" not in rows
    assert trainer.so_far["draws"] == trainer.so_far["batches"] == 0


def test_other_versions_are_refused(monkeypatch):
    """Fails if methods of a TRL that nobody read are wrapped."""
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    for options in ({}, {"scale_rewards": "mean", **NONE}):
        with pytest.raises(RuleError, match=r"trl 1\.17\.0: .*pip install 'trl==1\.16\.\*'"):
            make_trainer(**options)
    make_trainer(**NONE)


def test_trainers_are_refused(monkeypatch):
    """Fails if a router's loss, environments, or ranks among which no group can be divided pass."""
    trainer = make_trainer(prompt_rule="dppo")
    ranks = type(trainer.accelerator)
    for owner, name, value, message in (
        (trainer, "aux_loss_enabled", True, r"router_aux_loss_coef: .*set it to 0\.0"),
        (trainer, "environment_factories", [object], "no environment_factory"),
        (ranks, "num_processes", 3, "'dppo' .*3 processes must divide num_generations=4;"),
    ):
        trainer.check()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(RuleError, match=message):
                trainer.check()
    monkeypatch.setattr(ranks, "num_processes", 3)
    trainer.args.prompt_rule = "uniform"  # of fixed size
    trainer.check()


def test_images_are_refused(monkeypatch):
    """Fails if rows with images are pruned, whose pixels are not one row each."""
    images = lambda *args: {"num_images": [1]}
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", images)
    trainer = make_trainer()
    trainer.model.train()
    with pytest.raises(RuleError, match=r"images: .*set both rules to 'none'"):
        trainer._generate_and_score_completions([{"prompt": "a"}])
