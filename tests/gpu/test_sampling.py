"""Rollouts on a GPU: the policy's draws, and on the pretend device those of the CPU."""

import pytest
import torch

import config
import data
import eval as evaluation
import packing
import rollout
import update

CASES = [  # engine, dtype, options
    ("plain", "float32", {"temperature": 0.7, "batch_size": 8}),
    ("plain", "bfloat16", {}),
    ("compact", "float32", {}),
    ("compact", "float32", {"temperature": 0.7, "batch_size": 4}),
    ("compact", "bfloat16", {"batch_size": 8}),
    ("hf", "float32", {"temperature": 0.7}),
    ("hf", "bfloat16", {"batch_size": 4}),
]


@pytest.mark.parametrize(("engine", "dtype", "options"), CASES)
def test_logprobs_are_the_policys(policy, sample, engine, dtype, options):
    """Log-probs and entropies against a forward on the CPU, and every end. Some completions end
    early, in batches of one group or of several. Catches a tensor on the wrong device, rows that
    change places when others leave, and values past an end."""
    found = sample(policy(), engine=engine, dtype=dtype, max_new_tokens=24, **options)
    lengths, ids = found.lengths, found.completion_ids
    assert lengths.min() < 12 < lengths.max()
    model, limit = policy("cpu"), 1e-4 if dtype == "float32" else 0.3
    ends = {256, *range(0, 240, 20)}
    for q, g in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
        own = ids[q, g, : lengths[q, g]].tolist()
        assert not ends & {*own[:-1]}
        assert found.truncated[q, g].item() == (own[-1] not in ends)
        assert len(own) == 24 or own[-1] in ends
        pack = packing.build_pack([found.prompt_ids[q]], [own])
        temperature = options.get("temperature", 1.0)
        with torch.no_grad():
            logprobs, entropy = packing.packed_logprobs(model, pack, temperature=temperature)
        gap = found.logprobs[q, g]
        gap[: len(own)] -= logprobs
        assert gap.abs().max() < limit
        assert abs(found.entropy[q, g].item() - entropy.sum().item()) < len(own) * limit


SAME = [  # engine, options
    ("plain", {"max_new_tokens": 40, "temperature": 0.7}),
    ("compact", {"max_new_tokens": 40}),
    ("compact", {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}),
    ("compact", {"temperature": 0}),
    ("compact", {"max_new_tokens": 40, "temperature": 0.7, "batch_size": 4}),
    ("compact, by transformers", {"max_new_tokens": 40, "group_size": 8}),
    ("hf", {}),
    ("hf", {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.7}),
    ("hf", {"temperature": 0}),
]


@pytest.mark.parametrize(("engine", "options"), SAME)
def test_rollouts_are_the_cpus(policy, sample, engine, options):
    """In float32 with the same random numbers, though rows leave the batch at other tokens. On the
    CPU the plain loop samples, if it knows the options. Catches an option that acts on one device
    only, and random numbers that depend on the rows in a batch."""
    model = policy()
    if engine == "compact, by transformers":
        engine, model.why_not_fast = "compact", "it is another model"
    found = sample(model, engine=engine, **options)
    simple = engine if "top_k" in options else "plain"
    wanted = sample(policy("cpu"), engine=simple, **options)
    inside = torch.arange(wanted.logprobs.shape[2]) < wanted.lengths[..., None]
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.truncated, wanted.truncated)
    assert torch.equal(found.completion_ids[inside], wanted.completion_ids[inside])
    for name in ("logprobs", "entropy", "energy"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), atol=1e-4), name


def test_results_are_on_the_cpu(policy, sample, make_policy):
    """What a run and an evaluation compute with. Catches a column that stays on the GPU."""
    columns = [value for value in vars(sample(policy())).values() if torch.is_tensor(value)]
    assert {column.device.type for column in columns} == {"cpu"}
    model, tokenizer = policy(), make_policy()[1]
    options = rollout.Sampling(6, [256], 257)
    args = ([data.Problem("7+9?", "16", "")] * 2, [[65, 66], [67]], lambda text, answer: 1.0)
    rewards, truncated = evaluation.sample_rewards(model, tokenizer, *args, options, k=3, seed=0)
    assert rewards.device.type == truncated.device.type == "cpu"
    assert rewards.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("engine", ["plain", "compact", "hf"])
def test_logits_that_are_not_finite(policy, sample, engine):
    """Catches a check that the host never reads."""
    model = policy()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(model, engine=engine)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "none"), ("bfloat16", "flash"), ("bfloat16", "torch"), ("bfloat16", "none")],
)
def test_trainer_logprobs(policy, sample, kernel, dtype, name):
    """The trainer's arithmetic gives the sampler's log-probs. Catches log-probs of another row, and
    a kernel that attends to another segment."""
    kernel(name)
    cfg = config.resolve(config.Config(device="cuda", dtype=dtype))
    model = policy()
    found = sample(model, dtype=dtype)
    gap = (update.trainer_logprobs(model, found, cfg) - found.logprobs).abs()
    assert gap.max() < (1e-4 if dtype == "float32" else 0.1)
