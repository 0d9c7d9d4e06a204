"""One slot: packing changes no log-prob and no gradient. test_plan.py tests the plan."""

import random
import types

import pytest
import torch

import packing

# ------------------------------------------------------------------------- one slot


def test_pack_layout_by_hand():
    """The docstring's example. Catches predictors off by one, positions that do not restart,
    mixed-up owners, and a last token that is forwarded for nothing."""
    pack = packing.build_pack([[10, 11], [20]], [[12, 13], [21]])
    assert pack.input_ids.tolist() == [[10, 11, 12, 20]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0]]
    assert pack.segments.runs == ((1, 3, 3), (1, 1, 1))
    assert pack.segments.cu_queries.tolist() == pack.segments.cu_keys.tolist() == [0, 3, 4]
    assert pack.segments.key_index is None
    assert pack.predictors.tolist() == [1, 2, 3]
    assert pack.targets.tolist() == [12, 13, 21]
    assert pack.owner.tolist() == [0, 0, 1]


def test_pack_layout_with_shared_prompts_by_hand():
    """Two prompts with two and three completions of 0 to 3 tokens; targets keep the caller's order.
    Catches a branch that sees another branch or the other prompt, positions that restart in a
    branch, and a first token that is not predicted by the end of its prompt."""
    prompts = [[20], [10, 11], [10, 11], [10, 11], [20]]
    completions = [[21], [12, 13, 14], [15, 16], [], [22, 23, 24]]
    pack = packing.build_pack(prompts, completions, share_prompts=True)
    assert pack.input_ids.tolist() == [[10, 11, 20, 12, 13, 15, 22, 23]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 2, 3, 2, 1, 2]]
    assert pack.segments.runs == ((1, 2, 2), (1, 1, 1), (1, 2, 4), (1, 1, 3), (1, 2, 3))
    assert pack.segments.key_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 2, 6, 7]
    assert pack.segments.cu_queries.tolist() == [0, 2, 3, 5, 6, 8]
    assert pack.segments.cu_keys.tolist() == [0, 2, 3, 7, 10, 13]
    assert pack.predictors.tolist() == [2, 1, 3, 4, 1, 5, 2, 6, 7]
    assert pack.targets.tolist() == [21, 12, 13, 14, 15, 16, 22, 23, 24]
    assert pack.owner.tolist() == [0, 1, 1, 1, 2, 2, 4, 4, 4]


def test_equal_segments_are_one_run():
    """Attention takes a run in one call. Catches segments laid out in the order of arrival."""
    pack = packing.build_pack([[1], [2], [3], [4]], [[5, 6], [7], [8, 9], [1]])
    assert pack.segments.runs == ((2, 2, 2), (2, 1, 1))
    completions = [[5, 6], [7, 8], [8, 9], [1, 1]]
    pack = packing.build_pack([[1], [2], [1], [2]], completions, share_prompts=True)
    assert pack.segments.runs == ((2, 1, 1), (4, 1, 2))


# ------------------------------------------------------------------------- packed against plain


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """The obvious way: one sequence, transformers' own attention, the whole logits tensor."""
    model.set_attn_implementation("sdpa")  # "eager" rounds its softmax to float32
    logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
    logits = logits / temperature
    model.set_attn_implementation(packing.ATTENTION)
    each = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    logprobs = each.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
    return logprobs, -(each.exp() * each).sum(dim=1)


def flat_grad(model):
    return torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def sequences():
    """30 pairs of a prompt, each used several times, and a completion of 0, 1 or more tokens."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 1, 2, 3, 5, 9)]
    lengths = [0, 1, 1, 2, 3, 3, 3, 8, 17, 30]

    def sequence():
        prompt = rng.choice(prompts)
        return prompt, [rng.randrange(256) for _ in range(rng.choice(lengths))]

    return [sequence() for _ in range(30)]


@pytest.mark.parametrize("share", [False, True])
def test_random_sets_equal_one_by_one(make_policy, sequences, share):
    """Log-probs, entropies and gradients of random sets, in float64, for slots of one to all of the
    sequences and several windows. Catches attention across segments, positions that do not restart,
    key and value heads in the wrong order, runs split in the wrong place, a branch's mask that is
    off by one, and a layer's own scale that is dropped."""
    model, _ = make_policy(dtype=torch.float64)
    model.model.layers[1].self_attn.scaling = 0.1
    plain, gradients = [], []
    for prompt, completion in sequences:
        model.zero_grad()
        logprobs, entropy = plain_logprobs(model, prompt, completion, 0.7)
        logprobs.sum().backward()
        plain.append((logprobs.detach(), entropy.detach()))
        gradients.append(flat_grad(model))
    rng = random.Random(2)
    for size in (1, 2, 5, 12, 30) * 6:
        members = rng.sample(range(30), size)
        prompts, completions = zip(*(sequences[m] for m in members), strict=True)
        coefficients = torch.randn(size, dtype=torch.float64)
        lengths = [len(p) + max(0, len(c) - 1) for p, c in zip(prompts, completions, strict=True)]
        sharing = (list(map(str, prompts)), list(map(len, prompts))) if share else ()
        model.zero_grad()
        for slot in packing.plan_packs(lengths, 40, rng.choice([1, 4, 64]), *sharing):
            some = [prompts[place] for place in slot], [completions[place] for place in slot]
            pack = packing.build_pack(*some, share_prompts=share)
            assert pack.input_ids.shape[1] <= 40 or len(slot) == 1
            logprobs, entropy = packing.packed_logprobs(model, pack, temperature=0.7)
            (logprobs * coefficients[torch.tensor(slot)[pack.owner]]).sum().backward()
            for owner, place in enumerate(slot):
                own, (wanted, wanted_entropy) = pack.owner == owner, plain[members[place]]
                assert torch.allclose(logprobs[own], wanted, atol=1e-10)
                assert torch.allclose(entropy[own], wanted_entropy, atol=1e-10)
        wanted = sum(c * gradients[m] for c, m in zip(coefficients, members, strict=True))
        assert (flat_grad(model) - wanted).abs().max() < 1e-10 * max(1.0, wanted.abs().max())


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_attention_that_cannot_be_packed_is_refused(name):
    """Catches attention with a window, a cap or sinks that is silently computed without them."""
    states = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=name):
        packing.packed_attention(None, states, states, states, None, **{name: 4})


def test_attention_with_dropout_is_refused(make_policy):
    """Catches dropout, with which the trained policy would not be the one that sampled."""
    pack = packing.build_pack([[1, 2]], [[3]])
    model, _ = make_policy()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    packing.packed_logprobs(model.eval(), pack)
    with pytest.raises(NotImplementedError, match=r"dropout, and the model asks for 0\.1"):
        packing.packed_logprobs(model.train(), pack)


# ------------------------------------------------------------------------- GPU kernels, imitated


def fake_kernel(query, key, value, cu_q, cu_k, max_q, max_k, scale, grouped):
    """A variable-length kernel as documented: causal, the last query aligned to the last key."""
    assert query.shape[1:] == (4, 8)
    assert key.shape[1:] == value.shape[1:] == (2, 8)
    assert grouped
    assert cu_q.dtype == cu_k.dtype == torch.int32
    q_lengths, k_lengths = cu_q.diff(), cu_k.diff()
    assert (max_q, max_k) == (q_lengths.max(), k_lengths.max())
    assert (cu_q[-1], cu_k[-1]) == (len(query), len(key))
    out = []
    pairs = ((query, q_lengths), (key, k_lengths), (value, k_lengths))
    parts = (part.split(sizes.tolist()) for part, sizes in pairs)
    for q, *shared in zip(*parts, strict=True):
        k, v = (heads.repeat_interleave(2, dim=1) for heads in shared)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        mask = torch.ones(len(q), len(k)).tril(len(k) - len(q)) == 0
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


def torch_2_11(q, k, v, *bounds, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    return fake_kernel(q, k, v, *bounds, scale, grouped=True)


def torch_2_13(
    q, k, v, *bounds, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert window_size == (-1, 0)
    return fake_kernel(q, k, v, *bounds, scale, grouped=enable_gqa)


def flash_attn(q, k, v, *bounds, softmax_scale=None, causal=False):
    assert causal
    return fake_kernel(q, k, v, *bounds, softmax_scale, grouped=True)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kernel", [torch_2_11, torch_2_13, flash_attn])
def test_variable_length_kernels_are_called_as_documented(
    make_policy, sequences, monkeypatch, kernel, share
):
    """The arguments give the same log-probs with an imitation of each kernel. Catches query bounds
    passed for key bounds, a missing causal window or scale, and an argument that torch 2.11 does
    not know."""
    monkeypatch.setattr(packing, "flash_attn_varlen_func", kernel if kernel is flash_attn else None)
    monkeypatch.setattr(packing, "varlen_attn", None if kernel is flash_attn else kernel)
    model, _ = make_policy()
    pack = packing.build_pack(*zip(*sequences, strict=True), share_prompts=share)
    wanted, _ = packing.packed_logprobs(model, pack)
    monkeypatch.setattr(packing, "_by_runs", packing._varlen)
    got, _ = packing.packed_logprobs(model, pack)
    assert (got - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "kernel"),
    [(True, torch.bfloat16, True), (True, torch.float32, False), (False, torch.bfloat16, False)],
)
def test_kernels_take_16_bits_on_cuda_only(monkeypatch, is_cuda, dtype, kernel):
    """Fails if float32 on CUDA, or 16 bits on a CPU, reaches a kernel that cannot take it."""
    chosen = []
    monkeypatch.setattr(packing, "_attend", lambda inside, *_args: chosen.append(inside))
    monkeypatch.setattr(packing, "varlen_attn", torch_2_13)
    value = types.SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
    packing.packed_attention(None, None, None, value, None)
    assert chosen == [packing._varlen if kernel else packing._by_runs]


def test_autocast_reaches_the_kernels_in_one_dtype(make_policy, monkeypatch):
    """Under autocast, Qwen3's normalized queries and keys are float32 and its values bfloat16.
    Catches a missing cast."""
    seen = []

    def kernel(query, key, value, *_args):
        seen.append({query.dtype, key.dtype, value.dtype})
        return query

    monkeypatch.setattr(packing, "_by_runs", kernel)
    model, _ = make_policy()
    with torch.autocast("cpu", torch.bfloat16):
        pack = packing.build_pack([[1, 2]], [[3, 4]])
        logprobs, entropy = packing.packed_logprobs(model, pack)
    assert seen == [{torch.bfloat16}] * 2
    assert logprobs.dtype == entropy.dtype == torch.float32
