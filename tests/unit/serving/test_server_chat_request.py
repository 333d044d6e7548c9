"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from serving.parts import OPTIONS, assert_refused, limits, refusal
from tiny import tokenizer

from headwater.serving.openai.chat import read_chat

HELLO = [{"role": "user", "content": "hello"}]


def read(body):
    return read_chat(body, limits(), OPTIONS)


def prompt(body) -> str:
    return tokenizer().decode(read(body).requests[0].input_tokens)


def test_messages_go_through_the_template():
    messages = [{"role": "system", "content": "Be short."}, *HELLO]
    assert prompt({"messages": messages}) == "<|system|>Be short.<|end|><|user|>hello<|end|><|assistant|>"


def test_text_parts_are_one_text():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert prompt({"messages": [{"role": "user", "content": parts}]}) == prompt({"messages": HELLO})


def test_the_last_message_can_be_continued():
    messages = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    text = prompt({"messages": messages, "continue_final_message": True})
    assert text == "<|user|>hello<|end|><|assistant|>Good mor"


def test_the_generation_prompt_can_be_left_out():
    assert prompt({"messages": HELLO, "add_generation_prompt": False}) == "<|user|>hello<|end|>"


def test_without_a_length_all_room_is_used():
    (request,) = read({"messages": HELLO}).requests
    assert request.sampling.max_new_tokens == 64 - len(request.input_tokens)


def test_both_names_of_the_length():
    for field in ("max_tokens", "max_completion_tokens"):
        assert read({"messages": HELLO, field: 5}).requests[0].sampling.max_new_tokens == 5
        assert f"{field} = 99: the prompt has" in str(refusal(read, {"messages": HELLO, field: 99}))


def test_neutral_values_of_what_is_not_supported():
    read(
        {
            "messages": HELLO, "tools": None, "tool_choice": "none", "response_format": {"type": "text"},
            "presence_penalty": 0.0, "modalities": ["text"], "store": False, "service_tier": "auto",
            "metadata": {"run": "1"}, "top_logprobs": 0, "logprobs": True, "parallel_tool_calls": True,
        }
    )  # fmt: skip


REFUSED = [
    ({}, "messages = null: must be a list of at least one message"),
    ({"messages": []}, "messages = []: must be a list"),
    ({"messages": "hello"}, 'messages = "hello": must be a list'),
    ({"messages": ["hello"]}, "messages[0] is a str; must be a message"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role = None"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "the chat template refuses them: unknown role wizard"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "surrogate"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        'messages[0].content[0].type = "image_url": this server accepts only text',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text = null: must be text",
    ),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs = 2: needs logprobs = true"),
    ({"messages": HELLO, "top_logprobs": 21, "logprobs": True}, "top_logprobs = 21: must be <= 20"),
    ({"messages": HELLO, "response_format": {"json_schema": {}}}, "response_format.type: is missing"),
    ({"messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5}, "give only one of the two"),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"messages": HELLO, "max_completion_token": 4}, "did you mean max_completion_tokens?"),
    ({"messages": [{"role": "user", "content": "x " * 200}]}, "shorten the prompt"),
]


def test_refusals_name_field_value_and_remedy():
    assert_refused(read, REFUSED)
