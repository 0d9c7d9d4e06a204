"""Rollouts: what every engine returns is what one forward without cache or padding allows.

`check` is the oracle: given a rollout and its random numbers, it computes each completion's logits
in one forward over the whole text, and says which token each number draws.
"""

from unittest import mock

import pytest
import torch
from toy import plain_logits

import config
import decoder
import models
import packing
import rollout


class AsOnGPU:
    """The loop with a row for each completion, and a look every 4 tokens."""

    @staticmethod
    def sample(*args, **options):
        with mock.patch.dict(rollout.LOOK_EVERY, cpu=4):
            return rollout.in_batches(rollout.decode, *args, **options)


ENGINES = models.ENGINES | {"as on a GPU": AsOnGPU}
ALL = pytest.mark.parametrize("engine", ["loop", "as on a GPU", "hf"])
PROMPTS = [[66, 67, 68, 69, 70], [65], [71, 72], [65]]


def sample(model, prompt_ids, *, group_size=6, seed=5, keys=None, engine="loop", **changes):
    options = {"max_new_tokens": 12, "eos_ids": [256], "pad_id": 257, "batch_size": 12}
    sampling = rollout.Sampling(**options | changes, engine=ENGINES[engine])
    draw = {"group_size": group_size, "seed": seed, "keys": keys}
    return rollout.sample(model, prompt_ids, sampling, **draw)


def check(model, found, sampling, *, seed, keys):
    """Assert that a rollout of a float64 model is the one that its random numbers draw."""
    K, G, T = found.completion_ids.shape
    numbers = rollout.random_numbers(seed, keys, K, G, T).flatten(0, 1)
    columns = (found.logprobs, found.entropy, found.energy, found.truncated)
    columns = (found.completion_ids, found.lengths, *columns)
    columns = zip(numbers, *(column.flatten(0, 1) for column in columns), strict=True)
    for place, (uniforms, ids, n, logprobs, entropy, energy, truncated) in enumerate(columns):
        prompt, tokens = found.prompt_ids[place // G], ids[:n].tolist()
        ends = [token in sampling.eos_ids for token in tokens]
        assert not any(ends[:-1])
        assert truncated == (not ends[-1])
        assert ends[-1] or n == T
        logits = plain_logits(model, torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        rows = logits[:, : model.vocab_size].double()
        scores = torch.stack([warped(row, sampling) for row in rows]).log_softmax(dim=1)
        probs = scores.exp()  # [n, V]
        drawn = (probs.cumsum(dim=1) > uniforms[:n, None]).int().argmax(dim=1)
        if sampling.temperature == 0:
            drawn = scores.argmax(dim=1)
        assert tokens == drawn.tolist()
        wanted = scores.gather(1, drawn[:, None])[:, 0].float()
        torch.testing.assert_close(logprobs[:n], wanted, rtol=1e-5, atol=1e-5)
        assert not logprobs[n:].any()
        wanted = torch.special.entr(probs).sum().item()
        assert entropy.item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        one_hot = torch.nn.functional.one_hot(drawn, probs.shape[1])
        wanted = (one_hot - probs).square().sum().item()
        assert energy.item() == pytest.approx(wanted, rel=1e-2, abs=1e-12)  # however small


def warped(logits, sampling):
    """Logits [V] as eval.py's flags change them: temperature, top-k, then top-p."""
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
    probs, order = logits.softmax(dim=0).sort(descending=True)
    logits[order[probs.cumsum(dim=0) - probs >= sampling.top_p]] = -torch.inf
    return logits


# ------------------------------------------------------------------------- one conformance test

CASES = {
    "sampled": {},
    "cooler, in small batches": {"temperature": 0.6, "batch_size": 6},
    "one at a time, the pad is an end token": {"batch_size": 1, "group_size": 1, "pad_id": 8},
    "greedy": {"temperature": 0.0, "group_size": 2},
    "nearly certain": {"temperature": 0.05},  # small energies must not be rounding errors
    "top-k": {"top_k": 5},
    "top-p, no end": {"top_p": 0.5, "batch_size": 8, "eos_ids": [-1]},
}


@pytest.mark.parametrize("case", CASES)
@ALL
def test_engines_return_what_the_oracle_draws(make_policy, monkeypatch, engine, case):
    """In float64, so that rounding changes no token; of a head with 62 rows more than there are
    tokens. Catches rows that change places or split, settings that leak in from the generation
    config, as Qwen3 ships them, and energies that cancel."""
    monkeypatch.setattr(decoder, "ROOM", 4)
    model, _ = make_policy(dtype=torch.float64)
    model.model.norm.weight.data *= 1.5  # so that completions of a prompt stay equal for a while
    shipped = {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    model.generation_config.update(do_sample=True, **shipped)
    own_config, model.vocab_size = model.generation_config, 196
    options = {"eos_ids": [256, *range(0, 196, 8)], "max_new_tokens": 20} | CASES[case]
    group_size = options.pop("group_size", 6)
    draw = {"seed": 5, "keys": ["a", "b", "c", "d"]}
    found = sample(model, PROMPTS, engine=engine, group_size=group_size, **draw, **options)
    assert model.generation_config is own_config, "restored"
    assert model.config._attn_implementation == packing.ATTENTION
    check(model, found, rollout.Sampling(**{"pad_id": 257} | options), **draw)


def test_random_numbers():
    """Uniform, none twice, and those of a completion depend on its seed, key and place alone."""
    numbers = rollout.random_numbers(0, ["a", "b"], 2, 30, 1000)
    assert len(numbers.unique()) == numbers.numel()
    counts = numbers.flatten().histc(10, 0, 1)
    assert (counts / 6000 - 1).abs().max() < 4 * (0.9 / 6000) ** 0.5
    again = rollout.random_numbers(0, ["b"], 1, 3, 7)
    assert torch.equal(again, numbers[1:, :3, :7])
    assert not torch.equal(again, rollout.random_numbers(1, ["b"], 1, 3, 7))


# ------------------------------------------------------------------------- draws


@pytest.mark.parametrize("vocabulary", [7, 1024, 1300])
def test_a_draw_inverts_the_cumulative_sum(vocabulary):
    """Catches a block that is off by one, tokens of the last, shorter block that are never drawn,
    sums in float32, and draws that share a row but use the blocks of another row."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(50, vocabulary, generator=generator)
    probs *= torch.rand(50, vocabulary, generator=generator) < 0.3
    probs[:, -1] += 0.01
    row = torch.randint(50, (4000,), generator=generator)
    uniform = torch.rand(4000, 1, dtype=torch.float64, generator=generator)
    ends = probs.double().cumsum(dim=1)[row]
    exact = torch.searchsorted(ends, uniform * ends[:, -1:], right=True)
    assert (exact == vocabulary - 1).any()
    assert torch.equal(rollout.inverse_cdf(probs, uniform, row), exact)


def test_a_token_of_probability_0_is_never_drawn(monkeypatch):
    """Catches a random number that rounding moves out of its block, onto an entry of 0. All of them
    lie where rounding decides: just below a token's border, or at the ends of the range."""
    monkeypatch.setattr(rollout, "BLOCK", 7)
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(20_000, 40, generator=generator) ** 30  # sums of these are not exact
    probs *= torch.rand(20_000, 40, generator=generator) < 0.3
    probs[:, 20] += 0.1
    border = torch.randint(40, (20_000, 1), generator=generator)
    ends = probs.double().cumsum(dim=1)
    below_border = ends.gather(1, border) / ends[:, -1:] * (1 - 2**-53)
    lowest = torch.zeros_like(below_border)
    highest = torch.full_like(below_border, rollout.BELOW_1)
    for uniform in (below_border, lowest, highest):
        drawn = rollout.inverse_cdf(probs, uniform, torch.arange(20_000))
        assert (probs.gather(1, drawn) > 0).all()


# ------------------------------------------------------------------------- work, errors, modes


@ALL
def test_distribution_of_a_bfloat16_model(make_policy, engine):
    """Catches log-probs that are rounded to bfloat16 before or after the temperature divides."""
    model, _ = make_policy(dtype=torch.bfloat16)
    with torch.no_grad(), decoder.evaluation_mode(model):
        logits = model(torch.tensor([[65, 66]])).logits[0, -1]
    exact = (logits.double() / 0.7).log_softmax(dim=0)
    got = sample(model, [[65, 66]], max_new_tokens=1, temperature=0.7, engine=engine)
    wanted = exact[got.completion_ids].float()
    torch.testing.assert_close(got.logprobs, wanted, rtol=0, atol=1e-6)


@ALL
@pytest.mark.parametrize("broken", ["token 65", "token 66", "second row"])
def test_broken_weights_are_reported(make_policy, engine, broken):
    """Catches a check that a single finite logit satisfies, or other rows' or later tokens', and
    tokens after the last check."""
    model, _ = make_policy()
    spoil = lambda _module, _args, out: out.index_fill(0, torch.tensor([1]), torch.nan)
    if broken == "second row":
        model.model.norm.register_forward_hook(spoil)
    else:
        model.get_input_embeddings().weight.data[int(broken[-2:])] = torch.nan
    options = {"engine": engine, "eos_ids": [-1], "max_new_tokens": 3}
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, [[65], [66]][: 1 + (broken == "second row")], **options)
    assert model.config._attn_implementation == packing.ATTENTION, "restored after an error too"


@ALL
@pytest.mark.parametrize("training", [True, False])
def test_modes_and_positions(make_policy, training, engine):
    """Catches samples with dropout, a trained model left in evaluation mode, and negative positions
    of padding, which a table of positions cannot look up."""
    model, _ = make_policy()
    model.train(training)
    seen = []

    def watch(_model, _args, inputs):
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # it would make a plan for each token
        seen.append((model.training, inputs["position_ids"].min().item(), cudnn))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    sample(model, [[65], [66] * 4], max_new_tokens=1, engine=engine)
    assert {*seen} == {(False, 0, False)}
    assert model.training == training
    assert torch.backends.cuda.cudnn_sdp_enabled()


# ------------------------------------------------------------------------- a policy that is loaded


def test_a_policy_with_other_rows_and_tokens(make_policy, tmp_path):
    """Catches a run that needs a pad token or adds one, a vocabulary whose size is the config's, or
    the tokenizer's where the model has fewer rows, and an end token that only the model names."""
    model, tokenizer = make_policy()
    model.generation_config.eos_token_id = [256, 299]
    tokenizer.pad_token = None
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    smaller, _ = models.load_policy(str(tmp_path), "cpu")
    assert smaller.vocab_size == 258, "without the token that the model lacks"
    model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path)
    loaded, tokenizer = models.load_policy(str(tmp_path), "cpu")
    assert loaded.has_exact_decoder, "it was checked"
    assert (loaded.config.vocab_size, loaded.vocab_size, tokenizer.pad_token) == (320, 259, None)
    cfg = config.Config(engine="hf", max_new_tokens=9, temperature=0.5)
    how = models.sampling(cfg, loaded, tokenizer, 20, batch_size=7)
    options = {"temperature": 0.5, "batch_size": 7, "engine": models.ENGINES["hf"]}
    assert how == rollout.Sampling(9, [256, 299], tokenizer.eos_token_id, **options)


def test_prompts_and_equal_texts_are_read_once(make_policy, monkeypatch):
    """Catches a prefill for each completion, equal texts in two rows, finished rows that stay, and
    a batch size that is ignored."""
    model, _ = make_policy()
    computed, forward = [], decoder.Decoder.__call__  # tokens of each forward

    def spy(ours, token, *args):
        computed.append(token.numel())
        return forward(ours, token, *args)

    model.register_forward_pre_hook(lambda _model, args: computed.append(args[0].numel()))
    monkeypatch.setattr(decoder.Decoder, "__call__", spy)
    options = {"eos_ids": list(range(0, 258, 8)), "batch_size": 50}
    found = sample(model, [[65, 66, 67], [68, 69, 70]], group_size=50, **options)
    read = set()
    for prompt, (group, lengths) in enumerate(
        zip(found.completion_ids.tolist(), found.lengths.tolist(), strict=True)
    ):
        for text, length in zip(group, lengths, strict=True):
            read |= {(prompt, *text[:n]) for n in range(1, length)}
    assert found.truncated.any()
    assert max(computed) <= 50
    assert sum(computed) == 6 + len(read)
