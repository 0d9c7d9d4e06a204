"""Chat formats: where a turn ends, whether a prompt ends in a thought, and what decoding keeps."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

import chat_format
from tasks import arithmetic

SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token per byte; then <|pad|> and <|end|>, and the control tokens of a chat."""
    found = AutoTokenizer.from_pretrained(arithmetic.BASE)
    special = ["<|start|>", "<|stop|>", "[THINK]", "[/THINK]"]
    found.add_special_tokens({"additional_special_tokens": special})
    found.add_tokens(["<think>", "</think>"])  # not special, as Qwen3 has them
    found.chat_template = CHATML
    return found


TEMPLATES = {  # a chat template: the control token that ends the assistant's turn
    CHATML: "<|stop|>",
    SYSTEM_FIRST + CHATML: "<|stop|>",
    CHATML.replace("<|stop|>", "\n###"): None,  # with text
    CHATML.replace("{{ m.content }}", "{{ m.content[:3] }}"): None,  # the answer is not all there
    None: None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_end_of_a_turn(tokenizer, template):
    """Catches an end that is only in the template, and a template that fails, or drops the answer,
    so that its first token is taken for the end."""
    tokenizer.chat_template = template
    end = TEMPLATES[template]
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert chat_format.turn_end(tokenizer) == expected


def test_all_that_names_an_end_counts(tokenizer):
    """Catches a place that is not looked at, a list that is taken for a number, a name instead of
    one, a None that becomes an end, and an end that the model cannot write."""

    def model(of_config, of_generation):
        return SimpleNamespace(
            config=SimpleNamespace(eos_token_id=of_config),
            generation_config=of_generation and SimpleNamespace(eos_token_id=of_generation),
            get_input_embeddings=lambda: torch.nn.Embedding(300, 1),
        )

    of_tokenizer, of_template = tokenizer.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    ends = lambda *of_model: chat_format.end_tokens(tokenizer, model(*of_model))
    assert ends(5, [7, 5]) == ends([7, 5], 5) == sorted({5, 7, of_tokenizer, of_template})
    tokenizer.chat_template = None
    assert chat_format.end_tokens(tokenizer) == ends(None, None) == [of_tokenizer]
    tokenizer.eos_token = None
    assert ends("<|end|>", [7, 300, -1]) == [7, of_tokenizer]
    assert ends(None, None) == []


PROMPTS = {  # a prompt: the mark of the thought that it ends in
    "<|start|>assistant\n<think>\n": "<think>",
    "[THINK]": "[THINK]",
    "<|start|>assistant\n<think>\n\n</think>\n\n": "",
    "<|start|>user\nWhat does <think> mean?<|stop|>\n<|start|>assistant\n": "",
    "What does <think> mean?": "",  # without a control token, it may be the question
    "<|start|>[INST] What does <think> mean? [/INST]": "",  # Llama's only begins the text
}


def test_prompts_that_end_in_a_thought(tokenizer):
    """Catches marks in the question that count, a thought that has ended, and special marks."""
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    assert chat_format.open_thoughts(tokenizer, prompts) == [*PROMPTS.values()]


def test_marks_of_thoughts_survive_decoding(tokenizer):
    """Without other special tokens. Catches an end token in an answer, and a thought that nobody
    sees."""
    text = "[THINK]<think>7</think>[/THINK]8<|stop|>"
    ids = [tokenizer.encode(text, add_special_tokens=False)]
    assert chat_format.decode(tokenizer, ids) == ["[THINK]<think>7</think>[/THINK]8"]
