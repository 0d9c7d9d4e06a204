"""minimal.py: both draws enumerated, the trainer's gradient, GRPO as the identity, one page."""

import itertools
import re
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


# ---------------------------------------------------------------------------- the two draws


def outcomes(p):
    """(chance, weights) of every weight vector that a systematic draw from p [n] can give. It
    changes only where `start` lets another cumulative sum reach the next integer."""
    cuts = sorted({0.0, 1.0, *(-p.cumsum(0) % 1).tolist()})
    for low, high in itertools.pairwise(cuts):
        yield high - low, minimal.prune(p, (low + high) / 2)


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
    p = minimal.keep_prob(size, cost, share * cost.sum())

    live = advantage != 0
    assert live[20]
    assert torch.equal(size > 0, live)
    assert 8 <= (~live).sum() < 40, "some groups are dead"
    mean_weights, tokens, counts = torch.zeros_like(p), 0.0, set()
    for chance, weights in outcomes(p):
        mean_weights += chance * weights
        tokens += chance * cost[weights > 0].sum()
        if chance > 1e-9:
            counts.add(int((weights > 0).sum()))
    assert torch.allclose(mean_weights, live.double(), atol=1e-6)
    assert torch.allclose(tokens, (share * cost.sum()).clamp(max=cost[live].sum()), atol=1e-6)
    assert max(counts) - min(counts) <= 1, "the number kept is fixed, except for rounding"


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
    ids, old = torch.full((K, G, W + T), minimal.PAD), torch.zeros(K, G, W + T)
    for k, prompt in enumerate(rollouts.prompt_ids):
        ids[k, :, W - len(prompt) : W] = torch.tensor(prompt)
    sampled = torch.arange(W + T) - W < rollouts.lengths[..., None]
    sampled[..., :W] = False
    ids[sampled] = rollouts.completion_ids[sampled[..., W:]]
    old[sampled] = rollouts.logprobs[sampled[..., W:]]
    assert not (ids[sampled] == minimal.PAD).any(), "minimal.py takes it for padding"
    factor = keep * seen.weights / (rollouts.lengths * 6 * G)  # 6 candidates
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    tables = (ids, sampled, old, seen.advantages, factor)
    for k in range(K):  # a group at a time
        minimal.loss(model, *(table[k] for table in tables)).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert expected.norm() > 0
    assert (found - expected).norm() < 1e-5 * expected.norm()


# ---------------------------------------------------------------------------- the whole file


def two_steps(grpo, policy_folder, monkeypatch):
    """(draws, trained) of two steps of 4 prompts x 4 completions: a list of (p, weights) for each
    call of `prune`, and for each step a list of (advantage, factor), where a factor is the
    multiplier times own length x Q x G. Rewards are 0, 1, 2 in turn, so no group is dead."""
    small = {"Q": 4, "G": 4, "T": 6, "PROBLEMS": 4, "HELD_OUT": 3, "EVAL_EVERY": 2, "ROWS": 5}
    for name, value in small.items():
        monkeypatch.setattr(minimal, name, value)
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    draws, trained = [], []
    prune, loss, sample = minimal.prune, minimal.loss, minimal.sample

    def spy_prune(p, start):
        weights = prune(p, start)
        draws.append((p, weights))
        return weights

    def spy_sample(model, problems):
        ids, sampled, logprobs, rewards = sample(model, problems)
        trained.append([])
        return ids, sampled, logprobs, torch.arange(len(rewards)).double() % 3

    def spy_loss(model, ids, sampled, old_logprobs, advantage, multiplier):
        factor = multiplier * sampled.sum(1) * 4 * 4
        trained[-1] += zip(advantage.tolist(), factor.tolist(), strict=True)
        return loss(model, ids, sampled, old_logprobs, advantage, multiplier)

    monkeypatch.setattr(minimal, "prune", spy_prune)
    monkeypatch.setattr(minimal, "sample", spy_sample)
    monkeypatch.setattr(minimal, "loss", spy_loss)
    minimal.train(grpo=grpo, seed=1, steps=2)
    return draws, trained


def advantages_of(num_prompts):
    groups = (torch.arange(4 * num_prompts).double() % 3).view(-1, 4)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    return (groups - mean) / (std + 1e-4)


@pytest.mark.parametrize("grpo", [False, True])
def test_two_steps(grpo, policy_folder, monkeypatch, capsys):
    """Each completion's factor is the product of its two weights, and its advantage that of the
    full group. Catches a denominator or an advantage of what was kept, and a weight that is left
    out or that belongs to another completion."""
    draws, trained = two_steps(grpo, policy_folder, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "held-out accuracy" in lines[1]
    for step in (0, 1):
        (_, of_prompts), (_, of_completions) = draws[2 * step : 2 * step + 2]
        of_prompts = of_prompts[of_prompts > 0]
        advantages = advantages_of(len(of_prompts)).flatten()
        factors = of_prompts.repeat_interleave(4) * of_completions
        kept = factors > 0
        wanted = zip(advantages[kept].tolist(), factors[kept].tolist(), strict=True)
        torch.testing.assert_close(sorted(trained[step]), sorted(wanted), rtol=1e-6, atol=0)
        assert f"kept {int(kept.sum()):3}" in lines[step]
        assert factors.tolist() == [1.0] * 16 if grpo else kept.sum() < 8


def test_prompts_are_dropped_by_their_past(policy_folder, monkeypatch):
    """Those whose |advantage| was below the mean are kept with probability LOW in the second step.
    Catches a history that is never written, and dropping above the mean."""
    draws, _ = two_steps(False, policy_folder, monkeypatch)
    past = advantages_of(4).abs().mean(dim=1)
    wanted = torch.where(past < past.mean(), minimal.LOW, 1.0)
    first, _, second, _ = (p for p, _weights in draws)
    assert first.tolist() == [1.0] * 4, "nothing is known yet"
    assert sorted(second.tolist()) == sorted(wanted.tolist())
    assert 0 < (second == 1).sum() < 4


def test_one_page():
    """The file imports nothing of ours but the task."""
    imported = re.findall(r"^(?:from|import) (\w+)", FILE.read_text(), flags=re.MULTILINE)
    ours = {path.stem for path in FILE.parent.glob("*")}
    assert ours & {*imported} == {"tasks"}
