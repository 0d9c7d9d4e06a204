"""Rollouts: log-probs are those of the policy that sampled; completions end where they should.

The plain loop is proved against forwards without a cache, the engines against the plain loop.
"""

import collections
import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from toy import plain_logits

import chat_format
import dppo
import models
import packing
import rollout
from engines import compact, hf, prefill, slots
from runtime import InputError

FAST = ["compact", "slots", "hf"]
ALL = pytest.mark.parametrize("engine", ["plain", *FAST])


class InSlots:
    """compact as on a GPU, eagerly; it looks for ends every 4 tokens."""

    @staticmethod
    def sample(*args, **options):
        with mock.patch.multiple(slots, DEVICES=("cpu",), EVERY=4):
            return compact.sample(*args, **options)


ENGINES = models.ENGINES | {"slots": InSlots}


def sample(model, prompt_ids, *, group_size=6, seed=5, keys=None, engine="plain", **changes):
    options = {"max_new_tokens": 12, "eos_ids": [256], "pad_id": 257, "batch_size": 12}
    sampling = rollout.Sampling(**options | changes, engine=ENGINES[engine])
    draw = {"group_size": group_size, "seed": seed, "keys": keys}
    return rollout.sample(model, prompt_ids, sampling, **draw)


def assert_same_rollouts(found, wanted, *, rtol=0.0, atol=1e-6):
    """The same completions, with the same log-probs, entropies and energies up to rounding."""
    inside = torch.arange(wanted.logprobs.shape[2]) < wanted.lengths[..., None]
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.truncated, wanted.truncated)
    assert torch.equal(found.completion_ids[inside], wanted.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):
        own, other = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol, msg=name)


# ------------------------------------------------------------------------- the plain loop is right


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_trainers(make_policy, temperature):
    """Catches a temperature on one side only, values shifted by a token, left padding that is
    attended to, and an energy without the other tokens' part.

    The reference is a forward of the trainer over prompt and completion, at the same temperature.
    """
    model, _ = make_policy()
    prompts = [[66, 67, 68, 69, 70], [65], [71, 72]]
    options = {"temperature": temperature, "eos_ids": [256, *range(0, 256, 8)]}
    got = sample(model, prompts, batch_size=18, **options)
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
        probs = probs[len(prompts[q]) - 1 : -1]  # that each completion token came from
        one_hot = torch.nn.functional.one_hot(ids[0, len(prompts[q]) :], probs.shape[1])
        energy = (one_hot - probs).square().sum()
        assert got.energy[q, g].item() == pytest.approx(energy.item(), rel=1e-4)


def test_frequencies_and_entropy_are_those_of_the_policy(make_policy):
    """Catches a token that gets another one's share, and a temperature that is applied twice.

    Frequencies of 20,000 one-token completions are within 4.5 standard errors of softmax(logits /
    temperature), and the recorded entropy is that distribution's.
    """
    model, _ = make_policy()
    logits = plain_logits(model, torch.tensor([[65, 66]]))[0, -1]
    probability = torch.softmax(logits / 1.5, dim=0)
    options = {"max_new_tokens": 1, "temperature": 1.5}
    got = sample(model, [[65, 66]], group_size=20_000, **options)
    frequency = torch.bincount(got.completion_ids.flatten(), minlength=258) / 20_000
    error = (probability * (1 - probability) / 20_000).sqrt()
    assert ((frequency - probability).abs() <= 4.5 * error + 1e-4).all()
    entropy = -(probability * probability.log()).sum()
    assert torch.allclose(got.entropy, entropy.expand(1, 20_000), atol=1e-4)


def test_every_completion_is_as_frequent_as_the_policy_says(small_world):
    """Catches rows that change places when others leave, an end token that does not end,
    completions of a group that copy each other, and a vocabulary's padding that is sampled or
    counted.

    In 20,000 draws next to groups of other lengths, each of the 53 possible completions occurs
    within 4 standard errors of its probability, with the trainer's log-probs.
    """
    model, chances = small_world
    assert len(chances) == 53
    assert sum(chances.values()) == pytest.approx(1)
    options = {"max_new_tokens": 3, "eos_ids": [0, 4], "pad_id": 4, "batch_size": 60_000}
    prompts = [[3], [1, 2], [2, 2, 1, 3]]
    got = sample(model, prompts, group_size=20_000, **options)
    completions = zip(got.completion_ids[1].tolist(), got.lengths[1], strict=True)
    found = [tuple(ids[:length]) for ids, length in completions]
    counts = collections.Counter(found)
    for completion, chance in chances.items():
        error = (chance * (1 - chance) / 20_000) ** 0.5
        assert abs(counts[completion] / 20_000 - chance) <= 4 * error + 1e-5, completion
    pack = packing.build_pack([[1, 2]] * 200, list(map(list, found[:200])))
    forced, _ = packing.packed_logprobs(model, pack)
    inside = torch.arange(3) < got.lengths[1, :200, None]
    assert (got.logprobs[1, :200][inside] - forced).abs().max() < 1e-5


# ------------------------------------------------------------------------- the engines equal it


SAME = [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"batch_size": 6}, {"pad_id": 8}]


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("options", SAME, ids=str)
def test_engines_sample_what_the_plain_loop_samples(make_policy, engine, options):
    """Catches in compact and hf what the tests above catch in the plain loop, and top-k or top-p
    leaking in from the model's generation config, as Qwen3 ships one. In float64, so that rounding
    changes no token; the pad may be an end token."""
    model, _ = make_policy(dtype=torch.float64)
    shipped = {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    model.generation_config.update(do_sample=True, **shipped)
    own_config = model.generation_config
    prompts = [[66, 67, 68, 69, 70], [65], [71, 72]]
    options = {"eos_ids": [256, *range(0, 256, 8)], "max_new_tokens": 20} | options
    wanted = sample(model, prompts, **options)
    assert len(set(wanted.lengths.flatten().tolist())) > 1
    found = sample(model, prompts, engine=engine, **options)
    assert_same_rollouts(found, wanted, rtol=1e-5, atol=1e-5)  # hf makes logits float32
    assert model.generation_config is own_config, "restored"
    assert model.config._attn_implementation == packing.ATTENTION


@ALL
def test_energy_of_a_nearly_certain_token(make_policy, engine):
    """Catches an energy computed as 1 - 2 p + sum p^2, which in float32 is all rounding error
    here."""
    model, _ = make_policy()
    logits = plain_logits(model, torch.tensor([[65, 66]]))[0, -1].double()
    first, second = logits.topk(2).values.tolist()
    temperature = (first - second) / 8
    probs = (logits / temperature).softmax(dim=0)
    exact = torch.nn.functional.one_hot(logits.argmax(), 258).sub(probs).square().sum().item()
    assert 1e-8 < exact < 1e-6
    options = {"max_new_tokens": 1, "temperature": temperature, "engine": engine}
    got = sample(model, [[65, 66]], **options)
    assert (got.completion_ids == logits.argmax()).all()
    assert got.energy.flatten().tolist() == pytest.approx([exact] * 6, rel=1e-3)


@ALL
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_distribution_of_a_bfloat16_model(make_policy, engine, temperature):
    """Catches log-probs that are rounded to bfloat16 before or after the temperature divides."""
    model, _ = make_policy(dtype=torch.bfloat16)
    with torch.no_grad(), rollout.evaluation_mode(model):
        logits = model(torch.tensor([[65, 66]])).logits[0, -1]
    scores = (logits.double() / temperature).log_softmax(dim=0)
    options = {"max_new_tokens": 1, "temperature": temperature, "engine": engine}
    got = sample(model, [[65, 66]], **options)
    exact = scores[got.completion_ids].float()
    torch.testing.assert_close(got.logprobs, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", FAST)
def test_greedy_is_what_the_bare_model_says(make_policy, engine):
    """Catches an error that compact and hf share, such as padding that is penalized as if the
    prompt held it: each token of a padded prompt is checked by a forward without a cache."""
    model, _ = make_policy(seed=4)
    options = {"temperature": 0.0, "repetition_penalty": 1.7, "engine": engine}
    got = sample(model, [[65, 66], [1] * 9], group_size=1, **options)
    sequence = [65, 66]
    for token in got.completion_ids[0, 0, : got.lengths[0, 0]].tolist():
        logits = plain_logits(model, torch.tensor([sequence]))[0, -1]
        seen = sorted(set(sequence))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
        assert token == logits.argmax()
        sequence.append(token)


def test_top_p_and_top_k_cut_the_tail(make_policy):
    """Catches a flag of eval.py that does nothing. The plain loop refuses them."""
    model, _ = make_policy()
    probs = plain_logits(model, torch.tensor([[65, 66]]))[0, -1].softmax(dim=0)
    ranked = probs.sort(descending=True)
    nucleus = ranked.indices[: int((ranked.values.cumsum(dim=0) < 0.5).sum()) + 1].tolist()
    cases = [({"top_p": 0.5}, nucleus), ({"top_k": 3}, ranked.indices[:3].tolist())]
    for engine, (changes, allowed) in itertools.product(FAST, cases):
        options = {"max_new_tokens": 1, "engine": engine, "batch_size": 5_000} | changes
        got = sample(model, [[65, 66]], group_size=5_000, **options)
        assert set(got.completion_ids.flatten().tolist()) == set(allowed)
        assert got.entropy.isfinite().all()
    for changes in ({"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1.1}):
        with pytest.raises(ValueError, match="the plain loop has no top_k, top_p or repetition"):
            sample(model, [[65, 66]], **changes)


@pytest.mark.parametrize("engine", ["plain", "compact"])
def test_positions_of_padding_are_not_negative(make_policy, engine):
    """Catches negative positions of padding, which a model with a table of positions cannot look
    up."""
    model, _ = make_policy()
    lowest = []
    model.register_forward_pre_hook(
        lambda _module, _args, inputs: lowest.append(inputs["position_ids"].min().item()),
        with_kwargs=True,
    )
    sample(model, [[65], [66] * 4], max_new_tokens=1, engine=engine)
    assert lowest == [0]


@pytest.mark.parametrize(
    ("engine", "batch_size"), [("plain", 100), ("compact", 50), ("compact", 100)]
)
def test_prompts_are_read_once_and_rows_leave(make_policy, forwards, engine, batch_size):
    """Catches a prefill for each completion, equal texts in two rows, finished rows that stay, a
    check of the last token only, and a batch size that is ignored.

    The model computes every prompt once, and every distinct text once. The plain loop computes
    every completion.
    """
    model, _ = make_policy()
    seen = forwards(model)
    options = {"eos_ids": list(range(0, 258, 8)), "batch_size": batch_size, "engine": engine}
    got = sample(model, [[65, 66, 67], [68, 69, 70]], group_size=50, **options)
    computed = [tokens.numel() for tokens, _, _ in seen]
    assert got.truncated.any()
    assert max(computed) <= batch_size
    tokens = int(got.lengths.sum()) - 100
    if engine == "compact":
        columns = zip(got.completion_ids.flatten(0, 1).tolist(), got.lengths.flatten(), strict=True)
        begun = {
            (row // 50, *ids[: end + 1])
            for row, (ids, length) in enumerate(columns)
            for end in range(length - 1)
        }
        assert len(begun) < tokens
        tokens = len(begun)
    assert sum(computed) == 6 + tokens


@pytest.mark.parametrize("engine", ["plain", "compact"])
def test_forwards_continue_the_cache(make_policy, monkeypatch, engine):
    """Catches a cache by a name that this version of transformers ignores: 5.23 decodes without
    context if it is called `cache`, and 5.40 will if it is called `past_key_values`."""
    model, _ = make_policy()
    made = []
    module, name = {"plain": (rollout, "DynamicCache"), "compact": (prefill, "growing_cache")}[
        engine
    ]
    make = getattr(module, name)
    monkeypatch.setattr(module, name, lambda: made.append(make()) or made[-1])
    sample(model, [[65, 66, 67]], max_new_tokens=5, eos_ids=[], engine=engine)
    assert made[0].get_seq_length() == 3 + 5 - 1  # the last token is not read


@pytest.mark.parametrize("engine", ["plain", "compact"])
def test_prompts_of_one_length_share_a_batch(make_policy, engine):
    """Catches batches in the caller's order, where short prompts are padded to long ones."""
    model, _ = make_policy()
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    prompts = [[65] * 4, [66], [67] * 4, [68]]
    got = sample(model, prompts, group_size=2, batch_size=4, max_new_tokens=1, engine=engine)
    assert shapes == [(2, 1), (2, 4)]
    assert got.prompt_ids == prompts


@ALL
def test_a_completion_follows_from_its_key(make_policy, engine):
    """Catches random numbers that follow from a prompt's place, that depend on the group's size or
    on max_new_tokens, or that completions, tokens or seeds share.

    Some of the prompts, in another order, in smaller groups, cut off earlier, but with their keys,
    get the same ids in float64 as from the plain loop.
    """
    model, _ = make_policy(dtype=torch.float64)
    prompts = [[65, 66, 67], [68], [65, 66, 67], [71] * 5]
    options = {"eos_ids": list(range(0, 258, 24)), "max_new_tokens": 20}
    whole = sample(model, prompts, keys=["a", "b", "c", "d"], **options)
    parts = {"d": 3, "a": 0, "c": 2}
    some = [prompts[number] for number in parts.values()]
    part = sample(model, some, keys=list(parts), group_size=4, engine=engine, **options)
    wanted = whole.completion_ids[[*parts.values()], :4]
    inside = torch.arange(20) < part.lengths[..., None]
    assert torch.equal(part.lengths, whole.lengths[[*parts.values()], :4])
    assert torch.equal(part.completion_ids[inside], wanted[inside])
    other = sample(model, some, keys=["d", "a", "e"], group_size=4, engine=engine, **options)
    assert torch.equal(other.lengths[:2], part.lengths[:2])
    assert not torch.equal(other.completion_ids[2], part.completion_ids[2])
    reseeded = sample(model, some, keys=list(parts), seed=6, group_size=4, engine=engine, **options)
    assert not torch.equal(reseeded.completion_ids, part.completion_ids)
    short = sample(model, some, keys=list(parts), engine=engine, **options | {"max_new_tokens": 7})
    inside = torch.arange(7) < short.lengths[..., None]
    wanted = whole.completion_ids[[*parts.values()], :, :7]
    assert torch.equal(short.completion_ids[inside], wanted[inside])
    first = whole.completion_ids[:, :, 0]
    assert len(set(first[[0, 2]].flatten().tolist())) > 6, "prompts and groups differ"


def test_no_two_prompts_share_their_random_numbers(make_policy):
    """Catches a key of which fewer than 64 bits count. Prompt 123 in step 31 of seed 0 and prompt
    44 in step 77 shared their numbers when torch's generator took 32 bits of a seed."""
    seeds = [dppo.seed_for(0, 31, "rollout"), dppo.seed_for(0, 77, "rollout")]
    keys = [(123, 0), (44, 0)]
    pairs = [dppo.seed_for(seed, key) for seed, key in zip(seeds, keys, strict=True)]
    assert len({pair % 2**32 for pair in pairs}) == 1, "the couple still collides in 32 bits"
    model, _ = make_policy(dtype=torch.float64)
    one, other = (sample(model, [[65]], seed=s, keys=[k]) for s, k in zip(seeds, keys, strict=True))
    assert not torch.equal(one.completion_ids, other.completion_ids)
    numbers = [dppo.generator_for(s, k).random(50) for s, k in zip(seeds, keys, strict=True)]
    assert not np.isin(numbers[0], numbers[1]).any()


def test_ends_and_cuts(make_policy):
    """Catches an end token that is ignored because it is not the first of the list, or that is left
    out of its completion, and lengths that are taken from pad tokens, one of which ends
    completions."""
    model, tokenizer = make_policy()
    ends = [257, 256, *range(0, 256, 8)]
    got = sample(model, [[65]], group_size=200, eos_ids=ends)
    assert got.truncated.any()
    assert not got.truncated.all()
    columns = got.completion_ids[0].tolist(), got.lengths[0], got.truncated[0]
    for ids, length, cut in zip(*columns, strict=True):
        inside = [token in ends for token in ids[:length]]
        assert not any(inside[:-1])
        assert inside[-1] != bool(cut)
        assert length == 12 or not cut
    texts = chat_format.decode(tokenizer, got.completion_ids[0].tolist())
    assert len(texts) == 200
    assert not any("<|" in text for text in texts)


@ALL
def test_no_prompts_is_an_empty_rollout(make_policy, engine):
    """Catches a rank without prompts that fails."""
    got = sample(make_policy()[0], [], engine=engine)
    assert got.completion_ids.shape[:2] == (0, 6)
    assert got.lengths.shape == (0, 6)


@ALL
@pytest.mark.parametrize("token", [65, 66])
def test_broken_weights_are_reported(make_policy, engine, token):
    """Catches a check for NaN that a single finite logit satisfies, and completions that end before
    the first check."""
    model, _ = make_policy()
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, [[65]], engine=engine)
    assert model.config._attn_implementation == packing.ATTENTION, "restored after an error too"


@ALL
def test_one_bad_row_is_reported(make_policy, engine):
    """Catches a NaN that passes because the logits of other completions, or of later tokens, are
    finite. Only the second row of a forward by transformers is broken here."""
    model, _ = make_policy()
    broken = lambda _module, _args, out: out.index_fill(0, torch.tensor([1]), torch.nan)
    model.model.norm.register_forward_hook(broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, [[65], [66]], engine=engine, eos_ids=[-1])


@ALL
@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_restored(make_policy, training, engine):
    """Catches samples with dropout, and a trained model that sampling leaves in evaluation mode, or
    the reverse."""
    model, _ = make_policy()
    model.train(training)
    during = []
    model.register_forward_pre_hook(
        lambda *_: during.append((model.training, torch.backends.cuda.cudnn_sdp_enabled()))
    )
    sample(model, [[65]], max_new_tokens=1, engine=engine)
    cudnn = engine == "plain"  # it would make a plan for each token
    assert during == [(False, cudnn)]
    assert model.training == training
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_settings_come_from_the_policy(make_policy):
    """Catches a chat model that never stops, because its end token is taken from the tokenizer, and
    an option that is lost."""
    model, tokenizer = make_policy()
    for of_generation, of_config, ends in (
        ([5, 256], None, [5, 256]), (7, 9, [7, 9, 256]), (None, [5, 7], [5, 7, 256])
    ):  # fmt: skip
        model.generation_config.eos_token_id = of_generation
        model.config.eos_token_id = of_config
        got = models.sampling(model, tokenizer, 9, "hf", temperature=0.5)
        assert got == rollout.Sampling(9, ends, 257, temperature=0.5, engine=hf)


@ALL
def test_a_loaded_models_vocabulary_is_its_tokenizers(make_policy, tmp_path, engine):
    """Catches a vocabulary whose size is the config's: 62 rows of this head are not tokens."""
    model, tokenizer = make_policy()
    model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = models.load_policy(str(tmp_path), "cpu")
    assert loaded.config.vocab_size == 320
    got = sample(loaded, [[65, 66]], group_size=500, engine=engine)
    assert got.completion_ids.max() < 258
    pack = packing.build_pack([[65, 66]], [got.completion_ids[0, 0, : got.lengths[0, 0]].tolist()])
    forced, _ = packing.packed_logprobs(loaded, pack)
    assert (forced - got.logprobs[0, 0, : got.lengths[0, 0]]).abs().max() < 1e-5


def test_a_loaded_policy_can_be_padded_and_trained(make_policy, tmp_path):
    """Catches a run that needs a pad token or adds one to the tokenizer, a vocabulary that includes
    a token which the model lacks, and weights that AdamW would update in bfloat16 because the file
    has that type."""
    model, tokenizer = make_policy(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(tmp_path)
    loaded, tokenizer = models.load_policy(str(tmp_path), "cpu")
    assert models.sampling(loaded, tokenizer, 9).pad_id == tokenizer.eos_token_id == 256
    assert tokenizer.pad_token is None
    assert loaded.vocab_size == 258
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_a_policy_in_bfloat16_keeps_its_positions(policy_folder):
    """Catches rotary frequencies that are rounded to bfloat16 together with the weights."""
    exact, _ = models.load_policy(policy_folder, "cpu")
    policy, _ = models.load_policy(policy_folder, "cpu", "bfloat16")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    own, rounded = (model.model.rotary_emb.inv_freq for model in (exact, policy))
    assert torch.equal(own, rounded)
    assert not torch.equal(own, own.bfloat16().float())


def test_a_model_with_a_sliding_window_is_refused(make_policy, tmp_path):
    """Catches a window in one layer that passes because another has full attention."""
    model, tokenizer = make_policy()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"layers of kinds .*sliding_attention"):
        models.load_policy(str(tmp_path), "cpu")
