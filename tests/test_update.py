"""The update: its sums and gradient are the formulas, in any slots; the chunked head is exact."""

import copy

import pytest
import torch
import toy
from test_packing import flat_grad, plain_logprobs
from transformers import Qwen3ForCausalLM

import config
import models
import packing
import update
from runtime import InputError

# ------------------------------------------------------------------------- the update


def resolved(loss, **changes):
    """A narrow clip and a KL term."""
    options = {"beta": 0.1, "eps_low": 0.05, "eps_high": 0.05, "device": "cpu", "loss": loss}
    return config.resolve(config.Config(**options | changes))


@pytest.mark.parametrize(
    ("loss", "cap", "looked_up", "rank"),
    [("grpo", 0, False, 0), ("gspo", 0, False, 0), ("cispo", 0, False, 0), ("grpo", 1.2, False, 0),
     ("grpo", 1.2, True, 0), ("grpo", 0, False, 4)],
)  # fmt: skip
def test_the_sums_are_the_formulas(
    make_policy, make_rollouts, monkeypatch, loss, cap, looked_up, rank
):
    """Every sum and the gradient against the formulas, completion by completion, with transformers'
    own attention in float64, though several share a slot, and a prompt if the loss is GRPO's.
    With a cap, old log-probs are current or looked up. With a rank, adapters are trained in
    checkpointed layers, and the reference is the model without them."""
    model, _ = make_policy(dtype=torch.float64)
    reference, _ = make_policy(seed=1, dtype=torch.float64)
    frozen = reference  # what the update computes the reference with
    if rank:
        frozen, reference = model, copy.deepcopy(model)
        toy.inject_moved(model, rank, 0)
        model.double()
        models.checkpoint_layers(model)
    rollouts = make_rollouts(model, 4, 2, drift=0.3)
    rollouts.lengths[0], rollouts.lengths[3] = torch.tensor([[1, 6], [0, 4]])
    generator = torch.Generator().manual_seed(1)
    advantages, scale = torch.randn(2, 4, 2, dtype=torch.float64, generator=generator)
    advantages[1] = 0.0
    scale[2, 0] = 0.0
    cfg = resolved(loss, pack_tokens=16, importance_cap=cap, temperature=0.9)
    keep = torch.ones(4, 2, dtype=torch.bool)
    keep[2, 1] = False
    monkeypatch.setattr(packing, "shares_prompts", lambda device: loss == "grpo")
    old_logprobs = None if cap else rollouts.logprobs
    if looked_up:
        old_logprobs = rollouts.logprobs.sin()
    model.zero_grad()
    got = update.accumulate_gradients(
        model, rollouts, advantages, scale, keep, cfg=cfg, old_logprobs=old_logprobs,
        reference=frozen,
    )  # fmt: skip
    grad = flat_grad(model)
    assert got.tokens <= got.slots
    assert got.slots % 16 == 0

    model.gradient_checkpointing_disable()
    model.zero_grad()
    names = ("loss", "kl", "clipped", "gap", "importance", "capped", "entropy", "completion_tokens")
    wanted = dict.fromkeys(names, 0.0)
    for q, g in keep.nonzero().tolist():
        n = rollouts.lengths[q, g].item()
        text = rollouts.prompt_ids[q], rollouts.completion_ids[q, g, :n].tolist()
        new, entropy = plain_logprobs(model, *text, 0.9)
        sampled = rollouts.logprobs[q, g, :n]
        old = new.detach() if cap else sampled
        old = old_logprobs[q, g, :n] if looked_up else old
        importance = (old - sampled).exp()
        multiplier = scale[q, g] * importance.clamp(max=cap or 1.0)
        ratio = (new - old).exp()
        if loss == "gspo":
            ratio = ((new - old).sum() / max(n, 1)).exp()
        advantage = advantages[q, g]
        inside = ratio.clamp(0.95, 1.05)
        if loss == "cispo":  # a constant, clipped whatever the sign of the advantage
            each = -inside.detach() * advantage * new
            clipped = ratio != inside
        else:
            each = -torch.minimum(ratio * advantage, inside * advantage).expand(n)
            clipped = (ratio - inside) * advantage > 0
        change = plain_logprobs(reference, *text, 0.9)[0].detach() - new
        kl = change.exp() - change - 1
        total = ((each + cfg.beta * kl) * multiplier).sum()
        total.backward()
        wanted["loss"] += total.item()
        wanted["kl"] += (kl * multiplier).sum().item()
        wanted["clipped"] += clipped.expand(n).sum().item()
        wanted["gap"] += (new - sampled).abs().sum().item()
        wanted["importance"] += importance.sum().item()
        wanted["capped"] += (importance > cap).sum().item() if cap else 0
        wanted["entropy"] += entropy.sum().item()
        wanted["completion_tokens"] += n
    assert cap or 0 < wanted["clipped"] < rollouts.lengths.sum()
    for name, value in wanted.items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-9), name
    assert (grad - flat_grad(model)).abs().max() < 1e-10 * grad.abs().max()


def test_bfloat16_update(make_policy, make_rollouts):
    """Arithmetic is in bfloat16, weights and gradients in float32, for the reference too. Catches
    an update or a reference without autocast, and a cache of casts, whose gradients are bfloat16.
    """
    (model, _), (reference, _) = make_policy(), make_policy(seed=1)
    rollouts = make_rollouts(model, 3, 4)
    seen = []

    def remember(_module, _args, out):
        seen.append((out.dtype, torch.is_autocast_cache_enabled()))

    for each in (model, reference):
        each.get_output_embeddings().register_forward_hook(remember)
    ones = torch.ones(3, 4, dtype=torch.float64)
    grads = []
    for dtype in ("float32", "bfloat16"):
        cfg = config.resolve(config.Config(device="cpu", dtype=dtype, beta=0.1))
        model.zero_grad()
        update.accumulate_gradients(
            model, rollouts, ones, ones, ones > 0, cfg=cfg, old_logprobs=rollouts.logprobs,
            reference=reference,
        )  # fmt: skip
        grads.append(flat_grad(model))
    assert seen == [(torch.float32, False)] * 2 + [(torch.bfloat16, False)] * 2
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert 1e-6 < (grads[0] - grads[1]).norm() / grads[0].norm() < 0.1


@pytest.mark.parametrize("share_prompts", [False, True])
def test_gradients_are_added_in_a_fixed_order(make_policy, share_prompts):
    """On a CPU the backward pass of indexing with a tensor adds in parallel, so that two runs of a
    seed differ once in a while. Catches hidden[predictors]."""
    model, _ = make_policy()
    pack = packing.build_pack([[1, 2, 3]] * 3, [[4, 5], [6], [7, 8]], share_prompts=share_prompts)
    nodes = set()
    todo = [packing.packed_logprobs(model, pack)[0].grad_fn]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    names = {node.name() for node in nodes}
    assert "IndexSelectBackward0" in names
    assert not names & {"IndexBackward0", "IndexPutBackward0"}


# ------------------------------------------------------------------------- the head


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_chunked_head_is_the_head(make_policy, monkeypatch, rows):
    """Values, entropies and gradients of 7 tokens in chunks, with no more logits at once than
    allowed, in the backward pass too."""
    model, _ = make_policy(dtype=torch.float64)
    head, targets = model.get_output_embeddings(), torch.arange(7)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=draw, requires_grad=True)
    coefficients = torch.arange(1.0, 8.0, dtype=torch.float64)
    every = (hidden @ head.weight[:200].T / 0.7).log_softmax(dim=-1)
    wanted = every[torch.arange(7), targets]
    wanted_gradients = torch.autograd.grad(wanted @ coefficients, (hidden, head.weight))

    seen = []
    head.register_forward_hook(lambda _module, _inputs, out: seen.append(len(out)))
    monkeypatch.setattr(packing, "HEAD_LOGITS", rows * head.out_features + 5)
    logprobs, entropy = packing.token_logprobs(hidden, head, targets, 0.7, 200)
    gradients = torch.autograd.grad(logprobs @ coefficients, (hidden, head.weight))

    assert torch.allclose(logprobs, wanted, atol=1e-12)
    assert torch.allclose(entropy, -(every.exp() * every).sum(dim=1), atol=1e-12)
    assert not entropy.requires_grad
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        assert torch.allclose(got, expected, atol=1e-12)
    assert max(seen) == rows
    assert sum(seen) == (7 if rows == 7 else 14), "once forward, once backward"


def test_scaled_logits_are_refused(policy_folder, monkeypatch):
    """Even slightly: such a model would sample from a policy other than the trained one. Catches a
    loose tolerance."""
    forward = Qwen3ForCausalLM.forward

    def scaled(self, *args, **options):
        out = forward(self, *args, **options)
        out.logits = 0.99 * out.logits
        return out

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", scaled)
    with pytest.raises(InputError, match="packing would change it"):
        models.load_policy(policy_folder, "cpu")
