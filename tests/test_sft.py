"""Supervised training: the plain loss, a run that learns, bad input."""

import itertools
from dataclasses import replace

import pytest
import torch
from test_packing import flat_grad, plain_logprobs
from toy import rows

import chat_format
import data
from runtime import InputError, log
from tasks import sft, word_problems

PROBLEMS = [
    {"problem": f"{'abc'[n % 3] * (n % 5 + 1)}{n}?", "answer": f"{n % 4 * 'so '}is \\boxed{{{n}}}"}
    for n in range(13)  # the last one is held out, which leaves 12
]


@pytest.fixture
def file(tmp_path):
    log.append_rows(tmp_path / "problems.jsonl", PROBLEMS)
    return str(tmp_path / "problems.jsonl")


def settings(file, **changes):
    options = {"data": (file,), "steps": 6, "batch_size": 4, "lr": 1e-3, "device": "cpu"}
    return sft.Config(**options | changes)


@pytest.fixture
def teach(policy_folder, file, tmp_path):
    """Train on the 12 problems, or on other data, in this process; returns the log's rows."""

    def go(name, **changes):
        options = {"model": policy_folder, "out_dir": str(tmp_path / name)}
        sft.main(settings(file, **(options | changes)))
        return rows(tmp_path / name)

    return go


# ---------------------------------------------------------------------------- a step


def test_a_step_is_the_plain_computation(make_policy, file, monkeypatch):
    """Catches a mean over a slot instead of the batch, a loss on the prompt, a lost slot, the
    gradient of an earlier step, and a norm that is not clipped. Loss and gradient in float64,
    against transformers' own attention, problem by problem: with a slot for each problem, about
    four slots, and one slot."""
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
        row = sft.update(model, optimizer, batch, cfg)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert (flat_grad(model) - clipped).norm() < 1e-5 * clipped.norm()  # clipping adds 1e-6


TURNS = "{% for m in messages %}<user>{{ m.content }}<|pad|>{% endfor %}<assistant>"


@pytest.mark.parametrize(("form", "end"), [("plain", "<|end|>"), ("chat", "<|pad|>")])
def test_prompts_and_solutions(make_policy, file, form, end):
    """Catches a flag that is not passed on, and an end that ends no turn."""
    _, tokenizer = make_policy()
    tokenizer.chat_template = TURNS
    cfg = settings(file, prompt_format=form)
    _, prompts = chat_format.encode_prompts(sft.worked(file), tokenizer, 512, form)
    pairs = sft.encode(cfg, tokenizer, 512)
    assert [prompt for prompt, _ in pairs] == prompts
    solutions = [row["answer"] + end for row in PROBLEMS[:-1]]
    assert [tokenizer.decode(solution) for _, solution in pairs] == solutions
    boxed, *_ = sft.encode(replace(cfg, instruction="Box it."), tokenizer, 512)
    assert "Box it." in tokenizer.decode(boxed[0])
    longest = max(len(prompt) + len(solution) for prompt, solution in pairs)
    shorter = [pair for pair in pairs if len(pair[0]) + len(pair[1]) < longest]
    assert sft.encode(cfg, tokenizer, longest) == pairs
    assert sft.encode(cfg, tokenizer, longest - 1) == shorter
    tokenizer.chat_template += "<think>"
    if form == "chat":
        with pytest.raises(InputError, match="opens a thought"):
            sft.encode(cfg, tokenizer, 512)


def test_problems_with_a_solution(tmp_path, capsys, monkeypatch):
    """Catches held-out rows or rows without a solution that would be learned."""
    monkeypatch.setattr(word_problems, "SFT_PROBLEMS", 9)
    *_, ninth = sft.worked("words")
    assert ninth == data.Problem(*word_problems.problem("sft", 8))
    rows = [{"question": f"q{n}", "answer": f"so #### {n}" if n % 2 else n} for n in range(40)]
    log.append_rows(tmp_path / "mine.jsonl", rows)
    found = sft.worked(str(tmp_path / "mine.jsonl"))
    assert [problem.text for problem in found] == [f"q{n}" for n in range(1, 38, 2)]
    assert capsys.readouterr().out.startswith("note: 19 of 38 problems of ")


# ---------------------------------------------------------------------------- a run


def test_batches_and_learning_rates(teach, file, make_policy, monkeypatch):
    """Catches a problem that is repeated or left out, and a schedule off by one step."""
    batches, used = [], []

    def update(model, optimizer, batch, *args):
        batches.append(batch)
        used.append(optimizer.param_groups[0]["lr"])
        return {"loss": 0.0, "grad_norm": 0.0}

    monkeypatch.setattr(sft, "update", update)
    teach("other seed", seed=1, steps=3)
    found = teach("run", steps=30, lr=6.0)
    everything = sorted(sft.encode(settings(file), make_policy()[1], 512))
    epochs = [[*itertools.chain(*batches[start : start + 3])] for start in range(0, 33, 3)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    used = used[3:]
    warm_up = [min(step / 10, 1.0) for step in range(1, 31)]
    decay = [6.0 - 0.2 * step for step in range(30)]
    assert used == pytest.approx([w * d for w, d in zip(warm_up, decay, strict=True)])
    assert [row["learning_rate"] for row in found] == used


def test_a_run(teach, tmp_path, monkeypatch):
    """Catches an update that is not applied, and a killed run that cannot be started again."""
    update, calls = sft.update, itertools.count(1)

    def killed(*args):
        if next(calls) == 3:
            raise ConnectionError
        return update(*args)

    monkeypatch.setattr(sft, "update", killed)
    with pytest.raises(ConnectionError):
        teach("run", steps=8)
    first, *_, last = teach("run", steps=8)
    assert (first["step"], last["step"], len(rows(tmp_path / "run"))) == (1, 8, 8)
    assert last["loss"] < first["loss"]
    (again, *_) = teach("more", steps=1, model=str(tmp_path / "run" / "checkpoint"))
    assert again["loss"] < first["loss"]
    with pytest.raises(InputError, match="run holds a checkpoint: use another folder"):
        teach("run")


# ---------------------------------------------------------------------------- bad input


def test_a_gradient_that_is_not_finite(teach, tmp_path):
    """Catches a run that goes on with weights of NaN, and saves them over good ones."""
    with pytest.raises(InputError, match=r"--lr 1e\+38: the gradient is nan"):
        teach("run", lr=1e38)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert not [*(tmp_path / "run").glob("checkpoint*")]
