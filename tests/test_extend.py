"""What a user adds works, or says why not: rewards, rules and losses, from the README and wrong."""

import re
import runpy
import sys
import types

import pytest
import torch
import toy

import config
import data
import dppo
import eval as evaluation
import proof
import rewards
import sampler
import train
from related import rivals  # noqa: F401 (adds its rules, before they are copied)
from runtime import InputError, checkpoint
from tasks import arithmetic, sft

README = (toy.ROOT / "README.md").read_text()
REWARD, RULES = re.findall(r"^```python\n(import .*?)^```$", README, re.DOTALL | re.MULTILINE)
ones = lambda shape: torch.ones(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def clean_tables(monkeypatch):
    """Forget what a test adds, and the module `mine` that does."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for owner, table in ((dppo, "COMPLETION_RULES"), (dppo, "LOSSES"), (sampler, "PROMPT_RULES")):
        monkeypatch.setattr(owner, table, getattr(owner, table).copy())


def program(folder, code, *args):
    """What `python mine.py ARGS` prints, in a process of its own; `code` is mine.py."""
    file = folder / "program.py"
    file.write_text(f"import sys\nsys.argv[1:] = {[*args]}\n{code}")
    (printed,) = toy.in_processes(1, runpy.run_path, str(file), {}, "__main__")
    return printed


# ---------------------------------------------------------------------------- the README's snippets


def test_reward_of_the_readme(tmp_path):
    """It agrees with the embedded task's own reward, so training with it is training. Catches a
    reward that is 0 forever, as an earlier README's was."""
    names = {"__name__": "myreward"}
    exec(REWARD, names)
    found = []
    for index in range(200):
        prompt, answer, _ = arithmetic.problem("train", index)
        completion = toy.worked(prompt) + "0" * (index % 2)
        reward = names["my_reward"](completion, answer, {"problem": prompt})
        assert (reward > 0.5) == rewards.arithmetic_reward(completion, answer)
        found.append(reward > 0.5)
    assert {*found} == {True, False}
    assert names["my_reward"]("7+9=16", "", {"problem": "7+9?"}) is None
    args = toy.flags("tiny", str(tmp_path / "run"), steps=1, prompts_per_step=4, group_size=2)
    assert "step 1/1 | reward 0." in program(tmp_path, REWARD, *args)


def test_task_of_the_page(policy_folder, tmp_path, monkeypatch):
    """Catches a task whose problems, reward or worked solutions the page leaves out."""
    page = (toy.ROOT / "docs/running.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    larger = types.ModuleType("larger")
    exec(code, vars(larger))
    monkeypatch.setitem(sys.modules, "tasks.larger", larger)
    row = re.search(r'"larger": (Embedded\(.*\)),', page)[1]
    monkeypatch.setitem(data.EMBEDDED, "larger", eval(row, {"Embedded": data.Embedded}))
    (problem, *_) = sft.worked("larger")
    assert data.reward_function("larger")(problem.solution, problem.answer) == 1.0
    toy.main(toy.flags(policy_folder, str(tmp_path / "run"), data="larger", steps=1))


def test_rules_and_loss_of_the_readme(policy_folder, tmp_path, monkeypatch, capsys):
    """Word for word: a program trains with them, and proof.py proves them. Catches a renamed
    argument, a rule that the method does not pick, and one that drops nothing."""
    assert "python mine.py --method mine --loss unclipped" in README
    assert "`python proof.py mine.py`" in README
    few = "from tasks import arithmetic\narithmetic.TRAIN_PROBLEMS = 16\n"
    code = few + RULES.replace("train.cli()", "import toy\n    train.cli(toy.toy_reward)")
    own = {"method": "mine", "loss": "unclipped", "prompts_per_step": 16, "steps": 6}
    printed = program(tmp_path, code, *toy.flags(policy_folder, str(tmp_path / "run"), **own))
    assert "prompt rule mine, completion rule mine" in printed
    log = toy.rows(tmp_path / "run")
    assert all(0 < row["kept/completions"] < 1 for row in log)
    assert {round(row["weight/max"], 3) for row in log} >= {round(1 / 0.3, 3)}

    monkeypatch.setattr(dppo, "LOSSES", {"grpo": dppo.LOSSES["grpo"]})
    (tmp_path / "mine.py").write_text(RULES)
    proof.main(str(tmp_path / "mine.py"))
    head, unbiased = capsys.readouterr().out.split("\nBiased")[0].split("\nClaimed")
    assert head.split()[-2:] == ["grpo", "unclipped"]
    lines = unbiased.splitlines()[1:]
    assert lines[0].startswith("  completions: mine (yours) "), "the user's first"
    assert sum("(yours)" in line for line in lines) == 2, "at both levels"
    errors = [float(word) for line in lines for word in line.split() if "e-" in word]
    assert len(errors) == len(lines) * 2
    assert max(errors) < 1e-10


# ---------------------------------------------------------------------------- entries


def batch():
    """A group with two kinds of completions, and one whose rewards are all equal."""
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]).double()
    return dppo.Completions(advantages, advantages, ones((2, 4)), advantages.abs())


WRONG = [  # the probabilities of a batch, a prune rate, the message
    (lambda batch, _: ones((1, 4)), 0.5, r"must return probabilities of shape \[2, 4\], not \[1"),
    (lambda batch, _: 1.5 * ones((2, 4)), 0.5, "must return .* from 0 to 1, .*, not 1.5"),
    (lambda batch, _: 0.0 * ones((2, 4)), 0.5, "must return .* above 0 wherever .*, not 0"),
    (lambda batch, _: ones((2, 4)) / 2, 0.0, "must keep all that is live at rate 0"),
]


@pytest.mark.parametrize(("chance", "rate", "message"), WRONG)
def test_wrong_probabilities(chance, rate, message):
    """Catches a rule that would be biased without a word."""
    dppo.COMPLETION_RULES["mine"] = dppo.Rule(chance, rate=0.5)
    with pytest.raises(dppo.RuleError, match=f"^the rule of completions {message}"):
        dppo.prune_completions("mine", rate, batch(), dppo.generator_for(0))


def test_weights_are_not_the_users():
    """Catches weights that are clipped, or 1, by a rule that says nothing of bias; and a loss that
    broadcasts."""
    with pytest.raises(dppo.RuleError, match=r"a dppo.Rule makes its weights; use dppo.BiasedRule"):
        type("Clipped", (dppo.Rule,), {"draw": None})
    dppo.COMPLETION_RULES["mine"] = dppo.BiasedRule(lambda *_: ones(2), rate=0.7, biased="it is")
    with pytest.raises(dppo.RuleError, match=r"must return \(keep, weights\), both"):
        dppo.prune_completions("mine", 0.5, batch(), dppo.generator_for(0))
    dppo.LOSSES["mine"] = dppo.Loss(lambda *_: (ones(1), ones(3) > 0), "constant")
    clip = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    with pytest.raises(dppo.RuleError, match=r"must return \(loss, clipped\), two tensors of .*3"):
        dppo.token_loss(*[torch.zeros(3)] * 3, torch.zeros(3).long(), loss="mine", **clip)


def test_an_entry_is_a_rule(monkeypatch):
    """Catches an entry that sets weights of its own and says nothing of bias."""
    own = types.SimpleNamespace(rate=None, draw=lambda *_: (torch.ones(1), torch.ones(1)))
    monkeypatch.setitem(dppo.COMPLETION_RULES, "mine", own)
    with pytest.raises(InputError, match=r"--completion-rule mine: must be a dppo.Rule or"):
        config.resolve(config.Config(method="mine"))


def test_the_count_of_tokens_is_known_before_the_draw(policy_folder, tmp_path):
    """Also where a rule without a rate prunes prompts. Catches a denominator that the draw decides,
    which proof.py cannot see in a run."""
    sampler.PROMPT_RULES["mine"] = dppo.Rule(lambda *_: ones(4) / 2, rate=None)
    options = {"prompt_rule": "mine", "loss": "dapo"}
    args = toy.flags(policy_folder, str(tmp_path / "run"), method="grpo", **options)
    trainer = train.Trainer(config.parse_config(args), toy.toy_reward)
    assert [trainer.step(step)[0]["kept/prompts"] for step in (1, 2)] == [1.0, 0.5]


# ---------------------------------------------------------------------------- runs


def test_a_run_without_signal_says_so(run, capsys):
    """Once. Catches a run that trains nothing, and a reward that forgets to return, without a
    word."""
    run("nothing", reward=lambda *_: 0.0, steps=7)
    assert capsys.readouterr().out.count("note: the gradient was 0 for 5 steps") == 1
    run("some", reward=lambda text, _answer: 1.0 if text[:1] < "@" else None, steps=3)
    assert capsys.readouterr().out.count("note: the reward is None for some completions") == 1


def test_folders_that_hold_something_else(run, policy_folder, tmp_path):
    """Catches a run that starts in a folder of checkpoints without a log, in an evaluation's, or in
    one that another process has, and a --resume that trains an ended one again."""

    def refused(message, name, **options):
        with pytest.raises(InputError, match=message):
            run(name, **options)

    options = {"steps": 3, "save_every": 3}
    before = run("ended", resume=True, **options)
    assert run("ended", resume=True, **options) == before
    log = run("ended", resume=True, **options | {"steps": 4})
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    (tmp_path / "ended" / "log.jsonl").unlink()
    refused("holds a run: give --resume to continue it", "ended", steps=2, seed=1)

    evals = {"out_dir": str(tmp_path / "evals"), "problems": 1, "k": 1, "max_new_tokens": 2}
    evaluation.main(evaluation.EvalConfig(policy_folder, **evals))
    for resume in ({}, {"resume": True}):
        refused("evals does not hold a training run: give another", "evals", **resume)
    with checkpoint.owned(tmp_path / "held"):
        refused("held is in use by another process", "held")
        held = evaluation.EvalConfig(policy_folder, **evals | {"out_dir": str(tmp_path / "held")})
        with pytest.raises(InputError, match="held is in use by another process"):
            evaluation.main(held)
