"""
Prompts, from problems to token ids, and what chat models add to text.

    encode_prompts     the prompts of problems, in the chat template or as plain text
    end_tokens         every token that ends a completion
    open_thoughts      the mark of the thought that a prompt ends in
    decode             a completion's text, with the marks of thoughts
"""

import contextlib
import datetime
import math
import re
from collections import Counter

from runtime import InputError, in_words, ranks

PORTION = 1000  # prompts that are made at once

# What opens and closes a thought. An answer inside a thought is not the model's answer.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
MARKS = {mark for pair in THOUGHTS for mark in pair}
# What a chat template calls for today's date, such as strftime_now("%d %B %Y").
TODAY = re.compile(r"strftime_now\((?:\s*format\s*=)?\s*(['\"])(.*?)\1\s*\)")


# ---------------------------------------------------------------------------- prompts


def encode_prompts(
    problems: list, tokenizer, max_prompt_tokens: int, prompt_format: str = "auto",
    thinking: bool = False, instruction: str | None = None, model=None,
) -> tuple[list, list[list[int]]]:  # fmt: skip
    """The data.Problems that fit and their prompt token ids; says how many were too long.

    chat   problem and instruction are a user message in the tokenizer's chat template
    plain  problem and instruction are text that the model continues
    auto   chat if the tokenizer has a template

    `instruction` replaces the problems' own. Raises InputError if no problem fits, if the template
    leaves a question out, or if the `model` has no embedding for a token.
    """
    is_chat = prompt_format == "chat" or (prompt_format == "auto" and tokenizer.chat_template)
    turn_ends = tuple(tokenizer.convert_ids_to_tokens(end_tokens(tokenizer)))
    ends = end_tokens(tokenizer, model)

    def text_of(problem, thinking: bool) -> str:
        line = problem.instruction if instruction is None else instruction
        if is_chat:
            messages = problem.messages(line)
            return in_template(messages, tokenizer, turn_ends, thinking)
        if len(problem.turns) > 1:
            raise InputError(
                f"a chat of several turns, which ends with {problem.text[-60:]!r}, needs a chat "
                f"template: use a model that has one, and not --prompt-format plain"
            )
        return f"{problem.text}\n{line}\n" if line else problem.text

    if thinking and text_of(problems[0], True) == text_of(problems[0], False):
        ranks.say("note: --thinking changes no prompt: the chat template has no enable_thinking")
    prompt_ids, lost, shared = [], Counter(), {}
    for start in ranks.progress(range(0, len(problems), PORTION), "prompts", f"{PORTION} prompts"):
        texts = [text_of(problem, thinking) for problem in problems[start : start + PORTION]]
        portion = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
        lost += lost_characters(texts, portion, tokenizer, model)
        # Some tokenizers end every text with an end token, after which a model would start anew.
        portion = portion if is_chat else [_without_end(ids, ends) for ids in portion]
        # One Python number for each token there is, not for each place: 8 bytes a token, not 36.
        prompt_ids += [[shared.setdefault(token, token) for token in ids] for ids in portion]
    say_lost(lost)

    fits = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_tokens]
    if len(fits) < len(problems):
        dropped = (
            f"dropped {len(problems) - len(fits)} of {len(problems)} prompts: they are empty, or "
            f"longer than the {max_prompt_tokens} tokens that --max-new-tokens leaves"
        )
        if not fits:
            raise InputError(f"{dropped}; none is left")
        ranks.say(dropped)
    return [problems[index] for index in fits], [prompt_ids[index] for index in fits]


def _without_end(ids: list[int], ends: list[int]) -> list[int]:
    while ids and ids[-1] in ends:
        ids.pop()
    return ids


def lost_characters(texts: list[str], all_ids: list[list[int]], tokenizer, model) -> Counter:
    """Which characters of the texts their tokens lose, and how often. InputError if a token's id is
    beyond the model's embedding."""
    highest = max((max(ids, default=0) for ids in all_ids), default=0)
    rows = model.get_input_embeddings().num_embeddings if model else math.inf
    if highest >= rows:
        raise InputError(
            f"the tokenizer gives {tokenizer.decode([highest])!r} the id {highest}, but the "
            f"model's embedding has {rows} rows: it is not this model's tokenizer"
        )
    lost = Counter()
    for text, ids in zip(texts, all_ids, strict=True):
        lost += Counter(text) - Counter(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return lost


def say_lost(lost: Counter) -> None:
    """Say which characters are lost, if any are."""
    if lost:
        characters = " ".join(repr(character) for character, _count in lost.most_common(20))
        ranks.say(f"note: these characters are lost, because no token holds them: {characters}")


# ---------------------------------------------------------------------------- templates


def fix_date(tokenizer, date: str) -> None:
    """Let the chat template always say this date (2026-11-28), because the prompts of a run must
    not change. `tokenizer.date` is then the date, or None if the template asks for none."""
    tokenizer.date = None
    if tokenizer.chat_template and TODAY.search(template := tokenizer.get_chat_template()):
        tokenizer.date, day = date, datetime.date.fromisoformat(date)
        tokenizer.chat_template = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)


def in_template(messages: list[dict], tokenizer, ends: tuple[str, ...], thinking: bool) -> str:
    """A chat as the text that the model continues, in the tokenizer's template. InputError if the
    template refuses it, leaves out what is asked, or does not open the assistant's turn: if the
    text still ends with one of `ends`."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        for turn in messages:
            if turn["role"] in ("system", "user") and turn["content"].strip() not in text:
                said = turn["content"][:60]
                raise ValueError(f"it leaves out what the {turn['role']} says, {said!r}")
        if text.rstrip().endswith(ends):
            raise ValueError(f"the assistant's turn never begins: ...{text[-60:]!r}")
    except Exception as error:  # jinja2's kinds, and whatever the template's expressions raise
        roles = ", ".join(turn["role"] for turn in messages)
        raise InputError(
            f"the chat template cannot be used for a chat of {roles} ({in_words(error)}): use "
            f"another model, change the data, or use --prompt-format plain"
        ) from None
    return text


# ---------------------------------------------------------------------------- ends


def end_tokens(tokenizer, model=None) -> list[int]:
    """Every token that ends a completion: those that the model's config and generation config name,
    the tokenizer's, and the one that ends a turn in the chat template.

    A model may name its end in only one of these places. [] if there is none. Tokens beyond the
    model's embedding are left out.
    """
    named = [tokenizer.eos_token_id, turn_end(tokenizer)]
    for config in (model.config, model.generation_config) if model else ():
        ids = getattr(config, "eos_token_id", None)
        named += ids if isinstance(ids, (list, tuple)) else [ids]
    ends = {tokenizer.convert_tokens_to_ids(end) if isinstance(end, str) else end for end in named}
    most = model.get_input_embeddings().num_embeddings if model else math.inf
    return sorted(end for end in ends - {None} if 0 <= end < most)


def turn_end(tokenizer) -> int | None:
    """The control token that ends the assistant's turn in the chat template, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    system = {"role": "system", "content": "SYSTEM"}
    turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    for chat in (turns, [system, *turns]):  # a template may insist on a system message
        with contextlib.suppress(Exception):
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            break
    else:  # it is reported when the first prompt is made
        return None
    _before, answer, after = text.rpartition("ANSWER")
    ids = tokenizer.encode(after.lstrip(), add_special_tokens=False) if answer else []
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


# ---------------------------------------------------------------------------- thoughts


def open_thoughts(tokenizer, prompts: list[list[int]]) -> list[str]:
    """The opening mark of the thought that each prompt ends in; "" if it ends in none.

    Only what follows a prompt's last control token counts: a question may speak of such marks.
    """
    added = tokenizer.added_tokens_decoder
    controls = {number for number, token in added.items() if token.content not in MARKS}
    return [_open_thought(tokenizer, ids, controls) for ids in prompts]


def _open_thought(tokenizer, ids: list[int], controls: set[int]) -> str:
    places = [place for place, number in enumerate(ids) if number in controls]
    # A control token at place 0 only begins the text. If there is no later one, `rest` holds the
    # question, so only a mark at its very end counts.
    question_is_over = bool(places) and places[-1] > 0
    rest = ids[places[-1] + 1 :] if question_is_over else ids
    text = tokenizer.decode(rest).rstrip()
    for opening, closing in THOUGHTS:
        is_open = text.rfind(opening) > text.rfind(closing)
        if is_open and (question_is_over or text.endswith(opening)):
            return opening
    return ""


def decode(tokenizer, completions: list[list[int]]) -> list[str]:
    """The texts of completions without special tokens, but with the marks of thoughts."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {number for number, token in added if token.special and token.content not in MARKS}
    texts = ([number for number in ids if number not in dropped] for ids in completions)
    return [tokenizer.decode(ids) for ids in texts]
