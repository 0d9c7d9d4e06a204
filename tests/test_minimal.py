"""minimal.py: both draws enumerated, the trainer's gradient, GRPO as the identity, one page."""

import ast
import itertools
from pathlib import Path

import pytest
import torch
import toy
from transformers import AutoModelForCausalLM

import config
import minimal
import rollout
from tasks import arithmetic

FILE = Path(minimal.__file__)


def outcomes(p):
    """Every weight vector that a systematic draw from p [n] can give, with its probability.

    The draw changes only where `start` lets another cumulative sum reach the next integer.
    """
    cuts = sorted({0.0, 1.0, *(-p.cumsum(0) % 1).tolist()})
    for low, high in itertools.pairwise(cuts):
        yield high - low, minimal.prune(p, (low + high) / 2)


def assert_unbiased(size, cost, budget):
    """Enumerate the draw of these sizes; returns its keep probabilities."""
    p = minimal.keep_prob(size, cost, budget)
    mean, tokens = torch.zeros_like(p), 0.0
    counts = set()
    for chance, weights in outcomes(p):
        mean += chance * weights
        tokens += chance * cost[weights > 0].sum().item()
        if chance > 1e-9:
            counts.add(int((weights > 0).sum()))
        assert (weights[size == 0] == 0).all(), "a term of 0 was trained on"
    assert mean[size > 0] == pytest.approx(1.0, abs=1e-6)
    assert tokens == pytest.approx(min(budget, cost[size > 0].sum().item()), abs=1e-6)
    assert max(counts) - min(counts) <= 1, "the number kept is fixed, except for rounding"
    return p


# ---------------------------------------------------------------------------- the two draws


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 1.0])
def test_completion_draw_is_unbiased(share):
    """Weights are 1 on average wherever the size is not 0, and the expected tokens are the budget.

    Catches a weight other than 1 / p, a probability other than p, a budget that ignores what is
    kept for sure, and an estimated size of 0 that is trusted.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(6, 8, generator=generator) < torch.linspace(0, 1, 6)[:, None]).double()
    std, mean = torch.std_mean(rewards, 1, keepdim=True)
    advantage = ((rewards - mean) / (std + 1e-4)).flatten()
    logprobs = -5 * torch.rand(48, 12, generator=generator).pow(8)
    logprobs[20] = 0.0  # probabilities that were rounded to 1: no energy, but an advantage
    factor = torch.rand(48, generator=generator, dtype=torch.float64).pow(4)
    cost = torch.randint(5, 70, (48,), generator=generator).double()
    size = minimal.completion_size(advantage, factor, logprobs)
    assert advantage[20] != 0
    assert torch.equal(size > 0, advantage != 0)
    assert 8 <= (size == 0).sum() < 40, "some groups are dead"
    p = assert_unbiased(size, cost, share * cost.sum().item())
    assert ((p > 0) & (p < 1)).any() or share == 1.0
    assert (p == 1).any() or share == 0.05, "water-filling is needed"


def test_size_is_a_gradient_norm(monkeypatch):
    """With two tokens to choose from, it is exactly the norm of the term's gradient at the logits.

    Catches a wrong energy, a sign, and tokens that count although they were not sampled.
    """
    monkeypatch.setattr(minimal, "FLOOR", 0.0)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 7, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    advantage, factor = torch.tensor([1.5, -0.5, 0.0, 2.0, -1.0]), torch.rand(5).double()
    sampled = torch.rand(5, 7, generator=generator) < 0.7
    logprobs = torch.where(sampled, logits.log_softmax(-1)[..., 1], 0.0)
    ((logprobs.sum(1) * advantage) * factor).sum().backward()
    size = minimal.completion_size(advantage, factor, logprobs.detach())
    assert size.numpy() == pytest.approx(logits.grad.norm(dim=(1, 2)).numpy(), rel=1e-9)


def test_keep_prob_has_the_least_variance():
    """No shift of budget between two terms lowers sum((1 / p - 1) size^2).

    Catches a size that is not divided by the root of its cost.
    """
    generator = torch.Generator().manual_seed(1)
    size = torch.rand(20, generator=generator, dtype=torch.float64)
    cost = torch.randint(1, 9, (20,), generator=generator).double()
    p = minimal.keep_prob(size, cost, 0.4 * cost.sum())
    marginal = size.square() / (p.square() * cost)  # variance saved by a token more
    inner = p < 1
    assert 0 < inner.sum() < 20
    assert marginal[inner] == pytest.approx(marginal[inner][0].item(), rel=1e-9)
    assert (marginal[~inner] >= marginal[inner][0] * (1 - 1e-9)).all()


def test_nothing_live_keeps_nothing():
    """Fails if a batch of dead groups divides by 0, or waits forever."""
    zeros, cost = torch.zeros(6, dtype=torch.float64), torch.full((6,), 9.0).double()
    size = minimal.completion_size(zeros, cost, torch.full((6, 3), -0.5))
    assert torch.equal(minimal.keep_prob(size, cost, 20.0), zeros)
    assert torch.equal(minimal.prune(zeros, 0.0), zeros)


@pytest.mark.parametrize("start", [0.0, 0.3, 1 - 2**-53])
def test_grpo_is_the_identity(start):
    """Keep probabilities of 1 keep everything with weight exactly 1, whatever the draw."""
    assert torch.equal(minimal.prune(torch.ones(512).double(), start), torch.ones(512).double())


# ---------------------------------------------------------------------------- the gradient


def test_sampled_log_probs_are_the_models(policy_folder, monkeypatch):
    """Every ratio is 1: with advantage 1 and factor 1 / length, the loss is minus the completions.

    Catches padding that attention sees, a wrong cache row after some completions ended, and
    log-probs or masks that are shifted by one, and a cache by a name that transformers ignores.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    model.lm_head.weight.data[minimal.END] *= 3  # completions end early, at different tokens
    problems = [arithmetic.problem("train", i) for i in range(24)]
    cache = minimal.DynamicCache()
    monkeypatch.setattr(minimal, "DynamicCache", lambda: cache)
    ids, sampled, logprobs, rewards = minimal.sample(model, problems)
    lengths = sampled.sum(1)
    assert rewards.shape == (24,)
    width = ids.shape[1] - minimal.T  # of the prompts
    assert cache.get_seq_length() == width + lengths.max() - 1  # the last token is not read
    assert len(lengths.unique()) > 3
    assert torch.equal(logprobs != 0, sampled)
    ones = torch.ones(24, dtype=torch.float64)
    for advantage in (ones, -ones):
        for row in range(24):
            part = slice(row, row + 1)
            rest = (advantage[part], 1 / lengths[part].double())
            loss = minimal.loss(model, ids[part], sampled[part], logprobs[part], *rest)
            assert loss.item() == pytest.approx(-advantage[row].item(), rel=1e-4)
        loss = minimal.loss(model, ids, sampled, logprobs, advantage, 1 / lengths.double())
        assert loss.item() == pytest.approx(-24 * advantage[0].item(), rel=1e-4)


def test_gradient_is_the_trainers(policy_folder, tmp_path, monkeypatch):
    """The same rollouts, draw and weights give the gradient of train.py, packed and unclipped.

    Catches a denominator of kept completions, a missing weight, a clip on the wrong side, and
    padding that leaks into attention.
    """
    options = {"method": "pps", "prompts_per_step": 6, "importance_cap": 0, "seed": 3}
    options |= {"prompt_rule": "uniform", "prompt_prune_rate": 0.3, "completion_prune_rate": 0.6}
    args = toy.flags(policy_folder, str(tmp_path / "run"), **options)
    trainer = toy.Recorder(config.parse_config(args), toy.toy_reward)
    sample, generator = rollout.sample, torch.Generator().manual_seed(0)

    def drifted(*args, **options):  # as after some updates, so that the clip acts
        rollouts = sample(*args, **options)
        rollouts.logprobs += 0.5 * torch.randn(rollouts.logprobs.shape, generator=generator)
        return rollouts

    monkeypatch.setattr(rollout, "sample", drifted)
    trainer.step(1)
    (seen,) = trainer.steps
    (update,) = seen.updates
    rollouts, keep, expected = update.rollouts, seen.keep, update.gradient

    K, G, T = rollouts.completion_ids.shape
    assert 0 < keep.sum() < K * G
    assert len(set(seen.weights[keep].tolist())) > 2
    W = max(map(len, rollouts.prompt_ids))
    ids = torch.full((K * G, W + T), minimal.PAD)
    sampled, old = torch.zeros(K * G, W + T, dtype=torch.bool), torch.zeros(K * G, W + T)
    lengths = rollouts.lengths.flatten()
    for row, length in enumerate(lengths.tolist()):
        prompt = torch.tensor(rollouts.prompt_ids[row // G])
        ids[row, W - len(prompt) : W] = prompt
        completion = slice(W, W + length)
        ids[row, completion] = rollouts.completion_ids.flatten(0, 1)[row, :length]
        old[row, completion] = rollouts.logprobs.flatten(0, 1)[row, :length]
        sampled[row, completion] = True
    assert not (ids[sampled] == minimal.PAD).any(), "minimal.py takes it for padding"
    factor = keep.flatten() * seen.weights.flatten() / (lengths * 6 * G)  # 6 candidates
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    advantage = seen.advantages.flatten()
    for n in factor.nonzero().squeeze(1).split(3):
        minimal.loss(model, ids[n], sampled[n], old[n], advantage[n], factor[n]).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert expected.norm() > 0
    assert (found - expected).norm() < 1e-5 * expected.norm()


# ---------------------------------------------------------------------------- the whole file


@pytest.mark.parametrize("grpo", [False, True])
def test_two_steps(grpo, policy_folder, monkeypatch, capsys):
    """Each completion's factor is (prompt weight x completion weight) / (own length x Q x G), its
    advantage that of the full group; with --grpo everything is trained on with weight 1.

    In the second step prompts whose |advantage| was below the mean are kept with probability LOW.
    Catches a loop that does not run, a denominator or advantage of what was kept, a weight that is
    left out, a history that is never written, and dropping above the mean.
    """
    small = {"Q": 4, "G": 4, "T": 6, "HELD_OUT": 3, "EVAL_EVERY": 2, "ROWS": 5}
    small |= {"PROBLEMS": 4}  # so that the second step knows all of its prompts
    for name, value in small.items():
        monkeypatch.setattr(minimal, name, value)
    problem, answers = arithmetic.problem, itertools.cycle("01")
    chance = lambda *key: (problem(*key)[0], next(answers), "chain")
    monkeypatch.setattr(arithmetic, "problem", chance)
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    every = torch.arange(16, dtype=torch.float64) % 3  # rewards, and no group is dead
    groups = every.view(4, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    draws, probabilities, trained = [], [], []
    prune, loss, sample = minimal.prune, minimal.loss, minimal.sample

    def spy_prune(*args):
        draws.append(prune(*args))
        probabilities.append(args[0])
        return draws[-1]

    def spy_loss(model, ids, sampled, old_logprobs, advantage, multiplier):
        assert ((advantage[:, None] - expected.flatten()).abs().amin(dim=1) < 1e-9).all()
        trained[-1].append(multiplier * sampled.sum(1) * 4 * 4)
        return loss(model, ids, sampled, old_logprobs, advantage, multiplier)

    def spy_sample(*args):
        *rollouts, rewards = sample(*args)
        trained.append([])
        return *rollouts, every[: len(rewards)]

    monkeypatch.setattr(minimal, "prune", spy_prune)
    monkeypatch.setattr(minimal, "loss", spy_loss)
    monkeypatch.setattr(minimal, "sample", spy_sample)
    minimal.train(grpo=grpo, seed=1, steps=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "held-out accuracy" in lines[1]
    assert probabilities[0].tolist() == [1.0] * 4, "nothing is known yet"
    past = expected.abs().mean(dim=1)
    low = int((past < past.mean()).sum())
    assert 0 < low < 4
    assert sorted(probabilities[2].tolist()) == sorted(
        [1.0 if grpo else 0.5] * low + [1.0] * (4 - low)
    )
    for step in range(2):
        prompts, completions = draws[2 * step : 2 * step + 2]
        weights = prompts[prompts > 0].repeat_interleave(4) * completions
        found = torch.cat(trained[step])
        assert found.sort().values == pytest.approx(weights[weights > 0].sort().values, rel=1e-9)
        assert int(lines[step].split("kept")[1].split("|")[0]) == len(found)
        assert (found == 1).all() and len(found) == 16 if grpo else 0 < len(found) < 8


def test_one_page():
    """The file imports nothing of ours but the task."""
    text = FILE.read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    ours = {path.stem for path in FILE.parent.glob("*.py")}
    ours |= {path.parent.name for path in FILE.parent.glob("*/__init__.py")}
    assert imported & ours == {"tasks"}
