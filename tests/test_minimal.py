"""minimal.py: the sizes, probabilities, draws and gradient of dppo.py and train.py, on one page."""

import itertools
import re
from pathlib import Path

import pytest
import torch
import toy
from transformers import AutoModelForCausalLM

import config
import dppo
import minimal
import rollout
from tasks import arithmetic

FILE = Path(minimal.__file__)


# ---------------------------------------------------------------------------- the two draws


@pytest.mark.parametrize("rest", [0.0, 300.0, 3000.0, 1e9])
def test_sizes_and_probabilities_are_those_of_adaptive(monkeypatch, rest):
    """With dead groups, and probabilities that were rounded to 1. Catches a floor that is missing,
    a size that is not divided by the root of its cost, and a time or a variance that leaves out
    what is kept for sure."""
    monkeypatch.setattr(dppo, "SIZE_FLOOR", minimal.FLOOR)
    generator = torch.Generator().manual_seed(0)
    advantage = torch.tensor([1.5, -0.5, 0.0, 0.1]).double().repeat(12)
    logprobs = -5 * torch.rand(48, 12, generator=generator).pow(8)
    logprobs[20] = 0.0
    factor = torch.rand(48, generator=generator, dtype=torch.float64).pow(4)
    cost = torch.randint(5, 70, (48,), generator=generator).double()
    for live in (advantage, torch.zeros(48).double()):
        size = minimal.completion_size(live, factor, logprobs)
        energy = dppo.energy_bound(logprobs).sum(dim=1)
        wanted = dppo.contribution_size(live, factor, energy, beta=0.0)
        torch.testing.assert_close(size, wanted, rtol=1e-6, atol=0)
        wanted = dppo.adaptive_keep_prob(wanted, cost, rest)
        torch.testing.assert_close(minimal.keep_prob(size, cost, rest), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("start", [0.0, 0.3, 0.75, 1 - 2**-53])
def test_the_draw_is_systematic(start):
    """Weights are 1 / p for what dppo.systematic keeps, and exactly 1 if p is 1, whatever the draw.
    Catches weights of another draw, and a probability of 0 that is kept."""
    p = torch.rand(512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p[::7] = 0.0
    keep = dppo.systematic(p, torch.arange(512), 1 - start)
    found = minimal.prune(p, start)
    assert torch.equal(found, dppo.ht_weights(keep, p))
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
    """(draws, trained, rests) of two steps of 4 prompts x 4 completions: a list of (p, weights) for
    each call of `prune`; for each step a list of (advantage, factor), where a factor is the
    multiplier times own length x Q x G; and the `rest` of each step. Rewards are 0,
    1, 2 in turn, so no group is dead. A step takes 1 s before its training and 16 s in it, so
    `rest` is a sixteenth of the first's tokens."""
    small = {"Q": 4, "G": 4, "T": 6, "PROBLEMS": 4, "HELD_OUT": 3, "EVAL_EVERY": 2, "ROWS": 5}
    small |= {"MEASURED": 1}
    clock = itertools.accumulate(itertools.cycle([0, 1, 16]))  # a step reads it three times
    monkeypatch.setattr(minimal.time, "perf_counter", clock.__next__)
    for name, value in small.items():
        monkeypatch.setattr(minimal, name, value)
    monkeypatch.setattr(arithmetic, "BASE", policy_folder)
    draws, trained, rests = [], [], []
    prune, keep_prob, loss, sample = minimal.prune, minimal.keep_prob, minimal.loss, minimal.sample

    def spy_prune(p, start):
        weights = prune(p, start)
        draws.append((p, weights))
        return weights

    def spy_keep_prob(size, cost, rest):
        rests.append(rest)
        return keep_prob(size, cost, rest)

    def spy_sample(model, problems):
        ids, sampled, logprobs, rewards = sample(model, problems)
        trained.append([])
        return ids, sampled, logprobs, torch.arange(len(rewards)).double() % 3

    def spy_loss(model, ids, sampled, old_logprobs, advantage, multiplier):
        factor = multiplier * sampled.sum(1) * 4 * 4
        trained[-1] += zip(advantage.tolist(), factor.tolist(), strict=True)
        return loss(model, ids, sampled, old_logprobs, advantage, multiplier)

    monkeypatch.setattr(minimal, "prune", spy_prune)
    monkeypatch.setattr(minimal, "keep_prob", spy_keep_prob)
    monkeypatch.setattr(minimal, "sample", spy_sample)
    monkeypatch.setattr(minimal, "loss", spy_loss)
    minimal.train(grpo=grpo, seed=1, steps=2)
    return draws, trained, rests


def advantages_of(num_prompts):
    groups = (torch.arange(4 * num_prompts).double() % 3).view(-1, 4)
    std, mean = torch.std_mean(groups, 1, keepdim=True)
    return (groups - mean) / (std + 1e-4)


@pytest.mark.parametrize("grpo", [False, True])
def test_two_steps(grpo, policy_folder, monkeypatch, capsys):
    """Each completion's factor is the product of its two weights, and its advantage that of the
    full group. The first step trains on every term that is not 0. In the second, prompts whose
    |advantage| was below the mean are kept with probability LOW, and `rest` is measured.

    Catches a denominator or an advantage of what was kept, a weight that is left out or that
    belongs to another completion, and a history or times that are never written.
    """
    draws, trained, rests = two_steps(grpo, policy_folder, monkeypatch)
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
        if grpo:
            assert factors.tolist() == [1.0] * 16
        elif step == 0:
            assert torch.equal(factors, (advantages != 0).double())
    tokens = float(re.search(r"tokens +(\d+)", lines[0])[1])
    assert rests == [1e9, tokens / 16]
    past = advantages_of(4).abs().mean(dim=1)
    wanted = torch.where(past < past.mean(), minimal.LOW, 1.0)
    first, _, second, _ = (p for p, _weights in draws)
    assert grpo or first.tolist() == [1.0] * 4, "nothing is known yet"
    assert grpo or sorted(second.tolist()) == sorted(wanted.tolist())


def test_one_page():
    """Of at most 200 lines, which import nothing of ours but the task."""
    assert len(FILE.read_text().splitlines()) <= 200
    imported = re.findall(r"^(?:from|import) (\w+)", FILE.read_text(), flags=re.MULTILINE)
    ours = {path.stem for path in FILE.parent.glob("*")}
    assert ours & {*imported} == {"tasks"}
