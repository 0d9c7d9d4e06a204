"""The update over slots: any layout gives the same gradient, in a fixed order; the chunked head is the head."""

import pytest
import torch
from test_packing import flat_grad
from transformers import BloomConfig, BloomForCausalLM

import config
import packing
import rollout
import update
from data import InputError

# ---------------------------------------------------------------------------- the update


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo"])
def test_any_layout_is_the_same_update(make_policy, make_rollouts, monkeypatch, loss):
    """Loss, KL, clipped tokens and gradient of one batch, in float64, in slots of one sequence and of all, shared or
    not, whatever is kept. Kills: a mean over a slot, a weight that stays with the place in the slot, a prompt shared
    by the wrong completions, sums of what was not kept."""
    model, _ = make_policy(dtype=torch.float64)
    reference, _ = make_policy(seed=1, dtype=torch.float64)
    rollouts = make_rollouts(model, 5, 6, drift=0.3)
    advantages, scale = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    half = torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    for keep in (half, torch.ones_like(half), torch.zeros_like(half)):
        results = []
        for pack_tokens, window, share in (
            (1, 1, False),
            (16, 4, False),
            (16, 4, True),
            (24, 64, True),
            (999, 2, True),
        ):
            cfg = config.resolve(
                config.Config(pack_tokens=pack_tokens, pack_window=window, share_prompts=share, device="cpu", loss=loss,
                              beta=0.1, eps_low=0.05, eps_high=0.05)
            )  # fmt: skip
            model.zero_grad()
            monkeypatch.setattr(packing, "HEAD_LOGITS", (7 if pack_tokens == 24 else 9999) * 258)  # in chunks of 7
            row = update.accumulate_gradients(model, rollouts, advantages, scale, keep, cfg=cfg, reference=reference)
            results.append((flat_grad(model), dict(zip(update.SUMS, row.tolist(), strict=True))))
        (grad, sums), *others = results
        assert (grad.abs().max() > 0) == (sums["completion_tokens"] > 0) == bool(keep.any())
        assert sums["completion_tokens"] == rollouts.lengths[keep].sum()
        for other_grad, other_sums in others:
            assert (grad - other_grad).abs().max() <= 1e-10 * grad.abs().max()
            for name in ("loss", "kl", "clipped", "gap", "entropy", "completion_tokens"):
                assert other_sums[name] == pytest.approx(sums[name], rel=1e-9)
        for _, each in results:
            assert each["tokens"] <= each["slots"]
        if keep.all():
            assert sums["slots"] == sums["tokens"], "over-long sequences make their slots as long as themselves"
            lone = [
                (rollouts.prompt_ids[q], ids[:length].tolist(), old[:length])
                for q in range(5)
                for ids, length, old in zip(
                    rollouts.completion_ids[q], rollouts.lengths[q], rollouts.logprobs[q], strict=True
                )
            ]
            own, entropy = packing.packed_logprobs(
                model, packing.build_pack([p for p, _, _ in lone], [c for _, c, _ in lone])
            )
            assert sums["gap"] == pytest.approx((own - torch.cat([old for *_, old in lone])).abs().sum().item())
            assert sums["entropy"] == pytest.approx(entropy.sum().item())
            prompts = sum(map(len, rollouts.prompt_ids))
            assert sums["tokens"] == 6 * prompts + sums["completion_tokens"] - 30
            assert others[-1][1]["tokens"] == prompts + sums["completion_tokens"] - 30, "each prompt once"


def test_bfloat16_update(make_policy, make_rollouts):
    """Arithmetic in bfloat16, weights and their gradients in float32, the reference's too. Kills: an update or a
    reference without autocast, chunks of the head that share one bfloat16 gradient."""
    (model, _), (reference, _) = make_policy(), make_policy(seed=1)
    rollouts, seen = make_rollouts(model, 3, 4), []
    for each in (model, reference):
        each.get_output_embeddings().register_forward_hook(lambda *words: seen.append(words[-1].dtype))
    ones, grads = torch.ones(3, 4, dtype=torch.float64), []
    for dtype in ("float32", "bfloat16"):
        cfg = config.resolve(config.Config(device="cpu", dtype=dtype, beta=0.1))
        model.zero_grad()
        update.accumulate_gradients(model, rollouts, ones, ones, ones > 0, cfg=cfg, reference=reference)
        grads.append(flat_grad(model))
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert 1e-6 < (grads[0] - grads[1]).norm() / grads[0].norm() < 0.1


@pytest.mark.parametrize("share_prompts", [False, True])
def test_no_gradient_is_added_up_in_an_order_of_chance(make_policy, share_prompts):
    """On a CPU the backward of indexing with a tensor adds in parallel, and two runs of a seed differ once in a while.
    Kills: hidden[predictors]."""
    model, _ = make_policy()
    pack = packing.build_pack([[1, 2, 3]] * 3, [[4, 5], [6], [7, 8]], share_prompts=share_prompts)
    names, todo = set(), [packing.packed_logprobs(model, pack)[0].grad_fn]
    while todo:
        node = todo.pop()
        if node not in names:
            names.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    names = {node.name() for node in names}
    assert "IndexSelectBackward0" in names
    assert not names & {"IndexBackward0", "IndexPutBackward0"}


def test_autocast_without_cache_adds_up_in_float32():
    """20 chunks of a head: the error of its gradient is that of one cast. Kills: the cache."""
    torch.manual_seed(0)
    head, hidden, targets = torch.nn.Linear(32, 50, bias=False), torch.randn(2000, 32), torch.randint(50, (2000,))
    grads = {}
    for name, cfg, limit in (("exact", "float32", 10**9), ("one", "bfloat16", 10**9), ("chunks", "bfloat16", 100 * 50)):
        head.zero_grad()
        with update.autocast(config.Config(device="cpu", dtype=cfg), cache=False):
            logprobs, _ = packing.token_logprobs(hidden, head, targets, head_logits=limit)
        logprobs.sum().backward()
        grads[name] = head.weight.grad.clone()
    errors = [(grads[name] - grads["exact"]).norm() / grads["exact"].norm() for name in ("one", "chunks")]
    assert errors[1] < 1.3 * errors[0]


# ---------------------------------------------------------------------------- the head


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_chunked_head_is_the_head(make_policy, rows):
    """Values, entropies and gradients of 7 tokens in chunks, and never more logits than allowed, backward included.
    Kills: a chunk lost or twice, all logits at once, a gradient through the entropy, no temperature."""
    model, _ = make_policy(dtype=torch.float64)
    head = model.get_output_embeddings()
    targets = torch.arange(7)
    results, seen = [], []
    hook = head.register_forward_hook(lambda _module, _inputs, out: seen.append(len(out)))
    for limit in (10**6, rows * head.out_features + 5):
        hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        model.zero_grad()
        logprobs, entropy = packing.token_logprobs(hidden, head, targets, 0.7, head_logits=limit)
        assert not entropy.requires_grad
        (logprobs * torch.arange(1.0, 8.0)).sum().backward()
        results.append((logprobs.detach(), entropy, hidden.grad, head.weight.grad))
    hook.remove()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    assert seen[0] == 7
    assert max(seen[1:]) == rows
    assert sum(seen[1:]) == (7 if rows == 7 else 14), "once forward, once backward"
    part, _ = packing.token_logprobs(hidden, head, targets, 0.7, 200, rows * head.out_features)
    assert torch.allclose(part, (hidden @ head.weight[:200].T / 0.7).log_softmax(dim=-1)[range(7), targets], atol=1e-12)
    each = (hidden @ head.weight.T / 0.7).log_softmax(dim=-1)
    assert torch.allclose(results[0][0], each[torch.arange(7), targets], atol=1e-12)
    assert torch.allclose(results[0][1], -(each.exp() * each).sum(dim=1), atol=1e-12)


def test_a_head_that_is_not_all_is_refused(make_policy, policy_folder, monkeypatch):
    """Models that scale or cap their logits would be sampled from one policy and trained as another."""
    model, _ = make_policy()
    assert packing.packs_exactly(model)
    assert model.config._attn_implementation == packing.ATTENTION
    assert rollout.load_policy(policy_folder, "cpu")
    forward = type(model).forward

    def scaled(self, *words, **options):
        out = forward(self, *words, **options)
        out.logits = 0.5 * out.logits
        return out

    monkeypatch.setattr(type(model), "forward", scaled)
    with pytest.raises(InputError, match="cannot be packed exactly"):
        rollout.load_policy(policy_folder, "cpu")


def test_models_that_cannot_be_packed_are_refused(make_policy, tmp_path):
    """One whose attention does not go through the interface, as transformers' Bloom, one whose layers want a window."""
    _, tokenizer = make_policy()
    bloom = BloomForCausalLM(
        BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=2, initializer_range=0.5)
    )
    for part in (bloom, tokenizer):
        part.save_pretrained(tmp_path / "bloom")
    with pytest.raises(InputError, match="cannot be packed exactly"):
        rollout.load_policy(str(tmp_path / "bloom"), "cpu")
    model, _ = make_policy()
    model.model.layers[1].self_attn.sliding_window = 4
    assert not packing.packs_exactly(model)
