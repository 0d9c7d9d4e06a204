"""The roofline's arithmetic, by hand and against real models."""

import json

import pytest
import torch
import transformers

from bench import __main__ as command_line
from bench import roofline, shapes

# Two layers, 4 heads of width 2 with 2 of keys and values, a head of 20 x 8.
SMALL = transformers.Qwen3Config(
    hidden_size=8, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=2, vocab_size=20, tie_word_embeddings=True,
)  # fmt: skip
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10  # q, k and v, o, feed-forward: 432
NORMS = 2 * (2 * 8 + 2 * 2) + 8  # two of 8 and two of 2 in each layer, and one at the end: 48
WEIGHTS = 2 * LAYER + 20 * 8 + NORMS  # 1072
NARROW = shapes.GPU(flops=1e12, bandwidth=100.0)  # bytes decide
SLOW = shapes.GPU(flops=100.0, bandwidth=1e12)  # operations decide


@pytest.mark.parametrize(
    ("shape", "count"),
    [("0.6b", 596_049_920), ("1.7b", 1_720_574_976), ("4b", 4_022_468_096), ("8b", 8_190_735_360)],
)
def test_parameters_of_qwen3(shape, count):
    """The published numbers, and models without memory. Catches a dimension that is not Qwen3's,
    and a head that is tied where it is not."""
    assert roofline.parameters(shapes.qwen3(shape)) == count
    with torch.device("meta"):
        model = shapes.random_model(shape, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_parameters_by_hand():
    assert roofline.parameters(SMALL) == WEIGHTS == 1072


def test_a_decoded_token_by_hand():
    """Three sequences that attend to 30 tokens in all. Catches float32 weights or keys, weights
    read once for each sequence, and the sum of both times instead of the longer one."""
    cached = 2 * 2 * 2 * 2 * 2  # two bytes, key and value, layers, heads of them, width: 32
    wanted = (2 * WEIGHTS + 30 * cached) / 100
    assert roofline.decode_seconds(SMALL, NARROW, 3, 30) == pytest.approx(wanted)
    attention = 4 * 2 * 8  # scores and values, two each; layers; 4 heads of width 2: 64
    wanted = (3 * 2 * WEIGHTS + 30 * attention) / 100
    assert roofline.decode_seconds(SMALL, SLOW, 3, 30) == pytest.approx(wanted)


def test_an_untied_embedding_is_not_read():
    """Catches weights that are only looked up, and a head that is not read at all."""
    untied = shapes.qwen3("8b")
    weights, _ = roofline.token_bytes(untied)
    assert weights == 2 * (8_190_735_360 - 151_936 * 4096)
    assert roofline.token_bytes(SMALL)[0] == 2 * WEIGHTS


def test_a_rollout_by_hand():
    """Prompts of 5, 7 and 9 tokens, two completions of three tokens each, four at once, so two
    prompts and then one. Catches a prompt read for each completion, a first token decoded twice,
    contexts that do not grow, and batches that are not whole groups."""
    decode = lambda *args: roofline.decode_seconds(SMALL, NARROW, *args)
    wanted = decode(4, 2 * (5 + 7) + 4) + decode(4, 2 * (5 + 7) + 8)
    wanted += decode(2, 2 * 9 + 2) + decode(2, 2 * 9 + 4)
    found = roofline.rollout_seconds(SMALL, NARROW, [5, 7, 9], 2, 3, at_once=4)
    assert found == pytest.approx(wanted, rel=1e-6)
    # one token: the prompt's own forward, 2 operations a weight, the head for the last one only
    square = 2 * 2 * 8 * 5**2  # causal attention: half of 4 x layers x heads x width x length^2
    forward = 2 * (2 * LAYER * 5 + 20 * 8) + square
    found = roofline.rollout_seconds(SMALL, SLOW, [5], 2, 1, at_once=4)
    assert found == pytest.approx(forward / 100)


def test_an_update_by_hand():
    """A prompt of 4 and a completion of 6. Catches a backward pass that counts as one forward, a
    checkpointed one without its extra forward, and an optimizer without its bytes."""
    forward = 2 * (2 * LAYER * 10 + 20 * 8 * 6) + 2 * 2 * 8 * 10**2
    found = roofline.update_seconds(SMALL, SLOW, [(4, 6)], checkpointing=False)
    assert found == pytest.approx(3 * forward / 100)
    assert roofline.update_seconds(SMALL, SLOW, [(4, 6)]) == pytest.approx(4 * forward / 100)
    # reads weight, gradient and two moments, writes weight and two moments, 4 bytes each
    found = roofline.update_seconds(SMALL, NARROW, [(4, 6)])
    assert found == pytest.approx(WEIGHTS * 28 / 100, rel=1e-6)


def test_launches_and_where_they_decide():
    """Catches launches that do not grow with the layers, and a wrong break-even."""
    wait = roofline.launch_seconds(SMALL, launches=2800)
    assert wait == pytest.approx(2800 * 2 / 28 * 5e-6)
    options, gpu = shapes.qwen3("4b"), shapes.GPUS["H100"]
    wait = roofline.launch_seconds(options)
    sequences = roofline.break_even(options, gpu, 500, wait)
    assert roofline.decode_seconds(options, gpu, sequences, 500 * sequences) == pytest.approx(wait)
    assert roofline.break_even(options, gpu, 500, 1e-6) == 0, "the weights alone take longer"


def test_largest_saving_by_hand():
    """40 % of the prompts, 30 % of their tokens. Catches an update that is not shortened by the
    prompts that were dropped before it."""
    half = 0.5 * 0.4 + 0.5 * 0.4 * 0.3  # 0.26
    assert roofline.largest_saving(0.5, 0.4, 0.3) == pytest.approx(1 / half)
    nine_tenths = 0.9 * 0.8 + 0.1 * 0.8 * 0.3  # 0.744, with twice the candidates
    assert roofline.largest_saving(0.9, 0.8, 0.3) == pytest.approx(1 / nine_tenths)
    assert roofline.largest_saving(0.3, 1, 1) == 1


def test_the_command(tmp_path):
    """Catches pps with grpo's prompts, rates that are swapped, and rows of another setting."""
    file = tmp_path / "rows.json"
    line = "roofline --prompts 10 --pps-prompts 20 --group-size 4 --new-tokens 8 --rollout-batch 40"
    command_line.main([*line.split(), "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {(row["shape"], row["gpu"], row["method"]): row for row in found["rows"]}
    assert len(rows) == 4 * 3 * 2
    grpo, pps = (rows["1.7b", "A100", method] for method in ("grpo", "pps"))
    assert (grpo["prompts"], grpo["trained"]) == (10, 40)
    assert (pps["prompts"], pps["trained"]) == (8, 10), "40 % of 20; 30 % of 32, rounded"
    args = shapes.qwen3("1.7b"), shapes.GPUS["A100"]
    assert grpo["rollout"] == roofline.rollout_seconds(*args, [150] * 10, 4, 8, 40)
    assert pps["update"] == roofline.update_seconds(*args, [(150, 8)] * 10)
    assert grpo["launches"] == pytest.approx(8 * roofline.launch_seconds(args[0]))
    savings = [(row["candidates"], row["rollout_share"]) for row in found["savings"]]
    assert savings == [(1, 0.5), (1, 0.9), (2, 0.5), (2, 0.9)]
    assert found["savings"][3]["speed_up"] == roofline.largest_saving(0.9, 2 * 0.4, 1 - 0.7)
