"""minimal.py: the sizes, probabilities, draws and gradients of train.py, on one page."""

import dataclasses

import pytest
import torch
import toy
from transformers import AutoModelForCausalLM

import config
import dppo
import minimal
import rollout
import sampler
from tasks import arithmetic


@pytest.mark.parametrize("rest", [1e-9, 0.1, 1e6])
def test_sizes_and_probabilities_are_those_of_adaptive(monkeypatch, rest):
    """With dead groups, and probabilities that were rounded to 1. Catches a floor that is missing,
    a size that is not divided by the root of its cost, and a time or a noise that leaves out what
    is kept for sure."""
    monkeypatch.setattr(minimal, "REST", rest)
    generator = torch.Generator().manual_seed(0)
    advantage = torch.tensor([1.5, -0.5, 0.0, 0.1]).double().repeat(12)
    energy = torch.rand(48, generator=generator, dtype=torch.float64).pow(8)
    energy[20] = 0.0
    factor = torch.rand(48, generator=generator, dtype=torch.float64).pow(4)
    cost = torch.randint(5, 70, (48,), generator=generator).double()
    for live in (advantage, torch.zeros(48).double()):
        size = minimal.completion_size(live, factor, energy)
        wanted = dppo.contribution_size(live, factor, energy, beta=0.0)
        torch.testing.assert_close(size, wanted, rtol=1e-6, atol=0)
        wanted = dppo.adaptive_keep_prob(wanted, cost, rest)
        torch.testing.assert_close(minimal.keep_prob(size, cost), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("start", [0.3, 1 - 2**-53])
def test_the_draw_is_systematic(start):
    """Weights are 1 / p for what dppo.systematic keeps, and exactly 1 if p is 1, whatever the draw.
    Catches weights of another draw or order, and a probability of 0 that is kept."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(512, generator=generator, dtype=torch.float64)
    p[::7] = 0.0
    order = torch.randperm(512, generator=generator)
    keep = dppo.systematic(p, order, 1 - start)
    assert torch.equal(minimal.prune(p, order, start), dppo.ht_weights(keep, p))
    ones = torch.ones(512).double()
    assert torch.equal(minimal.prune(ones, order, start), ones)


def test_samples_are_the_models(policy_folder, monkeypatch):
    """Every ratio is 1, and energies are those of the model's own distributions. Catches padding
    that attention sees, a wrong cache row after some completions ended, and masks off by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    model.lm_head.weight.data[minimal.END] *= 3  # completions end early, at different tokens
    problems = [arithmetic.problem("train", i) for i in range(24)]
    cache = minimal.DynamicCache()
    monkeypatch.setattr(minimal, "DynamicCache", lambda: cache)
    ids, sampled, logprobs, energy, rewards = minimal.sample(model, problems)
    lengths = sampled.sum(1)
    assert rewards.shape == (24,)
    width = ids.shape[1] - minimal.T  # of the prompts
    assert cache.get_seq_length() == width + lengths.max() - 1  # the last token is not read
    assert len(lengths.unique()) > 3
    assert torch.equal(logprobs != 0, sampled)
    for row in range(24):
        own = (sampled[row] | (ids[row] != minimal.PAD)).nonzero()[:, 0]  # without padding
        with torch.no_grad():
            probs = model(ids[row, own][None]).logits[0, :-1].softmax(-1)
        onehot = torch.nn.functional.one_hot(ids[row, own[1:]], probs.shape[1])
        wanted = (onehot - probs).square().sum(1)[sampled[row, own[1:]]].sum()
        assert energy[row].item() == pytest.approx(wanted.item(), rel=1e-3)
    multiplier, ones = 1 / lengths.double(), torch.ones(24).double()
    for row in [*torch.arange(24).split(1), torch.arange(24)]:
        tables = (ids[row], sampled[row], logprobs[row], ones[row], multiplier[row])
        assert minimal.loss(model, *tables).item() == pytest.approx(-len(row), rel=1e-4)


# ---------------------------------------------------------------------------- three steps


class SamePrompts(toy.Recorder):
    """The same candidates in every step, so that their past is known from the second on."""

    def candidates(self, step):
        return torch.arange(6)


def train_py(folder, monkeypatch, flags):
    """(trainer, draws) after three steps of train.py: the (p, start) of each of its draws, of
    prompts and of completions in turn. The log-probs of its samples are moved, as after some
    updates, so that the clip acts."""
    options = "--steps 3 --prompts-per-step 6 --eval-every 0 --save-every 0 --device cpu"
    cfg = config.parse_config([*options.split(), *flags.split(), "--out-dir", str(folder)])
    sample, systematic, draws = rollout.sample, dppo.systematic, []
    generator = torch.Generator().manual_seed(0)

    def drifted(*args, **options):
        rollouts = sample(*args, **options)
        rollouts.logprobs += 0.3 * torch.randn(rollouts.logprobs.shape, generator=generator)
        return rollouts

    def spy(keep_prob, order, start):
        draws.append((keep_prob.flatten(), start))
        return systematic(keep_prob, order, start)

    in_order = dataclasses.replace(
        sampler.PROMPT_RULES["dppo"], order=lambda batch, _: torch.arange(batch.live.numel())
    )
    monkeypatch.setitem(sampler.PROMPT_RULES, "dppo", in_order)
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "sample", drifted)
        patch.setattr(dppo, "systematic", spy)
        trainer = SamePrompts(cfg)
        for step in (1, 2, 3):
            trainer.step(step)
    return trainer, draws


def tables(step):
    """What minimal.sample would return of the samples of a recorded step."""
    rollouts = step.updates[0].rollouts
    K, G, T = rollouts.completion_ids.shape
    W = max(map(len, rollouts.prompt_ids))
    ids, logprobs = torch.full((K, G, W + T), minimal.PAD), torch.zeros(K, G, W + T)
    for k, prompt in enumerate(rollouts.prompt_ids):
        ids[k, :, W - len(prompt) : W] = torch.tensor(prompt)
    sampled = torch.arange(W + T) - W < rollouts.lengths[..., None]
    sampled[..., :W] = False
    ids[sampled] = rollouts.completion_ids[sampled[..., W:]]
    logprobs[sampled] = rollouts.logprobs[sampled[..., W:]]
    assert not (ids[sampled] == minimal.PAD).any(), "minimal.py takes it for padding"
    columns = (ids, sampled, logprobs, rollouts.energy.double(), step.rewards)
    return [column.flatten(0, 1) for column in columns]


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


SAME = {  # flags of train.py, and the argument of minimal.train
    "adaptive": ("", {}),
    "grpo": ("--method grpo", {"grpo": True}),
    "prompts": ("--prompt-rule dppo", {"drop_prompts": True}),
}


@pytest.mark.parametrize(("flags", "options"), SAME.values(), ids=SAME)
def test_three_steps_are_those_of_train_py(flags, options, tmp_path, monkeypatch, capsys):
    """From the same samples, with the same random numbers: the same probabilities, weights,
    gradients and updates. Catches an advantage or a denominator of what was kept."""
    trainer, draws = train_py(tmp_path, monkeypatch, flags)
    capsys.readouterr()
    monkeypatch.setattr(minimal, "Q", 6)
    monkeypatch.setattr(minimal, "HELD_OUT", 1)
    monkeypatch.setattr(torch, "randperm", torch.arange)
    starts = iter([1 - start for _p, start in draws])
    monkeypatch.setattr(minimal.random, "random", lambda: next(starts))
    samples = iter([tables(step) for step in trainer.steps])
    sample, prune, clip = minimal.sample, minimal.prune, torch.nn.utils.clip_grad_norm_
    prompts, seen, gradients, weights = [], [], [], []

    def stored(model, problems):
        if len(problems) == 4:
            return sample(model, problems)  # the evaluations, before and after
        prompts.append([text for text, _answer, _source in problems[:: minimal.G]])
        return next(samples)

    def spy_prune(p, order, start):
        seen.append((p, prune(p, order, start)))
        return seen[-1][1]

    def spy_clip(parameters, limit):
        weights[:] = parameters
        gradients.append(flat(weight.grad for weight in weights))
        return clip(weights, limit)

    monkeypatch.setattr(minimal, "sample", stored)
    monkeypatch.setattr(minimal, "prune", spy_prune)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy_clip)
    minimal.train(seed=1, steps=3, **options)

    assert len(seen) == len(draws) == 6
    for (p, _weights), (wanted, _start) in zip(seen, draws, strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-6, atol=0)
    for number, step in enumerate(trainer.steps):
        (of_prompts, of_completions), (update,) = seen[2 * number : 2 * number + 2], step.updates
        assert prompts[number] == [trainer.train_set[i].text for i in step.taught.prompts]
        torch.testing.assert_close(of_prompts[1][of_prompts[1] > 0], step.prompt_weights)
        both = of_prompts[1][of_prompts[1] > 0][:, None] * of_completions[1].view(-1, minimal.G)
        torch.testing.assert_close(both, step.weights, rtol=1e-6, atol=0)
        error = (gradients[number] - update.gradient).norm() / update.gradient.norm()
        assert error < (1e-4 if number == 0 else 1e-2)  # Adam magnifies rounding
        assert update.sums.clipped > 0
    base = flat(AutoModelForCausalLM.from_pretrained(arithmetic.BASE).parameters())
    moved = flat(trainer.model.parameters()) - base
    assert (flat(weights) - base - moved).norm() < 1e-3 * moved.norm()
    lines = capsys.readouterr().out.splitlines()
    for line, step in zip(lines[1:4], trainer.steps, strict=True):
        tokens = f"{(step.cost * step.keep).sum():4.0f}/{step.cost.sum():.0f}"
        kept = f"kept {int(step.keep.sum()):3}/{step.keep.numel()}"
        assert line.endswith(f"{kept} | tokens trained on {tokens}")
    assert lines[0].startswith("held-out accuracy before: ")
    assert lines[4].startswith("held-out accuracy after: ")
