"""
What a step should take at best: `python -m bench roofline`. Arithmetic only; nothing is measured.

It counts operations and bytes, and divides them by a GPU's data sheet. No program is as fast; how
near one comes is a share that can be compared between GPUs, models and changes of the code.

    rollout  Prompts are read once for all their completions: operations. Each decoded token of a
             batch reads all weights, and every sequence's keys and values, in bfloat16: bytes, or
             operations if those take longer.
    update   Operations of forward and backward and, with gradient checkpointing, of one more
             forward. AdamW then reads and writes float32 weights, gradients and moments.
"""

import numpy as np

from bench import JsonFile, shapes, write_json

LAUNCH = 5e-6  # seconds that a host takes to launch a kernel, the usual figure
# Kernels that `compact` launches for a decoded token with 28 layers: the operators that reach the
# device, counted by tests/gpu/count.py, and 26 more to draw from a vocabulary above 512 tokens.
# `python -m bench gpu` counts them on a real one.
LAUNCHES = 437
ADAMW = 4 * (4 + 3)  # bytes a parameter: weight, gradient and two moments read; all but one written


def main(
    prompts: int = 128,
    pps_prompts: int = 256,
    group_size: int = 8,
    prompt_tokens: int = 150,
    new_tokens: int = 1024,
    rollout_batch: int = 256,
    prompt_prune_rate: float = 0.6,
    completion_prune_rate: float = 0.7,
    launches: int = LAUNCHES,
    json_file: JsonFile = None,
) -> None:
    """Print the least seconds of rollout and update for every shape, GPU and method.

    Args:
        prompts: grpo's prompts of a step
        pps_prompts: pps's candidates of a step; train.py gives it twice as many as grpo
        group_size: completions of each prompt
        prompt_tokens: length of each prompt
        new_tokens: length of each completion
        rollout_batch: sequences sampled at once
        prompt_prune_rate: share of its candidates that pps does not roll out
        completion_prune_rate: share of its sampled tokens that pps does not train on
        launches: kernels launched for a decoded token of a model with 28 layers
        json_file: where to write the rows
    """
    rates = {"grpo": (prompts, 0.0, 0.0)}
    rates["pps"] = (pps_prompts, prompt_prune_rate, completion_prune_rate)
    rows = []
    for shape in ("0.6b", "1.7b", "4b", "8b"):
        options = shapes.qwen3(shape)
        for card, gpu in shapes.GPUS.items():
            wait = launch_seconds(options, launches)
            middle = prompt_tokens + new_tokens / 2
            for method, (candidates, prompt_rate, completion_rate) in rates.items():
                rolled = round((1 - prompt_rate) * candidates)
                trained = round((1 - completion_rate) * rolled * group_size)
                row = {"shape": shape, "gpu": card, "method": method, "prompts": rolled}
                row["trained"] = trained
                lengths = [prompt_tokens] * rolled
                args = (lengths, group_size, new_tokens, rollout_batch)
                row["rollout"] = rollout_seconds(options, gpu, *args)
                row["update"] = update_seconds(
                    options, gpu, [(prompt_tokens, new_tokens)] * trained
                )
                batches = -(-rolled // max(1, rollout_batch // group_size))
                row["launches"] = batches * new_tokens * wait
                row["break_even"] = break_even(options, gpu, middle, wait)
                rows.append(row)
                print(
                    f"{shape}  {card}  {method:4s}  rollout {row['rollout']:6.2f} s (its launches "
                    f"{row['launches']:5.1f} s)  update {row['update']:6.2f} s  launches as long "
                    f"as bytes at {row['break_even']:4.0f} sequences"
                )
    savings = []
    kept = 1 - prompt_prune_rate, 1 - completion_prune_rate
    for candidates in dict.fromkeys((1.0, pps_prompts / prompts)):
        for share in (0.5, 0.9):
            most = largest_saving(share, candidates * kept[0], kept[1])
            savings.append({"candidates": candidates, "rollout_share": share, "speed_up": most})
            print(
                f"pps with {candidates:g} times grpo's candidates, where rollouts are {share:.0%} "
                f"of grpo's step: at most {most:.2f} times as fast"
            )
    write_json(json_file, {"rows": rows, "savings": savings})


def parameters(options) -> int:
    """The weights of a Qwen3; a tied embedding counts once."""
    hidden, width = options.hidden_size, options.head_dim
    heads = 2 * options.num_attention_heads + 2 * options.num_key_value_heads
    layer = hidden * (heads * width + 3 * options.intermediate_size) + 2 * hidden + 2 * width
    vocabulary = options.vocab_size * hidden * (1 if options.tie_word_embeddings else 2)
    return options.num_hidden_layers * layer + vocabulary + hidden


def token_bytes(options) -> tuple[int, int]:
    """(bytes of the weights that a decoded token reads, bytes of one key and its value), bfloat16.

    An embedding that is not the head is only looked up.
    """
    lookup = 0 if options.tie_word_embeddings else options.vocab_size * options.hidden_size
    keys = options.num_hidden_layers * options.num_key_value_heads * options.head_dim
    return 2 * (parameters(options) - lookup), 2 * 2 * keys


def decode_seconds(options, gpu: shapes.GPU, sequences, context):
    """One more token of each sequence; `context` is the tokens that they all attend to, summed.
    Numbers, or arrays of them."""
    weights, cached = token_bytes(options)
    queries = options.num_hidden_layers * options.num_attention_heads * options.head_dim
    flops = weights * sequences + 4 * queries * context  # two for each weight of two bytes
    return np.maximum((weights + cached * context) / gpu.bandwidth, flops / gpu.flops)


def rollout_seconds(
    options, gpu: shapes.GPU, prompts: list[int], group_size: int, new_tokens: int, at_once: int
) -> float:
    """Completions of `new_tokens` each, for prompts of these lengths, `at_once` at a time."""
    step, seconds = max(1, at_once // group_size), 0.0
    for start in range(0, len(prompts), step):
        some = prompts[start : start + step]
        prefill = shapes.model_flops(options, [(length - 1, 1) for length in some]) / 3
        seconds += prefill / gpu.flops  # it yields each completion's first token
        sequences = len(some) * group_size
        for token in range(1, new_tokens):
            context = group_size * sum(some) + sequences * token
            seconds += decode_seconds(options, gpu, sequences, context)
    return seconds


def update_seconds(
    options, gpu: shapes.GPU, sequences: list[tuple[int, int]], checkpointing: bool = True
) -> float:
    """One optimizer update on sequences of (prompt, completion) tokens."""
    passes = 4 / 3 if checkpointing else 1.0  # model_flops counts a forward and a backward of two
    flops = passes * shapes.model_flops(options, sequences)
    return flops / gpu.flops + ADAMW * parameters(options) / gpu.bandwidth


def launch_seconds(options, launches: int = LAUNCHES) -> float:
    """The host's time for a decoded token, if every kernel of every layer is launched by itself."""
    return launches * options.num_hidden_layers / 28 * LAUNCH


def break_even(options, gpu: shapes.GPU, context: float, wait: float) -> float:
    """Sequences at once, of `context` tokens each, whose bytes take as long as the launches."""
    weights, cached = token_bytes(options)
    return max(0.0, (wait * gpu.bandwidth - weights) / (cached * context))


def largest_saving(rollout_share: float, prompts: float, tokens: float) -> float:
    """Amdahl's law: GRPO's step over one that rolls out `prompts` as many prompts as GRPO, and
    trains on a share `tokens` of their tokens, if both parts shrink in proportion."""
    return 1 / (prompts * (rollout_share + (1 - rollout_share) * tokens))
