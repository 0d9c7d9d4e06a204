"""Supervised training: the plain loss, runs that learn and resume, ranks that agree, bad input."""

import itertools
import json
import math
import os
import re
import runpy
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_packing import flat_grad, plain_logprobs
from toy import ROOT, assert_same, flags, in_processes, rows, timeless, toy_reward

import config
import data
import models
import rollout
import train
from runtime import InputError, ranks
from tasks import sft

# The last problem is held out, which leaves 12.
PROBLEMS = [
    {"problem": f"{'abc'[n % 3] * (n % 5 + 1)}{n}?", "answer": f"{n % 4 * 'so '}is \\boxed{{{n}}}"}
    for n in range(13)
]


def write(path, problems):
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    return str(path)


@pytest.fixture
def file(tmp_path):
    """The 13 problems as a JSON-lines file."""
    return write(tmp_path / "problems.jsonl", PROBLEMS)


def settings(file, **changes):
    options = {"data": (file,), "steps": 6, "batch_size": 4, "lr": 1e-3, "device": "cpu"}
    return sft.Config(**options | changes)


@pytest.fixture
def teach(policy_folder, file, tmp_path):
    """Train on the file, or other data, in this process; returns the log's rows."""

    def go(name, **changes):
        options = {"model": policy_folder, "out_dir": str(tmp_path / name)}
        sft.main(settings(file, **(options | changes)))
        return rows(tmp_path / name)

    return go


# ---------------------------------------------------------------------------- a step


def test_a_step_is_the_plain_computation(make_policy, file, monkeypatch):
    """Loss and gradient in float64 against transformers' own attention, problem by problem: with a
    slot for each of the 12, about four slots, and one slot. The gradient is clipped to norm 1.

    Catches a mean over a slot, a loss on the prompt, a lost slot, the gradient of an earlier step,
    and a norm that is not clipped.
    """
    model, tokenizer = make_policy(dtype=torch.float64)
    cfg = settings(file, batch_size=12)
    batch = sft.encode(cfg, tokenizer, 512)
    tokens = sum(len(solution) for _, solution in batch)
    loss = -sum(plain_logprobs(model, *pair)[0].sum() for pair in batch) / tokens
    loss.backward()
    gradient = flat_grad(model)
    norm = gradient.norm().item()
    clipped = gradient * min(1.0, 1.0 / norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for pack_tokens in (1, 320, 9999):
        monkeypatch.setattr(sft, "PACK_TOKENS", pack_tokens)
        row = sft.update(model, optimizer, batch, cfg, slice(None))
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert (flat_grad(model) - clipped).norm() < 1e-5 * clipped.norm()  # clipping adds 1e-6


def test_prompts_are_those_of_train(policy_folder, make_policy, file, tmp_path):
    """Plain and chat: the prompts that train.py would sample from, and each row's own solution,
    which ends with the end token.

    Catches a format that is not passed on, a solution without an end, and solutions of other rows.
    """
    _, tokenizer = make_policy()
    tokenizer.chat_template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    tokenizer.save_pretrained(policy_folder)
    found = {}
    for form in ("plain", "chat"):
        args = flags(policy_folder, str(tmp_path / "run"), data=file, prompt_format=form)
        trainer = train.Trainer(config.parse_config(args), toy_reward)
        pairs = sft.encode(settings(file, prompt_format=form), trainer.tokenizer, 512)
        prompts, solutions = zip(*pairs, strict=True)
        assert list(prompts) == trainer.train_ids
        assert {solution[-1] for solution in solutions} == {tokenizer.eos_token_id}
        texts = [tokenizer.decode(solution[:-1]) for solution in solutions]
        assert texts == [row["answer"] for row in PROBLEMS[:-1]]
        found[form] = prompts
    assert found["plain"] != found["chat"]


def test_problems_that_do_not_fit_are_left_out(make_policy, file):
    """A problem fits if prompt and solution together are as long as the model's context.

    Catches a limit on the prompt alone, and one that is off by a token.
    """
    _, tokenizer = make_policy()
    pairs = sft.encode(settings(file), tokenizer, 512)
    sizes = [len(prompt) + len(solution) for prompt, solution in pairs]
    longest = max(sizes)
    assert sft.encode(settings(file), tokenizer, longest) == pairs
    shorter = [pair for pair, size in zip(pairs, sizes, strict=True) if size < longest]
    assert sft.encode(settings(file), tokenizer, longest - 1) == shorter


# ---------------------------------------------------------------------------- a run


def test_it_learns(teach, tmp_path, monkeypatch):
    """Two problems are learned by heart: the loss falls, and the checkpoint, read as train.py reads
    it, completes both as taught.

    Catches the wrong sign of the loss, an update that is not applied, targets that are off by one,
    an end that is not learned, and a checkpoint of other weights.
    """
    monkeypatch.setattr(data, "INSTRUCTION", "")  # short prompts, which need few steps
    taught = {"aaaa": "a: \\boxed{1}", "bbbb": "b: \\boxed{2}", "held out": "c: \\boxed{3}"}
    problems = [{"problem": text, "answer": solution} for text, solution in taught.items()]
    file = write(tmp_path / "two.jsonl", problems)
    log = teach("run", data=(file,), batch_size=2, steps=80, lr=1e-2)
    assert log[0]["loss"] > 1
    assert log[-1]["loss"] < 0.1
    model, tokenizer = models.load_policy(str(tmp_path / "run" / "checkpoint"), "cpu")
    _, prompts = data.encode_prompts(data.sft_problems(file), tokenizer, 512)
    sampling = rollout.Sampling.for_policy(model, tokenizer, 30, temperature=0)
    found = rollout.sample(model, prompts, sampling, group_size=1, seed=0)
    pairs = zip(found.completion_ids[:, 0], found.lengths[:, 0], strict=True)
    said = [tokenizer.decode(ids[:length]) for ids, length in pairs]
    assert said == ["a: \\boxed{1}<|end|>", "b: \\boxed{2}<|end|>"]


def test_stopped_killed_and_resumed(teach, tmp_path, monkeypatch, capsys):
    """Stopped by SIGTERM in step 3, and killed in step 6, after the checkpoint of step 4: log and
    weights equal an uninterrupted run's bit for bit, times excepted.

    Catches a stop without a checkpoint, an optimizer that starts afresh, a step that is repeated or
    skipped, and rows that are written twice.
    """
    monkeypatch.setattr(sft, "SAVE_EVERY", 2)
    teach("whole", steps=8)
    calls, update = itertools.count(1), sft.update

    def interrupted(*args):
        call = next(calls)
        if call == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if call == 6:
            raise ConnectionError
        return update(*args)

    monkeypatch.setattr(sft, "update", interrupted)
    part = tmp_path / "part"
    assert [row["step"] for row in teach("part", steps=8)] == [1, 2, 3]
    assert (part / "checkpoint").resolve().name == "checkpoint-000003"
    assert "checkpoint of step 3" in capsys.readouterr().out
    with pytest.raises(ConnectionError):
        teach("part", steps=8, resume=True)
    assert [row["step"] for row in rows(part)] == [1, 2, 3, 4, 5]
    teach("part", steps=8, resume=True)
    assert_same(timeless(tmp_path / "whole"), timeless(part))
    assert [path.name for path in part.glob("checkpoint-*")] == ["checkpoint-000008"]


def test_every_problem_once_an_epoch(teach, file, make_policy, monkeypatch):
    """Twelve problems are three batches of four, in another order in the next epoch, and with
    another seed.

    Catches a batch that is repeated, and a seed without effect.
    """
    batches = []

    def update(model, optimizer, batch, *args):
        batches.append(batch)
        return {"loss": 0.0, "grad_norm": 0.0}

    monkeypatch.setattr(sft, "update", update)
    for seed in (0, 1):
        teach(f"seed{seed}", seed=seed)
    everything = sorted(sft.encode(settings(file), make_policy()[1], 512))
    epochs = [[*itertools.chain(*batches[start : start + 3])] for start in range(0, 12, 3)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert all(one != other for one, other in itertools.combinations(epochs, 2))


def test_the_learning_rate(teach, monkeypatch):
    """It rises for 10 steps, then falls by lr / steps in each step, to lr / steps in the last. The
    log has what the optimizer used.

    Catches a warm-up or decay that is off by one step, a last step of rate 0, and a rate that never
    reaches the optimizer.
    """
    used = []

    def update(model, optimizer, *args):
        used.append(optimizer.param_groups[0]["lr"])
        return {"loss": 0.0, "grad_norm": 0.0}

    monkeypatch.setattr(sft, "update", update)
    assert [row["learning_rate"] for row in teach("run", steps=30, lr=6.0)] == used
    assert all(one < other for one, other in itertools.pairwise(used[:10]))
    falling = [6.0 - 0.2 * step for step in range(30)]
    assert used[9:] == pytest.approx(falling[9:])
    assert used[-1] == pytest.approx(6.0 / 30)
    rising = [rate / whole for rate, whole in zip(used[:10], falling[:10], strict=True)]
    assert rising == pytest.approx([step / 10 for step in range(1, 11)])


def test_bfloat16_arithmetic_over_float32_weights(teach, tmp_path):
    """Fails if --dtype bfloat16 has no effect, or if the weights are rounded to it."""
    plain, rounded = teach("float32", steps=2), teach("bfloat16", steps=2, dtype="bfloat16")
    assert rounded[0]["loss"] != pytest.approx(plain[0]["loss"], rel=1e-6)
    assert rounded[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.05)
    before = load_file(tmp_path / "policy" / "model.safetensors")
    after = load_file(tmp_path / "bfloat16" / "checkpoint" / "model.safetensors")
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, before[name])


# ---------------------------------------------------------------------------- several ranks


def record_gradients(folder, model, file):
    """Runs of which every rank writes the summed gradients; in `alone` the second of two ranks has
    no problem."""
    add, gradients = ranks.sum_gradients, []

    def recorded(model):
        add(model)
        gradients.append(flat_grad(model))

    ranks.sum_gradients = recorded
    for name, batch_size in (("uneven", 5), ("alone", 1)):
        gradients.clear()
        options = {"model": model, "out_dir": f"{folder}/{name}", "batch_size": batch_size}
        sft.main(settings(file, steps=3, **options))
        rank = os.environ.get("RANK", "0")
        torch.save(torch.stack(gradients), f"{folder}/{name}-rank{rank}.pt")


def test_two_ranks_are_one(policy_folder, file, tmp_path):
    """Three problems on the first rank and two on the second, or one and none: the gradients, loss
    and norm of one rank, up to rounding.

    Catches a rank's own number of tokens, a problem on both ranks or on none, a gradient or loss
    that is not summed, and a rank that waits for one without problems.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    in_processes(1, record_gradients, one, policy_folder, file)
    in_processes(2, record_gradients, two, policy_folder, file)
    for name in ("uneven", "alone"):
        whole = torch.load(one / f"{name}-rank0.pt")
        assert len(whole) == 3
        for rank in range(2):
            together = torch.load(two / f"{name}-rank{rank}.pt")
            assert (whole - together).norm() < 1e-5 * whole.norm()
        for here, there in zip(rows(one / name), rows(two / name), strict=True):
            for key in ("step", "loss", "grad_norm", "learning_rate"):
                assert here[key] == pytest.approx(there[key], rel=1e-5), key


# ---------------------------------------------------------------------------- input

SOLVED = {"problem": "1+1?", "answer": "so \\boxed{2}"}
BAD_INPUT = [
    ({"steps": 0}, SOLVED, "--steps 0: must be above 0"),
    ({"batch_size": 0}, SOLVED, "--batch-size 0: must be above 0"),
    ({"lr": 0.0}, SOLVED, "--lr 0.0: must be above 0"),
    ({"lr": math.nan}, SOLVED, "--lr nan: must be above 0"),
    ({"batch_size": 13}, SOLVED, "--batch-size 13: only 12 problems fit the model"),
    ({"prompt_format": "chat"}, SOLVED, "--prompt-format chat: the tokenizer has no chat template"),
    ({"data": ("arithmetic",)}, SOLVED, "--data arithmetic: none of its 512 problems has a worked"),
    ({}, SOLVED | {"answer": "2"}, "problems.jsonl: none of its 12 problems has a worked solution"),
    ({}, SOLVED | {"problem": "x" * 600}, "all 12 prompts are longer than 512 tokens"),
    (
        {}, SOLVED | {"answer": f"{'x' * 600}\\boxed{{2}}"},
        "--batch-size 4: only 0 problems fit the model",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "row", "message"), BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(teach, tmp_path, changes, row, message):
    """Catches a missing check, one that runs after the first file, and a value without a name."""
    write(tmp_path / "problems.jsonl", [row] * 13)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        teach("run", **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite(teach, tmp_path):
    """Catches a run that goes on with weights of NaN, and saves them over good ones."""
    with pytest.raises(InputError, match=r"--lr 1e\+38: the gradient is nan"):
        teach("run", lr=1e38)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert not [*(tmp_path / "run").glob("checkpoint*")]


def test_a_folder_that_holds_a_run(teach):
    """Only --resume with the run's own flags may continue it; a finished run stays as it is.

    Catches a run that is overwritten, and a resumed run with other flags.
    """
    log = teach("run", steps=2)
    resumed = {"steps": 2, "resume": True}
    others = ({"lr": 0.5}, {"steps": 3}, {"seed": 1}, {"data": ("words",)})
    for changes in ({"steps": 2}, *(resumed | other for other in others)):
        with pytest.raises(
            InputError, match=r"--out-dir .*run holds a run: --resume and its flags"
        ):
            teach("run", **changes)
    assert teach("run", **resumed) == log
    assert teach("run", **resumed) == log, "also a second time"


def test_bad_input_has_no_traceback(monkeypatch, capsys):
    """As a program. Catches an error that is not reported in one line, and exit status 0."""
    monkeypatch.setattr(sys, "argv", ["sft.py", "--data", "words", "gsm8k", "--steps", "0"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "sft.py"), run_name="__main__")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: --steps 0: must be above 0\n"
