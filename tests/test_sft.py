"""Supervised training: the plain loss, and a run that learns."""

import itertools

import pytest
import torch
from test_packing import flat_grad, plain_logprobs
from toy import rows

import chat_format
from runtime import InputError, log
from tasks import sft

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
    """Loss and gradient in float64, against transformers' own attention, problem by problem: with
    a slot for each problem, about four slots, and one slot. Catches a loss on the prompt."""
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
    """Catches a flag that is not passed on, an end that ends no turn, and a problem that is cut."""
    _, tokenizer = make_policy()
    tokenizer.chat_template = TURNS
    cfg = settings(file, prompt_format=form, instruction="Box it.")
    options = (512, form, False, "Box it.")
    _, prompts = chat_format.encode_prompts(sft.worked(file), tokenizer, *options)
    pairs = sft.encode(cfg, tokenizer, 512)
    assert [prompt for prompt, _ in pairs] == prompts
    solutions = [row["answer"] + end for row in PROBLEMS[:-1]]
    assert [tokenizer.decode(solution) for _, solution in pairs] == solutions
    lengths = [len(prompt) + len(solution) for prompt, solution in pairs]
    shorter = [pair for pair, length in zip(pairs, lengths, strict=True) if length < max(lengths)]
    assert sft.encode(cfg, tokenizer, max(lengths) - 1) == shorter


def test_problems_with_a_solution(tmp_path):
    """Catches held-out rows or rows without a solution that would be learned."""
    rows = [{"question": f"q{n}", "answer": f"so #### {n}" if n % 2 else n} for n in range(40)]
    log.append_rows(tmp_path / "mine.jsonl", rows)
    found = sft.worked(str(tmp_path / "mine.jsonl"))
    assert [problem.text for problem in found] == [f"q{n}" for n in range(1, 38, 2)]


# ---------------------------------------------------------------------------- a run


def test_a_run(teach, tmp_path, monkeypatch):
    """Catches an update that is not applied, a killed run that cannot be started again, a finished
    one that is written over, a problem that is repeated or left out, and a rate off by a step."""
    update, calls, batches = sft.update, itertools.count(1), []

    def killed(model, optimizer, batch, cfg):
        if next(calls) == 3:
            raise ConnectionError
        batches.append(batch)
        return update(model, optimizer, batch, cfg)

    monkeypatch.setattr(sft, "update", killed)
    with pytest.raises(ConnectionError):
        teach("run", steps=8)
    first, *_, last = teach("run", steps=8)
    assert (first["step"], last["step"], len(rows(tmp_path / "run"))) == (1, 8, 8)
    assert last["loss"] < first["loss"]
    epoch = [pair for batch in batches[2:5] for pair in batch]
    assert len({str(pair) for pair in epoch}) == len(epoch) == 12
    assert last["learning_rate"] == pytest.approx(1e-3 * 8 / 10 * 1 / 8)
    (again, *_) = teach("more", steps=1, model=str(tmp_path / "run" / "checkpoint"))
    assert again["loss"] < first["loss"]
    with pytest.raises(InputError, match="run holds a checkpoint: use another folder"):
        teach("run")


def test_a_gradient_that_is_not_finite(teach, tmp_path):
    """Catches a run that goes on with weights of NaN, and saves them over good ones."""
    with pytest.raises(InputError, match=r"--lr 1e\+38: the gradient is nan"):
        teach("run", lr=1e38)
    assert not [*(tmp_path / "run").glob("checkpoint*")]
