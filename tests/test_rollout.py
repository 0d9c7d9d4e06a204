"""Rollouts: the log-probs are those of the policy that sampled, and the ends are where they should be."""

import itertools

import pytest
import torch

import eval as evaluation
import packing
import rollout


def sample(model, prompt_ids, **changes):
    options = {"group_size": 6, "max_new_tokens": 12, "temperature": 1.0, "eos_ids": [256], "pad_id": 257, "seed": 5,
               "batch_size": 12}  # fmt: skip
    return rollout.sample(model, prompt_ids, **(options | changes))


def plain_logits(model, ids):
    """[B, L, V] by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    model.set_attn_implementation(packing.ATTENTION)
    return logits


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_trainers(make_policy, temperature):
    """Log-probs and energies against a teacher-forced forward at the same temperature, with ragged prompts. Kills: the
    temperature on one side only, values shifted by a token, left padding that is attended to, an energy without the
    other tokens' part."""
    model, _ = make_policy()
    prompts = [[65], [66, 67, 68, 69, 70], [71, 72]]
    got = sample(model, prompts, temperature=temperature, eos_ids=[256, *range(0, 256, 8)])
    assert 1 < got.lengths.float().mean() < 12, "some end early, some do not"
    for q, g in itertools.product(range(3), range(6)):
        length = got.lengths[q, g]
        completion = got.completion_ids[q, g, :length].tolist()
        pack = packing.build_pack([prompts[q]], [completion])
        forced, entropy = packing.packed_logprobs(model, pack, temperature=temperature)
        assert (got.logprobs[q, g, :length] - forced).abs().max() < 1e-5
        assert (got.logprobs[q, g, length:] == 0).all()
        ids = torch.tensor([prompts[q] + completion])
        assert got.entropy[q, g].item() == pytest.approx(entropy.sum().item(), rel=1e-4)
        probs = (plain_logits(model, ids)[0] / temperature).softmax(dim=-1)
        own = probs[len(prompts[q]) - 1 : -1]  # the distribution that each completion token came from
        energy = (torch.nn.functional.one_hot(ids[0, len(prompts[q]) :], own.shape[1]) - own).square().sum()
        assert got.energy[q, g].item() == pytest.approx(energy.item(), rel=1e-4)


def test_energy_of_a_nearly_certain_token():
    """In float32 against float64. Kills: 1 - 2 p + sum p^2 as written, which is rounding here."""
    logits = torch.tensor([[9.0, 0.0, -1.0, 0.5]])
    recorder = rollout._Recorder(1.0)
    recorder(None, logits)
    recorder.take(torch.tensor([[0]]))
    probs = logits.double().softmax(dim=-1)
    exact = (torch.tensor([[1.0, 0, 0, 0]]) - probs).square().sum().item()
    assert 1e-8 < exact < 1e-6
    assert recorder.energies[0].item() == pytest.approx(exact, rel=1e-3)


def test_frequencies_and_entropy_are_those_of_the_policy(make_policy):
    """One-token completions, 20,000 of them, by the settings a model such as Qwen3 ships: frequencies within 4.5
    standard errors of softmax(logits / temperature), and the entropy recorded is that distribution's. Kills: top-k or
    top-p leaking in from the model's generation config, the temperature applied twice."""
    model, _ = make_policy()
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=20, top_p=0.9, repetition_penalty=1.3)
    own_config = model.generation_config
    logits = plain_logits(model, torch.tensor([[65, 66]]))[0, -1]
    probability = torch.softmax(logits / 1.5, dim=0)
    got = sample(model, [[65, 66]], group_size=20_000, max_new_tokens=1, temperature=1.5)
    frequency = torch.bincount(got.completion_ids.flatten(), minlength=258) / 20_000
    error = (probability * (1 - probability) / 20_000).sqrt()
    assert ((frequency - probability).abs() <= 4.5 * error + 1e-4).all()
    entropy = -(probability * probability.log()).sum()
    assert torch.allclose(got.entropy, entropy.expand(1, 20_000), atol=1e-4)
    assert model.generation_config is own_config, "set aside, not lost"
    assert model.config._attn_implementation == packing.ATTENTION


def test_seed_decides_everything(make_policy):
    model, _ = make_policy()
    one, same, other = (sample(model, [[65], [66]], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.completion_ids, same.completion_ids)
    assert torch.equal(one.logprobs, same.logprobs)
    assert not torch.equal(one.completion_ids, other.completion_ids)


def test_ends_and_cuts(make_policy):
    """Several end tokens, one of which is the pad: each ends a completion, is part of it, and is no truncation. Kills:
    only the first of the list, lengths from pad tokens, the end token left out."""
    model, tokenizer = make_policy()
    ends = [257, 256, *range(0, 256, 8)]
    got = sample(model, [[65]], group_size=200, eos_ids=ends)
    assert got.truncated.any()
    assert not got.truncated.all()
    for ids, length, cut in zip(got.completion_ids[0].tolist(), got.lengths[0], got.truncated[0], strict=True):
        inside = [token in ends for token in ids[:length]]
        assert not any(inside[:-1])
        assert inside[-1] != bool(cut)
        assert length == 12 or not cut
    texts = evaluation.decode(got.completion_ids, got.lengths, tokenizer)
    assert len(texts) == 200
    assert not any("<|" in text for text in texts)


def test_no_prompts_is_an_empty_rollout(make_policy):
    """A rank without prompts still takes part."""
    got = sample(make_policy()[0], [])
    assert got.completion_ids.shape[:2] == (0, 6)
    assert got.lengths.shape == (0, 6)


def test_broken_weights_are_named(make_policy):
    model, _ = make_policy()
    with torch.no_grad():
        model.get_input_embeddings().weight[65] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, [[65]])
    assert model.config._attn_implementation == packing.ATTENTION, "restored all the same"


def test_end_tokens_of_a_chat_model(make_policy):
    model, tokenizer = make_policy()
    assert rollout.eos_token_ids(model, tokenizer) == [256]
    model.generation_config.eos_token_id = [151645, 151643]
    assert rollout.eos_token_ids(model, tokenizer) == [151645, 151643]
    model.generation_config.eos_token_id = None
    assert rollout.eos_token_ids(model, tokenizer) == [256]
