"""Twelve sequences, padded and packed, as a picture in text: `python -m bench packing`."""

import random

import packing


def main(pack_tokens: int = 72, window: int = 4, seed: int = 2) -> None:
    """Draw twelve sequences, padded and packed, with a character for each token.

    Args:
        pack_tokens: tokens in a slot
        window: sequences that the planner sees
        seed: of the sequences' lengths
    """
    print(draw(pack_tokens, window, seed))


def draw(pack_tokens: int, window: int, seed: int) -> str:
    """Twelve sequences of three prompts, padded and packed, as text with one character a token:
    digits for prompts, a letter for each completion, dots for empty room."""
    rng = random.Random(seed)
    prompts = [[ord(digit)] * rng.randint(5, 12) for digit in "123"]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    sizes = [min(50, int(rng.lognormvariate(2.6, 0.6))) for _ in range(12)]
    completions = [[ord(letter)] * size for letter, size in zip("abcdefghijkl", sizes, strict=True)]
    sequences = list(zip(prompts, completions, strict=True))
    totals = [len(prompt) + len(completion) - 1 for prompt, completion in sequences]
    width = [max(totals[start : start + 4]) for start in range(0, 12, 4)]

    def line(ids, width):
        return "  " + "".join(map(chr, ids)).ljust(width, ".")

    lines = ["padded, 4 to a micro-batch"]
    for number, (prompt, completion) in enumerate(sequences):
        lines.append(line(prompt + completion[:-1], width[number // 4]))
    lines.append(f"  {4 * sum(width)} tokens, {sum(totals) / sum(width) / 4:.0%} of them real")
    for share in (False, True):
        sharing = ([prompt[0] for prompt in prompts], list(map(len, prompts))) if share else ()
        packs = packing.plan_packs(totals, pack_tokens, window, *sharing)
        lines += ["", f"packed, window {window}" + ", shared prompts" * share]
        for pack in packs:
            members = [prompts[i] for i in pack], [completions[i] for i in pack]
            slot = packing.build_pack(*members, share_prompts=share)
            lines.append(line(slot.input_ids[0].tolist(), pack_tokens))
        slots = [slot_tokens(pack, totals, *sharing) for pack in packs]
        whole, but_last = (pack_density(some, pack_tokens) for some in (slots, slots[:-1]))
        density = f"density {whole:.0%}, {but_last:.0%} without the last"
        lines.append(f"  {sum(slots)} tokens in {len(slots)} slots: {density}")
    return "\n".join(lines)


def slot_tokens(pack: list[int], lengths: list[int], prompts=None, prompt_lengths=None) -> int:
    """Tokens that the sequences of one slot take, counted as in plan_packs."""
    tokens = sum(lengths[index] for index in pack)
    if prompts:
        own = {prompts[index]: prompt_lengths[index] for index in pack}
        tokens += sum(own.values()) - sum(prompt_lengths[index] for index in pack)
    return tokens


def pack_density(slots: list[int], pack_tokens: int) -> float:
    """Share of the slots' room that holds tokens, given the tokens in each slot; nan without slots.
    An over-long sequence makes its slot as long as itself."""
    return sum(slots) / sum(max(pack_tokens, tokens) for tokens in slots) if slots else float("nan")
