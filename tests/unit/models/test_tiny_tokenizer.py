from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from headwater.models.builtin.tiny import SPECIAL_TOKENS, VOCABULARY_SIZE, build_tokenizer

TOKENIZER: Any = build_tokenizer()

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 7 + 5?"},
    {"role": "assistant", "content": "12"},
    {"role": "tool", "content": "ok"},
]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "  ", "\n", "12", " 'll", "é", "What is"]), max_size=12))
def test_special_tokens_within_text_survive_too(parts: list[str]) -> None:
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12), st.sampled_from(["", " ", "  ", "x", "+", "(", "\n"]))
def test_every_digit_is_a_separate_token(number: int, before: str) -> None:
    digits = str(number)
    tokens = TOKENIZER.encode(before + digits)
    assert [TOKENIZER.decode([token]) for token in tokens[-len(digits) :]] == list(digits)
    assert TOKENIZER.decode(tokens[: -len(digits)]) == before


def test_vocabulary_is_complete_and_of_the_stated_size() -> None:
    assert len(TOKENIZER) == VOCABULARY_SIZE == 512
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(512))
    assert [TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(6))
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert TOKENIZER.padding_side == "left"


def test_common_task_words_are_single_tokens() -> None:
    for word in ("What", " is", "Answer", " the", " number", " answer", " +", " =", "answer"):
        assert len(TOKENIZER.encode(word)) == 1, word


def test_special_tokens_leave_the_text_when_asked() -> None:
    tokens = TOKENIZER.encode("<|assistant|>12<|end|><|pad|>")
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == "12"


IDS = [
    338, 298, 226, 22, 23, 318, 226, 24, 25, 26, 36, 277, 279, 35, 24, 26, 28, 33, 20, 279, 35, 226, 133, 256, 83, 133,
    113, 72, 133, 120, 73, 133, 108,
]  # fmt: skip


def test_training_gives_the_same_ids_everywhere() -> None:
    """Checkpoints and tests rely on these ids, so they may not change between processes, machines or versions."""
    assert TOKENIZER.encode("What is 12 + 345? <answer>357</answer> Ünïcödé") == IDS


def test_chat_template_marks_roles_and_ends() -> None:
    text = TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>What is 7 + 5?<|end|><|assistant|>12<|end|><|tool|>ok<|end|><|assistant|>"
    )


def test_a_finished_turn_extends_the_prompt_it_answered() -> None:
    prompt = TOKENIZER.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    whole = TOKENIZER.apply_chat_template(CHAT[:3], return_dict=False)
    assert whole == prompt + TOKENIZER.encode("12<|end|>")


def test_chat_template_takes_text_parts() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "7 + 5?"}]
    rendered = [
        TOKENIZER.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in (parts, "What is 7 + 5?")
    ]
    assert rendered[0] == rendered[1]


def test_chat_template_shows_tools_and_their_calls() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}, {"name": "stop"}]
    text = TOKENIZER.apply_chat_template(chat, tokenize=False, tools=tools)
    assert text.startswith("<|system|>Tools:\nadd(a, b)\nstop()<|end|><|user|>go")
    assert text.endswith('<|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>')


def test_chat_template_refuses_what_it_cannot_show() -> None:
    for message, complaint in (
        ({"role": "robot", "content": "x"}, "unknown role robot"),
        ({"role": "user", "content": [{"type": "image"}]}, "accepts only text"),
    ):
        with pytest.raises(TemplateError, match=complaint):
            TOKENIZER.apply_chat_template([message], tokenize=False)


def test_generation_mask_covers_the_assistant_turn_and_its_end() -> None:
    encoded = TOKENIZER.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert TOKENIZER.decode([token for token, mask in pairs if mask]) == "12<|end|>"


def test_saving_keeps_ids_specials_side_and_template(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side) == (0, 1, "left")
    text = "  What is 12 + 34?\n<|end|>"
    assert loaded.encode(text) == TOKENIZER.encode(text)
