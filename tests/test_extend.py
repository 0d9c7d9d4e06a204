"""What a user adds works, or says why not: rewards, rules and losses, from the README and wrong."""

import copy
import inspect
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
REWARD, RULES = re.findall(r"^```python\n(import .*?)^```$", README, re.DOTALL | re.MULTILINE)
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


def program(folder, code, *args, launcher=()):
    """Run `code` as a program beside train.py, as the README says; returns the process."""
    (folder / "mine.py").write_text(code)
    command = [sys.executable, *launcher, str(folder / "mine.py"), *args]
    environment = {"PYTHONPATH": str(toy.ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


# ---------------------------------------------------------------------------- the README's snippets


def test_reward_of_the_readme():
    """It agrees with the embedded task's own reward on what the base model imitates, so training
    with it is training. Catches a reward that is 0 forever, as an earlier README's was."""
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


def test_rules_and_loss_of_the_readme(policy_folder, tmp_path, capsys):
    """Word for word: trained with --method mine --loss unclipped as a program, and proven by
    proof.py. Catches a renamed argument, a rule that the method does not pick, and one that drops
    nothing."""
    command = "torchrun mine.py --method mine --loss unclipped"
    assert command in README
    assert "`python proof.py mine.py`" in README
    flags = toy.flags(policy_folder, str(tmp_path / "run"), method="mine", loss="unclipped")
    code = RULES.replace("train.cli()", 'train.cli(lambda text, answer: float(text[:1] < "@"))')
    more = ["--prompts-per-step", "64", "--steps", "10", "--data", "arithmetic"]
    done = program(tmp_path, code, *flags, *more)
    assert done.returncode == 0, done.stderr
    log = toy.rows(tmp_path / "run")
    assert "prompt rule mine, completion rule mine" in done.stdout
    assert all(0 < row["kept/completions"] < 1 for row in log)
    assert {round(row["weight/max"], 3) for row in log} >= {round(1 / 0.3, 3)}

    (tmp_path / "mine.py").write_text(RULES)
    proof.main(str(tmp_path / "mine.py"))
    printed = capsys.readouterr().out
    assert printed.splitlines()[4].split()[-1] == "unclipped"
    lines = re.findall(r"^  mine  +(.*)$", printed.split("\nbiased")[0], re.MULTILINE)
    assert len(lines) == 2, "at both levels"
    assert all(float(error) < 1e-10 for line in lines for error in line.split())
    own_column = [line.split()[-1] for line in printed.split("\nbiased")[0].splitlines()[6:]]
    assert all(float(error) < 1e-10 for error in own_column if "e-" in error)


def test_a_reward_that_fails_keeps_its_traceback(run):
    """Catches a run that calls another FloatingPointError than its own a step that is not finite,
    and hides the line where it was raised."""

    def reward(_text, _answer):
        raise FloatingPointError("divide by zero encountered")

    with pytest.raises(FloatingPointError, match="divide by zero") as caught:
        run("run", reward=reward)
    assert not isinstance(caught.value, InputError)
    assert "raise FloatingPointError" in str(caught.traceback[-1].statement)


# ---------------------------------------------------------------------------- rules that are wrong


def completions():
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]).double()
    return dppo.Completions(advantages, advantages, ones((2, 4)), advantages.abs())


WRONG = [
    (lambda shape: ones(shape)[:1], r"must return probabilities of shape \[.*, not \[1"),
    (lambda shape: ones(shape) * 1.5, r"must return .*, from 0 to 1, not 1.5"),
    (lambda shape: ones(shape) * torch.nan, r"must return .*, from 0 to 1, not nan"),
    (lambda shape: ones(shape) * 0.0, r"must return .*, above 0 .*biased="),
]


@pytest.mark.parametrize(("result", "message"), WRONG)
def test_wrong_rules(result, message):
    """At both levels. Catches a rule that is biased, or that fails deep inside a draw."""
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(lambda batch, rate: result((2, 4)))
    with pytest.raises(dppo.RuleError, match="completion rule 'mine' " + message):
        dppo.prune_completions("mine", 0.5, completions(), dppo.generator_for(0))
    sampler.PROMPT_RULES["mine"] = sampler.PromptRule(lambda *_: result((2,)))
    history = sampler.PromptHistory(2)
    with pytest.raises(dppo.RuleError, match="prompt rule 'mine' " + message):
        history.prune("mine", 0.5, torch.arange(2), dppo.generator_for(0))


def test_the_proof_looks_beyond_its_batch():
    """A rule that never keeps long right answers, which the enumerated batch does not have. Catches
    a proof that approves what a run refuses."""

    def long_right_ones(batch, prune_rate):
        dropped = (batch.rewards == 1) & (batch.cost > 100)
        return 1.0 - (prune_rate > 0) * dropped.double()

    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(long_right_ones)
    assert proof.completion_rule_error("mine", "grpo") < 1e-10
    with pytest.raises(dppo.RuleError, match=r"'mine' .*above 0 .*; \d+ of \d+ are 0 there"):
        proof.try_larger_batches("mine")
    with pytest.raises(dppo.RuleError, match="'mine'"):
        proof.main()


def test_an_exception_keeps_its_traceback():
    """What a rule or a loss raises comes through as it is, with a note that names it. Catches a
    handler that hides the line where it failed."""
    fails = lambda *_: 1 / 0
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(fails)
    dppo.COMPLETION_RULES["picks"] = dppo.CompletionRule(None, select=fails, biased="it picks")
    sampler.PROMPT_RULES["mine"] = sampler.PromptRule(fails)
    sampler.PROMPT_RULES["picks"] = sampler.PromptRule(None, select=fails, biased="it picks")
    dppo.LOSSES["mine"] = dppo.Loss(fails, "constant")
    history = sampler.PromptHistory(2)
    clip = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    calls = {
        "completion rule 'mine'": lambda: dppo.completion_keep_prob("mine", 0, completions()),
        "completion rule 'picks'": lambda: dppo.prune_completions("picks", 0, completions(), None),
        "prompt rule 'mine'": lambda: history.keep_prob("mine", 0, torch.arange(2)),
        "prompt rule 'picks'": lambda: history.prune("picks", 0, torch.arange(2), None),
        "loss 'mine'": lambda: dppo.token_loss(
            *[torch.zeros(3)] * 3, torch.zeros(3).long(), loss="mine", **clip
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ZeroDivisionError) as caught:
            call()
        assert caught.value.__notes__ == [f"(in the {name})"]
        assert "fails = lambda" in str(caught.traceback[-1].statement)


def test_a_selection_is_a_pair():
    """Catches an unpacking error that names no rule, and weights of another shape."""
    batch, history = completions(), sampler.PromptHistory(2)
    shape = batch.size.shape
    for found in (ones(shape), (ones(shape) > 0, ones(shape[:1])), [ones(shape)] * 2):
        picks = lambda *_, found=found: found
        dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(None, select=picks, biased="it picks")
        sampler.PROMPT_RULES["mine"] = sampler.PromptRule(None, select=picks, biased="it picks")
        with pytest.raises(dppo.RuleError, match=r"completion rule 'mine' must select \(keep, wei"):
            dppo.prune_completions("mine", 0.5, batch, None)
        with pytest.raises(dppo.RuleError, match=r"prompt rule 'mine' must select .* shape \[2\]"):
            history.prune("mine", 0.5, torch.arange(2), None)


def test_zeros_that_are_allowed():
    """Where a term is exactly 0, and where the entry says that the rule is biased. Catches a check
    that refuses pps's own zeros."""
    live_only = lambda batch, rate: (batch.size > 0).double()
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(live_only)
    keep, weights = dppo.prune_completions("mine", 0.5, completions(), dppo.generator_for(0))
    assert keep.tolist() == [[True] * 4, [False] * 4]
    nothing = lambda batch, rate: torch.zeros_like(batch.size)
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(nothing, biased="it keeps nothing")
    keep, weights = dppo.prune_completions("mine", 0.5, completions(), dppo.generator_for(0))
    assert not keep.any()
    assert not weights.any()


def test_a_rule_that_ignores_its_rate():
    """At rate 0 the identity is promised, and dapo's denominator relies on it. Catches a rule that
    drops there; rate=None says that it has no rate."""
    half = lambda *_: torch.full((2,), 0.5)
    history = sampler.PromptHistory(2)
    sampler.PROMPT_RULES["mine"] = sampler.PromptRule(half)
    with pytest.raises(dppo.RuleError, match=r"of 1 at prune rate 0, not 0.5. .*rate=None"):
        history.keep_prob("mine", 0.0, torch.arange(2))
    sampler.PROMPT_RULES["mine"] = sampler.PromptRule(half, rate=None)
    assert history.keep_prob("mine", 0.0, torch.arange(2)).tolist() == [0.5, 0.5]
    half = lambda batch, rate: 0.5 * ones(batch.size.shape)
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(half)
    with pytest.raises(dppo.RuleError, match=r"of 1 at prune rate 0, not 0.5. .*rate=None"):
        dppo.completion_keep_prob("mine", 0.0, completions())


def test_methods_and_rules_of_yours():
    """--method takes the rules of its name at both levels; a rule keeps the method's other one."""
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(lambda batch, rate: ones(batch.size.shape))
    found = config.resolve(config.Config(method="mine"))
    assert (found.prompt_rule, found.completion_rule, found.completion_prune_rate) == (
        "none", "mine", 0.7,
    )  # fmt: skip
    found = config.resolve(config.Config(method="dppo", completion_rule="mine"))
    assert (found.prompt_rule, found.completion_rule) == ("dppo", "mine")
    with pytest.raises(InputError, match=r"--method mime: choose one of grpo, .*, pps,.* mine"):
        config.resolve(config.Config(method="mime"))


# ---------------------------------------------------------------------------- losses


def plain(ratio, logprobs, advantages, eps_low, eps_high):
    return -ratio * advantages, ratio < 0


def test_a_loss_needs_a_kind_of_denominator():
    """Catches a loss that falls through to another's count."""
    with pytest.raises(TypeError, match="denominator"):
        dppo.Loss(plain)
    dppo.LOSSES["mine"] = dppo.Loss(plain, "tokens")
    message = "unknown denominator \\(loss 'mine'\\) 'tokens': choose one of own length, constant"
    counts = {"num_sequences": 1, "max_new_tokens": 1, "num_tokens": 1}
    with pytest.raises(dppo.RuleError, match=message):
        dppo.loss_scale(torch.ones(1, 1), "mine", **counts)
    with pytest.raises(dppo.RuleError, match=message):
        config.resolve(config.Config(loss="mine"))


@pytest.mark.parametrize(
    ("surrogate", "message"),
    [
        (lambda ratio, *_: (ratio.sum(), ratio > 1), "must return (loss, clipped), two tensors of"),
        (lambda ratio, *_: ratio, "must return (loss, clipped), two tensors of shape [3]"),
        (lambda ratio, *_: None, "must return (loss, clipped), two tensors of shape [3]"),
    ],
)
def test_a_loss_that_returns_nonsense(surrogate, message):
    """Catches an error from deep inside an update."""
    dppo.LOSSES["mine"] = dppo.Loss(surrogate, "constant")
    clip = {"eps_low": 0.2, "eps_high": 0.2, "num_sequences": 1}
    with pytest.raises(dppo.RuleError, match=re.escape(f"loss 'mine' {message}")):
        dppo.token_loss(*[torch.zeros(3)] * 3, torch.zeros(3).long(), loss="mine", **clip)


@pytest.mark.parametrize(
    ("denominator", "prompt_rule", "rate", "known_before"),
    [
        ("batch tokens", "uniform", 0.5, True), ("batch tokens", "uniform", 0.0, False),
        ("batch tokens", "mine", 0.0, True), ("batch tokens", "none", 0.0, False),
        ("own length", "uniform", 0.5, False), ("constant", "mine", 0.0, False),
    ],
)  # fmt: skip
def test_the_count_of_tokens_is_known_before_the_draw(
    policy_folder, tmp_path, denominator, prompt_rule, rate, known_before
):
    """Where a loss divides by the batch's tokens and prompts are pruned, also by a rule without a
    rate. Catches a denominator that the draw decides, which proof.py cannot see in a run."""
    half = lambda score, _rate: torch.full((len(score),), 0.5)
    sampler.PROMPT_RULES["mine"] = sampler.PromptRule(half, rate=None)
    dppo.LOSSES["mine"] = dppo.Loss(plain, denominator)
    options = {"method": "grpo", "prompt_rule": prompt_rule, "loss": "mine"}
    options |= {"prompt_prune_rate": rate}
    args = toy.flags(policy_folder, str(tmp_path / "run"), **options)
    trainer = train.Trainer(config.parse_config(args), toy.toy_reward)
    assert trainer.needs_mean_tokens == known_before
    all_are_kept = known_before or prompt_rule == "none" or (prompt_rule, rate) == ("uniform", 0.0)
    assert (trainer.step(1)[0]["kept/prompts"] == 1.0) == all_are_kept


def test_the_proof_sees_a_ratio():
    """A loss that divides by the tokens that it is given is biased, and the enumeration shows it.
    Catches a proof whose outcomes all have as many tokens."""

    def ratio_of_kept(ratio, *others):
        loss, clipped = plain(ratio, *others)
        return loss / len(ratio), clipped

    dppo.LOSSES["mine"] = dppo.Loss(ratio_of_kept, "constant")
    case = proof.toy_case("mine")
    assert proof.relative_error(proof.expected_gradient(case, "pps", 0.6), case.full()) > 1e-2
    assert proof.relative_error(*proof.both_levels("mine", "uniform", "none", 0.4)) > 1e-2
    dppo.LOSSES["mine"] = dppo.Loss(plain, "constant")
    assert proof.relative_error(*proof.both_levels("mine", "uniform", "none", 0.4)) < 1e-12


# ---------------------------------------------------------------------------- runs that cannot be


def test_a_run_without_signal_says_so(run, tmp_path, capsys):
    """After five steps in a row, with what the rewards were. Catches a run that trains nothing
    without a word, a note at every step, and one for a run whose groups are live."""

    def notes(name, reward, **options):
        run(name, reward=reward, steps=12, **options)
        printed = capsys.readouterr().out.splitlines()
        found = [place for place, line in enumerate(printed) if "nothing was learned" in line]
        return [printed[place] for place in found], [printed[place - 1] for place in found]

    (note,), (before,) = notes("zero", lambda text, answer: 0.0)
    assert before.startswith("step  5/12")
    assert "nothing was learned (mean reward 0.000)" in note
    assert "the reward never finds the answer" in note
    assert str(tmp_path / "zero" / "samples.jsonl") in note
    (note,), _ = notes("one", lambda text, answer: 1.0, method="pps")
    assert "nothing was learned (mean reward 1.000). Likely cause: each problem is too" in note
    (note,), _ = notes("none", lambda text, answer: None)
    assert "no reference answer can be scored" in note
    (note,), _ = notes("masked", toy.toy_reward, mask_truncated=True, max_new_tokens=1)
    assert "--max-new-tokens cuts off all completions" in note
    assert notes("live", toy.toy_reward) == ([], [])


def test_nothing_to_resume(run, tmp_path):
    """Catches --resume that starts a fresh run, and one that has ended and does nothing."""
    with pytest.raises(InputError, match=r"--resume: .*elsewhere holds no run: give the --out-dir"):
        run("elsewhere", resume=True)
    assert not (tmp_path / "elsewhere").exists()
    run("run", steps=3, save_every=3, lr_schedule="linear")
    with pytest.raises(InputError, match=r"has ended after its 3 steps: give more --steps, or use"):
        run("run", steps=3, save_every=3, lr_schedule="linear", resume=True)
    run("constant", steps=3, save_every=3, lr_schedule="constant")
    log = run("constant", steps=4, save_every=3, lr_schedule="constant", resume=True)
    assert [row["step"] for row in log] == [1, 2, 3, 4]


def test_resume_auto(run, tmp_path):
    """The same command starts a run, continues it, and does nothing once it has ended. Catches a
    requeued job that overwrites its run, or fails because the run has ended."""
    once = lambda until=None: run("run", steps=3, save_every=2, resume="auto", until=until)
    assert [row["step"] for row in once(until=1)] == [1]
    first = toy.rows(tmp_path / "run")[0]
    assert [row["step"] for row in once()] == [1, 2, 3]
    assert toy.rows(tmp_path / "run")[0] == first, "with its times: it was not run again"
    assert len(once()) == 3
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(InputError, match="run holds a run: give --resume"):
        once()


def test_folders_that_hold_something_else(run, policy_folder, tmp_path):
    """Catches a run that starts in a folder of checkpoints without a log, in an evaluation's, or in
    one that another process has."""
    run("run", steps=2, save_every=2)
    (tmp_path / "run" / "log.jsonl").unlink()
    with pytest.raises(InputError, match=r"holds a run: give --resume to continue it"):
        run("run", steps=2, seed=1)
    options = {"out_dir": str(tmp_path / "evals"), "problems": 1, "k": 1, "max_new_tokens": 2}
    evaluation.main(evaluation.EvalConfig(policy_folder, **options))
    for resume in ([], ["--resume"]):
        with pytest.raises(InputError, match=r"holds an evaluation \(.*config.json\): use another"):
            toy.main([*toy.flags(policy_folder, str(tmp_path / "evals")), *resume])
    with checkpoint.owned(tmp_path / "held"):
        with pytest.raises(InputError, match="held is in use by another process"):
            run("held")
        options["out_dir"] = str(tmp_path / "held")
        with pytest.raises(InputError, match="held is in use by another process"):
            evaluation.main(evaluation.EvalConfig(policy_folder, **options))


def test_a_folder_without_a_step_is_free(run, tmp_path):
    """After an error before the first step. Catches a second try that needs another folder."""
    with pytest.raises(ZeroDivisionError):
        run("run", reward=lambda text, answer: 1 / 0)
    assert (tmp_path / "run" / "config.json").exists()
    assert len(run("run", steps=2)) == 2
    with pytest.raises(InputError, match="holds a run"):
        run("run", steps=2)


def test_a_reward_that_forgets_to_return(run, capsys):
    """A note, once, if None comes back for some completions of a prompt. Catches the commonest
    slip: a run whose every reward is 1, and which learns nothing."""

    def forgets(text, answer):
        if text[:1] < "@":
            return 1.0

    run("run", reward=forgets, method="grpo", steps=3)
    printed = capsys.readouterr().out
    assert printed.count("note: the reward is None for some completions") == 1
    run("none", reward=lambda text, answer: None if int(answer) % 2 else 1.0, steps=3)
    assert "None for some completions" not in capsys.readouterr().out


def test_verdict_of_the_proof(tmp_path, capsys, monkeypatch):
    """It fails for a file whose rule or loss is biased, and says so for one that adds nothing or
    starts a run. Catches an error of 1e+00 under the heading "unbiased" and exit status 0."""
    code = "import dppo\ndppo.LOSSES['mean'] = dppo.Loss(lambda ratio, logprobs, advantages, *_: "
    code += "(-ratio * (advantages - advantages.mean()), ratio < 0), 'own length')\n"
    monkeypatch.setattr(sys, "argv", ["proof.py", "--nonsense"])
    for text, message in (
        (code, r"NOT unbiased: zero with mean, .*A loss that is off in every row"),
        ("import dppo\n", r"adds no rule and no loss"),
        ("import train\ntrain.cli()\n", r"starts a run when it is imported: put train.cli\(\)"),
    ):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(SystemExit, match=message):
            proof.main(str(tmp_path / "mine.py"))
    with pytest.raises(SystemExit, match=r"nothere.py is not a Python file"):
        proof.main(str(tmp_path / "nothere.py"))
    assert "claimed to be unbiased" in capsys.readouterr().out


def test_the_proof_sees_dead_groups_and_unseen_prompts(tmp_path):
    """Rules that fail there would fail in a run's first steps. Catches a proof without them."""
    head = "import dppo, sampler\n"
    for text, kind in (
        ("dppo.COMPLETION_RULES['mine'] = dppo.CompletionRule(lambda batch, rate: "
         "(batch.size / batch.size.sum(1, keepdim=True)).clamp(max=1))\n", "completion rule"),
        ("sampler.PROMPT_RULES['mine'] = sampler.PromptRule(lambda score, rate: "
         "score.clamp(0.1, 1))\n", "prompt rule"),
    ):  # fmt: skip
        (tmp_path / "mine.py").write_text(head + text)
        with pytest.raises(dppo.RuleError, match=f"{kind} 'mine' must return .* not nan"):
            proof.main(str(tmp_path / "mine.py"))
        dppo.COMPLETION_RULES.pop("mine", None)


def test_entries_that_are_bare_functions():
    """Catches an AttributeError in place of the remedy."""
    dppo.COMPLETION_RULES["mine"] = lambda batch, rate: ones(batch.size.shape)
    with pytest.raises(InputError, match=r"entry 'mine' is a function: wrap it in a CompletionRul"):
        config.resolve(config.Config(method="mine"))


def test_a_rule_that_selects_says_what_it_is():
    """Catches one that changes the expected gradient without a word."""
    everything = lambda batch, rate: (batch.size >= 0, ones(batch.size.shape))
    for table, kind in (
        (dppo.COMPLETION_RULES, dppo.CompletionRule), (sampler.PROMPT_RULES, sampler.PromptRule)
    ):  # fmt: skip
        table["mine"] = kind(None, select=everything)
        with pytest.raises(InputError, match=r"'mine' selects by itself.*say in its biased="):
            config.resolve(config.Config(method="mine"))
        for biased in ("", "it keeps all"):
            table["mine"] = kind(None, select=everything, biased=biased)
            found = config.warnings(config.resolve(config.Config(method="mine")))
            assert any("changes the expected gradient" in note for note in found) == bool(biased)
        del table["mine"]


def test_notes_of_the_first_lines():
    """Catches a rule of one level that leaves the other one's pruning unsaid, a note for a method
    that was asked for, and a model that can only add."""
    dppo.COMPLETION_RULES["mine"] = dppo.CompletionRule(lambda batch, rate: ones(batch.size.shape))
    notes = lambda **given: " ".join(config.warnings(config.resolve(config.Config(**given))))
    assert "prompts are pruned, too: by dppo" in notes(method="dppo", completion_rule="mine")
    for given in (
        {"method": "dppo"}, {"method": "mine"}, {"method": "grpo", "completion_rule": "mine"},
        {"method": "dppo", "completion_rule": "mine", "prompt_rule": "none"},
        {"method": "dppo", "completion_rule": "mine", "prompt_rule": "uniform"},
    ):  # fmt: skip
        assert "prompts are pruned" not in notes(**given)
    assert "--model tiny can only add: name another model to learn from words" in notes(
        data="words"
    )
    assert "can only add" in notes(data="mine.jsonl", max_new_tokens=9)
    assert "can only add" not in notes(data="arithmetic-mixed")
    assert "can only add" not in notes(data="words", model="smollm2")


def test_each_group_has_its_own_rate(run, tmp_path, monkeypatch):
    """An optimizer with two groups, of which one has a tenth of --lr; also after a resume.

    Catches a schedule for the first group only, and one that goes on from the last step's rates.
    """
    rates = []

    class Shown(torch.optim.AdamW):
        def step(self):
            rates.append([group["lr"] for group in self.param_groups])
            super().step()

    def make_optimizer(cfg, parameters):
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others, "lr": cfg.lr / 10}]
        return Shown(groups, lr=cfg.lr)

    monkeypatch.setattr(models, "make_optimizer", make_optimizer)
    options = {"steps": 6, "warmup": 3, "lr": 0.3, "lr_schedule": "cosine", "save_every": 2}
    run("whole", **options)
    whole, cfg = rates.copy(), config.Config(**options)
    expected = [config.learning_rate(cfg, step, cfg.lr) for step in range(1, 7)]
    assert [first for first, _ in whole] == expected
    assert [other for _, other in whole] == pytest.approx([rate / 10 for rate in expected])
    rates.clear()
    run("part", until=4, **options)
    run("part", resume=True, **options)
    assert rates == whole


def test_the_last_line_names_no_old_checkpoint(run, tmp_path, capsys):
    """Without --save-every only a stop saves. Catches a line that calls it the end's."""
    run("run", steps=3, until=1)
    assert (tmp_path / "run" / "checkpoint").exists()
    run("run", steps=3, resume=True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("done: ")
    assert "checkpoint" not in last
    run("saved", steps=3, save_every=2)
    assert capsys.readouterr().out.splitlines()[-1].endswith("checkpoint/")


# ---------------------------------------------------------------------------- the core


def test_the_core_imports_no_rival(policy_folder, tmp_path):
    """In a run of pps, too; with cppo, whether the method or a rule, they are there. Catches an
    import that came back."""
    out = str(tmp_path / "run")
    flags = [
        toy.flags(policy_folder, out, **changes)
        for changes in (
            {"method": "pps"},
            {"method": "cppo"},
            {"method": "grpo", "completion_rule": "cppo_batch"},
        )
    ]
    code = f"""import sys; sys.path.insert(0, {str(toy.ROOT / "tests")!r}); import toy, config, dppo
def rivals():
    return [name for name in sys.modules if name.startswith("related")]
ours, (pps, *others) = {{**dppo.COMPLETION_RULES}}, {flags!r}
toy.main(pps)
print("rivals", len(rivals()))
for one in others:
    config.resolve(config.parse_config(one))
    print("rivals", "related.rivals" in rivals())
    for name in rivals():
        del sys.modules[name]
    dppo.COMPLETION_RULES.clear()
    dppo.COMPLETION_RULES.update(ours)
"""
    done = program(tmp_path, code)
    said = [line for line in done.stdout.splitlines() if line.startswith("rivals")]
    assert said == ["rivals 0", "rivals True", "rivals True"], done.stderr


def test_help_names_every_rule_and_loss():
    """Catches a rule of ours that --help does not mention. Rivals are in it, too."""
    names = {*sampler.PROMPT_RULES, *dppo.COMPLETION_RULES, *dppo.LOSSES}
    source = inspect.getsource(config.Config)
    for name in names - {"mine"}:
        assert re.search(rf"\b{name}\b", source), name
