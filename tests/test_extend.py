"""What a user adds works, or says why not: rewards, rules and losses, from the README and wrong."""

import copy
import inspect
import itertools
import random
import re
import subprocess
import sys

import pytest
import torch
import toy

import config
import dppo
import eval as evaluation
import models
import proof
import rewards
import sampler
import train
from runtime import InputError, checkpoint
from tasks import arithmetic

README = (toy.ROOT / "README.md").read_text()
REWARD, WEIGHTED, RULES = re.findall(
    r"^```python\n(import .*?)^```$", README, re.DOTALL | re.MULTILINE
)
ones = lambda shape: torch.ones(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def clean_tables():
    """Forget what a test adds."""
    tables = (dppo.COMPLETION_RULES, dppo.LOSSES, sampler.PROMPT_RULES)
    before = [copy.copy(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def program(folder, code, *args):
    """Run `code` as a program beside train.py, as the README says; returns the process."""
    (folder / "mine.py").write_text(code)
    environment = {"PYTHONPATH": str(toy.ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "mine.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


# ---------------------------------------------------------------------------- the README's snippets


def test_reward_of_the_readme():
    """It agrees with the embedded task's own reward, so training with it is training. Catches a
    reward that is 0 forever, as an earlier README's was."""
    names = {"__name__": "myreward"}
    exec(REWARD, names)
    found, rng = [], random.Random(0)
    for index in range(200):
        prompt, answer, _ = arithmetic.problem("train", index)
        completion = arithmetic.worked_answer(prompt, arithmetic.CARRY_PROB, rng)
        found.append(names["my_reward"](completion, answer))
        assert found[-1] == rewards.arithmetic_reward(completion, answer)
    assert 0.1 < sum(found) / 200 < 0.9
    assert names["my_reward"]("7+9=16", "") is None
    inspect.signature(train.cli).bind(names["my_reward"])
    assert "train.cli(my_reward)" in REWARD


def test_weighted_reward_of_the_readme(run, tmp_path):
    """It trains on a file. Catches a renamed column or function, and a reward without its row."""
    names = {"__name__": "myreward"}
    exec(WEIGHTED, names)
    reward = names["right_and_short"]
    long = {"problem": "1+6?"}
    assert reward("\\boxed{7}", "7", long) == pytest.approx(1.0)
    assert reward("\\boxed{8}", "7", long) == pytest.approx(0.1)
    assert reward("." * 40 + "\\boxed{7}", "7", long) == pytest.approx(0.9)
    assert reward("\\boxed{7}", "", long) is None
    (tmp_path / "file.jsonl").write_text('{"problem": "1+6?", "answer": "7"}\n' * 8)
    log = run("run", reward=reward, data=str(tmp_path / "file.jsonl"), steps=1, eval_every=1)
    assert 0 <= log[1]["reward"] <= 0.1
    assert "eval/avg@4" in log[1]


def test_rules_and_loss_of_the_readme(policy_folder, tmp_path, capsys):
    """Word for word: a program trains with them, and proof.py proves them. Catches a renamed
    argument, a rule that the method does not pick, and one that drops nothing."""
    assert "python mine.py --method mine --loss unclipped" in README
    assert "`python proof.py mine.py`" in README
    code = RULES.replace("train.cli()", 'train.cli(lambda text, answer: float(text[:1] < "@"))')
    sizes = {"prompts_per_step": 64, "steps": 10, "data": "arithmetic"}
    own = {"method": "mine", "loss": "unclipped"}
    done = program(tmp_path, code, *toy.flags(policy_folder, str(tmp_path / "run"), **own, **sizes))
    assert "prompt rule mine, completion rule mine" in done.stdout, done.stderr
    log = toy.rows(tmp_path / "run")
    assert all(0 < row["kept/completions"] < 1 for row in log)
    assert {round(row["weight/max"], 3) for row in log} >= {round(1 / 0.3, 3)}

    (tmp_path / "mine.py").write_text(RULES)
    proof.main(str(tmp_path / "mine.py"))
    unbiased = capsys.readouterr().out.split("\nbiased")[0].splitlines()
    assert unbiased[4].split()[-1] == "unclipped"
    lines = [line.split() for line in unbiased if line.startswith("  mine ")]
    assert len(lines) == 2, "at both levels"
    lines += [line.split()[-1:] for line in unbiased[6:] if "e-" in line]  # the loss, every rule
    assert all(float(error) < 1e-10 for line in lines for error in line if error != "mine")


# ---------------------------------------------------------------------------- entries


def completions():
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]).double()
    return dppo.Completions(advantages, advantages, ones((2, 4)), advantages.abs())


def token_loss(_rate=None):
    clip = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    return dppo.token_loss(*[torch.zeros(3)] * 3, torch.zeros(3).long(), loss="mine", **clip)


def make_rule(keep_prob=None, rate=0.5, **options):
    if keep_prob:
        return dppo.by_probability(keep_prob, rate=rate, **options)
    return dppo.Rule(rate=rate, **options)


KINDS = {  # its table, its class, and a call that uses the entry `mine`
    "completion rule": (
        dppo.COMPLETION_RULES, make_rule,
        lambda rate: dppo.prune_completions("mine", rate, completions(), dppo.generator_for(0)),
    ),
    "prompt rule": (
        sampler.PROMPT_RULES, make_rule,
        lambda rate: sampler.PromptHistory(2).prune(
            "mine", rate, torch.arange(2), dppo.generator_for(0)),
    ),
    "loss": (dppo.LOSSES, dppo.Loss, token_loss),
}  # fmt: skip
BOTH, LOSS = ("completion rule", "prompt rule"), ("loss",)
gives = lambda value, **options: {"keep_prob": lambda batch, *_: value(batch)} | options
selects = lambda value: {"draw": lambda *_: value(), "biased": "it picks"}
loses = lambda value: {"surrogate": lambda *_: value(), "denominator": "constant"}
shape = r"must return probabilities of shape "
pair = r"must return \(keep, weights\), both of shape \["
two = r"must return \(loss, clipped\), two tensors of shape \[3\]"
like = lambda batch: ones(batch.live.shape)
times = lambda number, **options: gives(lambda batch: like(batch) * number, **options)
none = r"must return .*, but (\d) of \1 are.*biased="
ENTRIES = [  # kinds, the entry, the rate, the message if it is wrong
    (BOTH, gives(lambda batch: like(batch)[:1]), 0.5, shape + r"\[.*, not \[1"),
    (BOTH, times(1.5), 0.5, shape + ".*, from 0 to 1, not 1.5"),
    (BOTH, times(torch.nan), 0.5, shape + ".*, from 0 to 1, not nan"),
    (BOTH, times(0.0), 0.5, none),
    (BOTH, times(0.5), 0.0, shape + ".*, of 1 at prune rate 0"),
    (BOTH, times(0.5, rate=None), 0.0, None),
    (BOTH, times(0.0, biased="it keeps nothing"), 0.5, None),
    (BOTH[:1], gives(lambda batch: batch.live.double()), 0.5, None),
    (BOTH, selects(lambda: ones(2)), 0.5, pair),
    (BOTH, selects(lambda: (ones(2) > 0, ones(9))), 0.5, pair),
    (BOTH, selects(lambda: [ones(2)] * 2), 0.5, pair),
    (LOSS, loses(lambda: (ones(1).sum(), ones(3) > 0)), None, two),
    (LOSS, loses(lambda: ones(3)), None, two),
    (LOSS, loses(lambda: None), None, two),
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
    with pytest.raises(dppo.RuleError, match=f"^{kind} 'mine' {message}"):
        use(rate)


@pytest.mark.parametrize(
    ("kind", "make"), [*itertools.product(BOTH, (gives, selects)), ("loss", loses)]
)
def test_an_exception_keeps_its_traceback(kind, make):
    """It comes through as it is, with a note that names the entry."""
    table, entry, use = KINDS[kind]
    table["mine"] = entry(**make(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError) as caught:
        use(0.5)
    assert caught.value.__notes__ == [f"(in the {kind} 'mine')"]
    assert "1 / 0" in str(caught.traceback[-1].statement)


plain = lambda ratio, logprobs, advantages, *_: (-ratio * advantages, ratio < 0)
everything = lambda batch, *_: (batch.live | True, ones(batch.live.shape))
REFUSED = [  # a table, its entry `mine`, flags, the message
    (dppo.COMPLETION_RULES, everything, {"method": "mine"},
     "is a function: give it to dppo.by_prob"),
    (dppo.COMPLETION_RULES, dppo.by_probability(everything, rate=0.5), {"method": "mime"},
     "--method mime: choose one of grpo, .*, pps,.* mine"),
    (dppo.LOSSES, dppo.Loss(plain, "tokens"), {"loss": "mine"},
     r"unknown denominator \(loss 'mine'\) 'tokens': choose one of own length, constant"),
    (dppo.LOSSES, dppo.Loss(plain, "constant", scale_rewards="std"), {"loss": "mine"},
     r"scale_rewards \(loss 'mine'\) 'std': choose one of"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "entry", "flags", "message"), REFUSED)
def test_entries_that_no_run_accepts(table, entry, flags, message):
    """Before anything is loaded. Catches an AttributeError in place of the remedy."""
    table["mine"] = entry
    with pytest.raises(ValueError, match=message):
        config.resolve(config.Config(**flags))


def test_entries_that_nothing_accepts():
    dppo.LOSSES["mine"] = dppo.Loss(plain, "tokens")
    with pytest.raises(dppo.RuleError, match="unknown denominator"):
        dppo.loss_scale(ones((1, 1)), "mine", num_sequences=1, max_new_tokens=1, num_tokens=1)
    with pytest.raises(dppo.RuleError, match=r"draws without keep prob.*say in its biased="):
        dppo.Rule(everything, rate=0.5)


rule = make_rule(**times(1.0))
picky = dppo.Rule(everything, rate=0.5, biased="it keeps all")
MINE = {"completion_rule": "mine"}
NOTES = [  # the completion rule `mine`, flags, a note of the first lines, the prompt rule
    (rule, MINE | {"method": "dppo"}, "prompts are pruned, too: by dppo", "dppo"),
    (rule, {"method": "dppo"}, "", "dppo"),
    (rule, {"method": "mine"}, "", "none"),
    (rule, MINE | {"method": "grpo"}, "", "none"),
    (rule, MINE | {"method": "dppo", "prompt_rule": "none"}, "", "none"),
    (rule, MINE | {"method": "dppo", "prompt_rule": "uniform"}, "", "uniform"),
    (picky, {"method": "mine"}, "changes the expected gradient: it keeps all", "none"),
]


@pytest.mark.parametrize(("entry", "flags", "note", "prompt_rule"), NOTES)
def test_notes_of_the_first_lines(entry, flags, note, prompt_rule):
    """Catches a note that is missing or wrong, and a method that picks another prompt rule."""
    dppo.COMPLETION_RULES["mine"] = entry
    cfg = config.resolve(config.Config(**flags))
    said = [line for line in config.warnings(cfg) if "pruned" in line or "gradient" in line]
    assert [note in line for line in said] == ([True] if note else [])
    assert cfg.prompt_rule == prompt_rule


@pytest.mark.parametrize(
    ("denominator", "prompt_rule", "rate", "known_before"),
    [
        ("batch tokens", "uniform", 0.5, True), ("batch tokens", "uniform", 0.0, False),
        ("batch tokens", "mine", 0.0, True), ("own length", "uniform", 0.5, False),
    ],
)  # fmt: skip
def test_the_count_of_tokens_is_known_before_the_draw(
    policy_folder, tmp_path, denominator, prompt_rule, rate, known_before
):
    """Where a loss divides by the batch's tokens and prompts are pruned, also by a rule without a
    rate. Catches a denominator that the draw decides, which proof.py cannot see in a run."""
    sampler.PROMPT_RULES["mine"] = dppo.by_probability(lambda *_: ones(4) / 2, rate=None)
    dppo.LOSSES["mine"] = dppo.Loss(plain, denominator)
    options = {"prompt_rule": prompt_rule, "prompt_prune_rate": rate, "loss": "mine"}
    args = toy.flags(policy_folder, str(tmp_path / "run"), method="grpo", **options)
    trainer = train.Trainer(config.parse_config(args), toy.toy_reward)
    assert trainer.needs_mean_tokens == known_before
    all_are_kept = known_before or rate == 0.0
    assert (trainer.step(1)[0]["kept/prompts"] == 1.0) == all_are_kept


# ---------------------------------------------------------------------------- the proof

HEAD = "import dppo, sampler\n"
FILES = [  # a file, and what proof.py says of it
    ("import dppo\n", r"adds no rule and no loss"),
    ("import train\ntrain.cli()\n", r"starts a run when it is imported: put train.cli\(\)"),
    (None, r"mine.py is not a Python file"),
    (HEAD + "dppo.LOSSES['mean'] = dppo.Loss(lambda ratio, logprobs, advantages, *_: (-ratio * "
     "(advantages - advantages.mean()), ratio < 0), 'own length')\n",
     r"NOT unbiased: zero with mean, .*A loss that is off in every row"),
    (HEAD + "dppo.LOSSES['mine'] = dppo.Loss(lambda ratio, logprobs, advantages, *_: (-ratio * "
     "advantages / len(ratio), ratio < 0), 'constant')\n", "NOT unbiased: zero with mine"),
    (HEAD + "dppo.COMPLETION_RULES['mine'] = dppo.by_probability(lambda batch, rate: "
     "(batch.size / batch.size.sum(1, keepdim=True)).clamp(max=1), rate=0.5)\n",
     "completion rule 'mine' must return .* not nan"),  # dead groups
    (HEAD + "sampler.PROMPT_RULES['mine'] = dppo.by_probability(lambda batch, rate: "
     "batch.past_advantage.clamp(0.1, 1), rate=0.5)\n",
     "prompt rule 'mine' must return .* not nan"),  # new prompts
    (HEAD + "dppo.COMPLETION_RULES['mine'] = dppo.by_probability(lambda batch, rate: 1.0 - "
     "(rate > 0) * ((batch.rewards == 1) & (batch.cost > 100)).double(), rate=0.5)\n",
     r"'mine' .*above 0 .*, but \d+ of \d+ are 0 there"),  # only in batches of long completions
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILES)
def test_what_the_proof_refuses(tmp_path, monkeypatch, text, message):
    """Catches an error of 1e+00 under the heading "unbiased" and exit status 0, and a proof that
    approves what a run's first steps would refuse."""
    monkeypatch.setattr(sys, "argv", ["proof.py", "--nonsense"])
    if text:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises((SystemExit, dppo.RuleError), match=message):
        proof.main(str(tmp_path / "mine.py"))


# ---------------------------------------------------------------------------- runs


SILENT = [  # a reward, flags, the note
    (lambda *_: 0.0, {}, "the gradient was 0 for 5 steps, so nothing was learned"),
    (lambda *_: None, {"method": "pps"}, "the gradient was 0 for 5 steps"),
    (toy.toy_reward, {}, None),
    # a reward that forgets to return, and one that cannot score some problems
    (lambda text, _: 1.0 if text[:1] < "@" else None, {"steps": 3}, "the reward is None for some"),
    (lambda _, answer: None if int(answer) % 2 else 1.0, {"steps": 3}, None),
]


@pytest.mark.parametrize(("reward", "flags", "text"), SILENT)
def test_a_run_without_signal_says_so(run, tmp_path, capsys, reward, flags, text):
    """Once, after five steps in a row. Catches a run that trains nothing without a word, and a note
    for a run whose groups are live."""
    run("run", reward=reward, **{"steps": 12} | flags)
    lines = capsys.readouterr().out.splitlines()
    places = [i for i, line in enumerate(lines) if re.match("note: the (gradient|reward)", line)]
    assert len(places) == bool(text)
    for i in places:
        assert text in lines[i]
        if "gradient" in text:
            assert lines[i - 1].startswith("step  5/12")
            assert str(tmp_path / "run" / "samples.jsonl") in lines[i]


def test_folders_that_hold_something_else(run, policy_folder, tmp_path):
    """Catches a run that starts in a folder of checkpoints without a log, in an evaluation's, or in
    one that another process has, and a --resume that starts or does nothing."""

    def refused(message, name, **options):
        with pytest.raises(InputError, match=message):
            run(name, **options)

    refused(r"--resume: .*elsewhere holds no run: give the --out-dir", "elsewhere", resume=True)
    assert not (tmp_path / "elsewhere").exists()
    for schedule, way_out in (("linear", "$"), ("constant", ", or give more --steps$")):
        options = {"steps": 3, "save_every": 3, "lr_schedule": schedule}
        run(schedule, **options)
        ended = f"has ended after its 3 steps: use another --out-dir{way_out}"
        refused(ended, schedule, resume=True, **options)
    log = run("constant", resume=True, **options | {"steps": 4})
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    (tmp_path / "constant" / "log.jsonl").unlink()
    refused("holds a run: give --resume to continue it", "constant", steps=2, seed=1)

    evals = {"out_dir": str(tmp_path / "evals"), "problems": 1, "k": 1, "max_new_tokens": 2}
    evaluation.main(evaluation.EvalConfig(policy_folder, **evals))
    for resume in ({}, {"resume": True}):
        refused(r"holds an evaluation \(.*config.json\): use another", "evals", **resume)
    with checkpoint.owned(tmp_path / "held"):
        refused("held is in use by another process", "held")
        held = evaluation.EvalConfig(policy_folder, **evals | {"out_dir": str(tmp_path / "held")})
        with pytest.raises(InputError, match="held is in use by another process"):
            evaluation.main(held)


def test_each_group_has_its_own_rate(run, monkeypatch):
    """An optimizer with two groups, of which one has a tenth of --lr; also after a resume. Catches
    a schedule for the first group only, and one that goes on from the last step's rates."""
    rates = []

    def make_optimizer(cfg, parameters):
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others, "lr": cfg.lr / 10}]
        optimizer = torch.optim.AdamW(groups, lr=cfg.lr)
        show = lambda *_: rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.register_step_pre_hook(show)
        return optimizer

    monkeypatch.setattr(models, "make_optimizer", make_optimizer)
    options = {"steps": 6, "warmup": 3, "lr": 0.3, "lr_schedule": "cosine", "save_every": 2}
    run("whole", **options)
    whole, cfg = rates.copy(), config.Config(**options)
    expected = [config.learning_rate(cfg, step, cfg.lr) for step in range(1, 7)]
    assert [first for first, _ in whole] == expected
    assert [other for _, other in whole] == pytest.approx([rate / 10 for rate in expected])
    run("part", until=4, **options)
    run("part", resume=True, **options)
    assert rates == whole * 2


@pytest.mark.parametrize(("save_every", "ending"), [(0, "run.png"), (2, "checkpoint/")])
def test_the_last_line_names_no_old_checkpoint(run, tmp_path, capsys, save_every, ending):
    """Without --save-every only a stop saves. Catches a line that calls it the end's."""
    run("run", steps=3, until=1, save_every=save_every)
    assert (tmp_path / "run" / "checkpoint").exists()
    run("run", steps=3, save_every=save_every, resume=True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("done: ")
    assert last.endswith(ending)


# ---------------------------------------------------------------------------- the core


def test_the_core_imports_no_rival(policy_folder, tmp_path):
    """In a run of pps; with cppo, whether the method or a rule, they are there."""
    pps = toy.flags(policy_folder, str(tmp_path / "run"), method="pps")
    code = f"""import sys; sys.path.insert(0, {str(toy.ROOT / "tests")!r}); import toy, config
rivals = lambda: sum(name.startswith("related") for name in sys.modules)
toy.main({pps!r}); print("rivals", rivals())
config.resolve(config.Config(completion_rule="cppo_batch")); print("rivals", rivals())
"""
    done = program(tmp_path, code)
    said = [line for line in done.stdout.splitlines() if line.startswith("rivals")]
    assert said == ["rivals 0", "rivals 2"], done.stderr
    names = {*sampler.PROMPT_RULES, *dppo.COMPLETION_RULES, *dppo.LOSSES}  # rivals, too
    missing = [n for n in names if not re.search(rf"\b{n}\b", inspect.getsource(config.Config))]
    assert not missing, "--help names every rule and loss"
