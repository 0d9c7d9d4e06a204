"""What a user adds works, or says why not: rewards, rules and losses, from the README and wrong."""

import copy
import inspect
import random
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
    tables = (dppo.COMPLETION_RULES, dppo.LOSSES, sampler.PROMPT_RULES)
    before = [copy.copy(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


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
    found, rng = [], random.Random(0)
    for index in range(200):
        prompt, answer, _ = arithmetic.problem("train", index)
        completion = arithmetic.worked_answer(prompt, arithmetic.CARRY_PROB, rng)
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


def completions():
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]).double()
    return dppo.Completions(advantages, advantages, ones((2, 4)), advantages.abs())


def token_loss(_rate=None):
    clip = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    return dppo.token_loss(*[torch.zeros(3)] * 3, torch.zeros(3).long(), loss="mine", **clip)


def make_rule(rate=0.5, **options):
    kind = dppo.BiasedRule if "biased" in options else dppo.Rule
    return kind(rate=rate, **options)


KINDS = {  # its table, its class, and a call that uses the entry `mine`
    "completion rule": (
        dppo.COMPLETION_RULES, make_rule,
        lambda rate: dppo.prune_completions("mine", rate, completions(), dppo.generator_for(0)),
    ),
    "prompt rule": (
        sampler.PROMPT_RULES, make_rule,
        lambda rate: sampler.prune_prompts(
            "mine", rate, sampler.PromptHistory(2), torch.arange(2), dppo.generator_for(0)),
    ),
    "loss": (dppo.LOSSES, dppo.Loss, token_loss),
}  # fmt: skip
BOTH, LOSS = ("completion rule", "prompt rule"), ("loss",)
gives = lambda value, **options: {"chance": lambda batch, *_: value(batch)} | options
selects = lambda value: {"select": lambda *_: value(), "biased": "it picks"}
loses = lambda value: {"surrogate": lambda *_: value(), "denominator": "constant"}
shape = r"a rule must return probabilities of shape "
pair = r"a rule must return \(keep, weights\), both of shape \["
two = r"--loss mine must return \(loss, clipped\), two tensors of shape \[3\]"
like = lambda batch: ones(batch.live.shape)
times = lambda number, **options: gives(lambda batch: like(batch) * number, **options)
values = r"a rule must return probabilities from 0 to 1, and above 0 wherever batch.live is True, "
ENTRIES = [  # kinds, the entry, the rate, the message if it is wrong
    (BOTH, gives(lambda batch: like(batch)[:1]), 0.5, shape + r"\[.*, not \[1"),
    (BOTH, times(1.5), 0.5, values + "not 1.5"),
    (BOTH, times(0.0), 0.5, values + r"not 0\. A dppo.BiasedRule may"),
    (BOTH, times(0.5), 0.0, "a rule must keep all that is live at prune rate 0, or say rate=None"),
    (BOTH, times(0.5, rate=None), 0.0, None),
    (BOTH[:1], gives(lambda batch: batch.live.double()), 0.5, None),
    (BOTH, selects(lambda: ones(2)), 0.5, pair),
    (LOSS, loses(lambda: (ones(1).sum(), ones(3) > 0)), None, two),
]


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for row in ENTRIES for kind in row[0]])
def test_entries(kind, row):
    """Catches a rule that is biased, one that fails deep inside a draw or an update, and a check
    that refuses pps's own zeros."""
    table, make, use = KINDS[kind]
    _kinds, entry, rate, message = row
    table["mine"] = make(**entry)
    if message is None:
        keep, weights = use(rate)
        assert torch.equal(weights > 0, keep)
        return
    with pytest.raises(dppo.RuleError, match=message):
        use(rate)


def test_an_entry_is_a_rule(monkeypatch):
    """Catches an entry that sets weights of its own and says nothing of bias."""
    own = types.SimpleNamespace(rate=None, draw=lambda *_: (torch.ones(1), torch.ones(1)))
    monkeypatch.setitem(dppo.COMPLETION_RULES, "mine", own)
    with pytest.raises(InputError, match=r"--completion-rule mine: must be a dppo.Rule or"):
        config.resolve(config.Config(method="mine"))


rule = make_rule(**times(1.0))
everything = lambda batch, *_: (batch.live | True, ones(batch.live.shape))
picky = dppo.BiasedRule(everything, rate=0.5, biased="it keeps all")
MINE = {"completion_rule": "mine"}
NOTES = [  # the completion rule `mine`, flags, a note of the first lines, the prompt rule
    (rule, MINE | {"method": "dppo"}, "", "dppo"),
    (rule, MINE | {"method": "dppo", "prompt_rule": "none"}, "", "none"),
    (picky, {"method": "mine"}, "changes the expected gradient: it keeps all", "none"),
]


@pytest.mark.parametrize(("entry", "flags", "note", "prompt_rule"), NOTES)
def test_notes_of_the_first_lines(entry, flags, note, prompt_rule):
    """Catches a note that is missing or wrong, and a method that picks another prompt rule."""
    dppo.COMPLETION_RULES["mine"] = entry
    cfg = config.resolve(config.Config(**flags))
    said = [line for line in config.warnings(cfg) if "gradient" in line]
    assert [note in line for line in said] == ([True] if note else [])
    assert cfg.prompt_rule == prompt_rule


def test_the_count_of_tokens_is_known_before_the_draw(policy_folder, tmp_path):
    """Also where a rule without a rate prunes prompts. Catches a denominator that the draw decides,
    which proof.py cannot see in a run."""
    sampler.PROMPT_RULES["mine"] = dppo.Rule(lambda *_: ones(4) / 2, rate=None)
    options = {"prompt_rule": "mine", "loss": "dapo"}
    args = toy.flags(policy_folder, str(tmp_path / "run"), method="grpo", **options)
    trainer = train.Trainer(config.parse_config(args), toy.toy_reward)
    assert [trainer.step(step)[0]["kept/prompts"] for step in (1, 2)] == [1.0, 0.5]


# ---------------------------------------------------------------------------- the proof

HEAD = "import dppo, sampler\n"
FILES = [  # a file, and what proof.py says of it
    (HEAD + "dppo.COMPLETION_RULES['mine'] = dppo.Rule(lambda batch, rate: "
     "(batch.size / batch.size.sum(1, keepdim=True)).clamp(max=1), rate=0.5)\n",
     "a rule must return .* not nan"),  # dead groups
    (HEAD + "sampler.PROMPT_RULES['mine'] = dppo.Rule(lambda batch, rate: "
     "batch.past_advantage.clamp(0.1, 1), rate=0.5)\n",
     "a rule must return .* not nan"),  # new prompts
    (HEAD, "adds no rule and no loss"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILES)
def test_what_the_proof_refuses(tmp_path, monkeypatch, text, message):
    """Catches a proof that approves what a run's first steps would refuse."""
    monkeypatch.setattr(dppo, "LOSSES", {"grpo": dppo.LOSSES["grpo"]})
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises((SystemExit, dppo.RuleError), match=message):
        proof.main(str(tmp_path / "mine.py"))


CLIPPED = """
import dppo
pps = dppo.COMPLETION_RULES["pps"]
def clipped(batch, prune_rate, generator):
    keep, weights = pps.draw(batch, prune_rate, generator)
    return keep, weights.clamp(max=1.5)
"""
FORBIDDEN = [  # a line or two more, and the error's words
    ("dppo.COMPLETION_RULES['mine'] = dppo.BiasedRule(clipped, rate=0.7)", "argument: 'biased'"),
    ("pps.draw = clipped", "cannot assign to field 'draw'"),
    ("class Clipped(dppo.Rule):\n    def draw(self, *args): return clipped(*args)",
     "Clipped: a dppo.Rule makes its weights; use dppo.BiasedRule"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), FORBIDDEN)
def test_weights_are_not_the_users(line, message):
    """Refused where it is written. Catches weights that are clipped, or 1, without a word, and an
    AttributeError in place of the remedy."""
    with pytest.raises((TypeError, AttributeError, ValueError), match=message):
        exec(CLIPPED + line, {})


# ---------------------------------------------------------------------------- runs


SILENT = [  # a reward, flags, the note
    (lambda *_: 0.0, {}, "Mean reward 0 .* --max-new-tokens 6 cut off 100% of the completions"),
    (toy.toy_reward, {}, None),
    # a reward that forgets to return, and one that cannot score some problems
    (lambda text, _: 1.0 if text[:1] < "@" else None, {"steps": 3}, "the reward is None for some"),
    (lambda _, answer: None if int(answer) % 2 else 1.0, {"steps": 3}, None),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "flags", "text"), SILENT)
def test_a_run_without_signal_says_so(run, tmp_path, capsys, reward, flags, text):
    """Once, after five steps in a row. Catches a run that trains nothing without a word, and a note
    for a run whose groups are live."""
    run("run", reward=reward, **{"steps": 12} | flags)
    lines = capsys.readouterr().out.splitlines()
    places = [i for i, line in enumerate(lines) if re.match("note: the (gradient|reward)", line)]
    assert len(places) == bool(text)
    for i in places:
        assert re.search(text, lines[i])
        if "gradient" in text:
            assert lines[i - 1].startswith("step  5/12")
            assert str(tmp_path / "run" / "samples.jsonl") in lines[i]


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


def test_help_names_every_rule_and_loss():
    config.resolve(config.Config(completion_rule="cppo_batch"))  # which imports the rivals
    names = {*sampler.PROMPT_RULES, *dppo.COMPLETION_RULES, *dppo.LOSSES}
    missing = [n for n in names if not re.search(rf"\b{n}\b", inspect.getsource(config.Config))]
    assert not missing
