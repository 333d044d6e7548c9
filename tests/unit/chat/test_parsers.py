"""Every format of tool calls: what is a call, what is content, and how the text was split makes no difference."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from chat.written_calls import SCHEMAS, WRITERS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.chat.parsers import PARSERS, choose_parser, make_parser
from headwater.chat.reader import ArgumentText, CallBegun, CallDone, ContentText
from headwater.core.errors import HeadwaterError
from headwater.core.tool_calls import MalformedCall, ParsedReply, ToolCall

NAMES = PARSERS.names()
HIDDEN = ("<|im_end|>", "<|eot_id|>", "</s>")
WHOLE_MESSAGE = {"openai_json", "llama3_pythonic"}
"""Formats in which a message is either content or calls."""


def parser(name: str):
    return PARSERS.resolve(name)(hidden=HIDDEN)


def streamed(name: str, pieces, **options) -> tuple[ParsedReply, list]:
    stream = parser(name).stream(SCHEMAS, **options)
    events = [event for piece in pieces for event in stream.feed(piece)]
    events += stream.finish()
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    return ParsedReply(content, tuple(event.call for event in events if isinstance(event, CallDone))), events


def check_events(events) -> None:
    """Calls do not overlap, and the text of a call's arguments is their JSON."""
    begun, text = None, ""
    for event in events:
        if isinstance(event, CallBegun):
            assert begun is None
            begun, text = event, ""
        elif isinstance(event, ArgumentText):
            assert begun is not None
            text += event.text
        elif isinstance(event, ContentText):
            assert begun is None
            assert event.text
        elif isinstance(event.call, ToolCall):
            assert begun == CallBegun(event.call.call_id, event.call.name)
            assert json.loads(text) == event.call.arguments
            json.dumps(dict(event.call.arguments), ensure_ascii=False).encode()  # no lone surrogate
            begun = None
        else:
            assert event.call.reason
            assert begun is None or begun.call_id == event.call.call_id
            begun = None
    assert begun is None


def split(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((1, 3, 30))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


CALLS = [("search", {"query": 'the "tides"\nof ]}) 12', "count": 3}), ("add", {"a": -1.5, "b": 2}), ("now", {})]


def test_calls_are_read():
    assert set(NAMES) == set(WRITERS)
    for name in NAMES:
        for calls in (CALLS, CALLS[:1], CALLS[2:]):
            reply = parser(name).parse(WRITERS[name](calls), SCHEMAS)
            assert reply.content == "", name
            assert [(call.name, call.arguments) for call in reply.calls] == calls, name
            assert len({call.call_id for call in reply.calls}) == len(calls)


def test_other_ways_to_write_a_call():
    search = ("search", {"query": "x"})
    cases = [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "x"}}'),
        ("hermes", '<tool_call>{"arguments": {"query": "x"}, "name": "search"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>'),
        ("openai_json", '{"name": "search", "arguments": {"query": "x"}}'),
        ("openai_json", '```json\n{"name": "search", "arguments": {"query": "x"}}\n```'),
        ("openai_json", '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", '
         '"arguments": "{\\"query\\": \\"x\\"}"}}]}'),
        ("llama3_json", '{"name": "search", "parameters": {"query": "x"}}<|eot_id|>'),
        ("llama3_json", '<|python_tag|>search.call(query="x")<|eom_id|>'),
        ("llama3_pythonic", '<|python_start|>[search(query="x")]<|python_end|>'),
        ("qwen3_coder", "<function=search>\n<parameter=query>\nx\n</parameter>\n</function>"),
        ("glm", "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>"),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜>'
         "<｜tool▁calls▁end｜>"),
        ("kimi", '<|tool_call_begin|>search<|tool_call_argument_begin|>{"query": "x"}<|tool_call_end|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "abcdefghi"}]</s>'),
        ("mistral", '[TOOL_CALLS]search{"query": "x"}'),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "x"}</s>'),
    ]  # fmt: skip
    for name, text in cases:
        reply = parser(name).parse(text, SCHEMAS)
        assert [(call.name, call.arguments) for call in reply.calls] == [search], (name, text, reply)
        assert reply.content == "", (name, text)


def test_identifiers():
    ids = [parser("mistral").parse(WRITERS["mistral"](CALLS), salt=salt).calls[0].call_id for salt in ("1", "2")]
    assert ids[0] != ids[1]
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    # Two models write identifiers themselves.
    assert parser("kimi").parse(WRITERS["kimi"](CALLS)).calls[1].call_id == "functions.add:1"
    assert parser("mistral").parse('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}').calls[0].call_id == "abcdefghi"


def test_types_come_from_the_schema():
    for name in ("qwen3_coder", "glm"):
        (call,) = parser(name).parse(WRITERS[name]([("search", {"query": "12", "count": 3})]), SCHEMAS).calls
        assert call.arguments == {"query": "12", "count": 3}
        (call,) = parser(name).parse(WRITERS[name]([("other", {"a": "12", "b": "twelve", "c": "True"})])).calls
        assert call.arguments == {"a": 12, "b": "twelve", "c": True}
        (call,) = parser(name).parse(WRITERS[name]([("search", {"query": "", "count": "many"})]), SCHEMAS).calls
        assert isinstance(call, MalformedCall)
        assert "'count' is not valid JSON" in call.reason
        assert "its type is integer" in call.reason


def test_text_around_calls_is_content():
    for name in set(NAMES) - WHOLE_MESSAGE:
        text = f"  Let me look. \n\n{WRITERS[name](CALLS[:2])}\nDone.<|im_end|>"
        reply = parser(name).parse(text, SCHEMAS)
        assert reply.content == "  Let me look.\nDone.", name
        assert len(reply.calls) == 2


def test_a_message_without_calls_is_unchanged():
    for name in NAMES:
        for text in ("", " \n", " 5 < 6 [1] {2} ", '{"answer": 3}', "[1, 2]", "<tool_cal", "[TOOL_CALL"):
            assert parser(name).parse(text + "</s>") == ParsedReply(text), name


def test_calls_in_reasoning_are_content():
    for name in NAMES:
        written = WRITERS[name](CALLS[:1])
        text = f"<think>Maybe {written}?</think>\n"
        assert parser(name).parse(text, SCHEMAS) == ParsedReply(text)
        reply = parser(name).parse(text + written, SCHEMAS)
        assert reply.content == text.rstrip()
        assert len(reply.calls) == 1
        # Reasoning that was cut off.
        assert parser(name).parse(f"<think>{written}", SCHEMAS).calls == ()
        # The prompt has begun the reasoning.
        assert parser(name).parse(f"Hm {written}</think>{written}", SCHEMAS, in_reasoning=True).content == (
            f"Hm {written}</think>"
        )


MALFORMED = [
    ("hermes", "<tool_call>search tides</tool_call>", "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "parameters": {}}</tool_call>', '"parameters" instead of "arguments"'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object, not a list"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "'a' appears twice"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "5000 digits"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>', "surrogate"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 9999 + "]" * 9999 + "}}</tool_call>", "levels"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}</tool_call>", "levels"),
    ("hermes", '<tool_call>{"name": "f g", "arguments": {}}</tool_call>', "'f g' is not the name of a tool"),
    ("openai_json", '{"name": "f", "arguments": {"a": ', "not valid JSON"),
    ("llama3_json", "<|python_tag|>print(1)", "arguments must be written as name=value"),
    ("llama3_json", "<|python_tag|>", "the call is empty"),
    ("llama3_pythonic", "[f(1)]", "name=value"),
    ("llama3_pythonic", "[f(a=g())]", "must be a number, a text"),
    ("llama3_pythonic", "[f(a=1, a=2)]", "given twice"),
    ("llama3_pythonic", "[f(a=" + "-" * 20000 + "1)]", "deep"),
    ("llama3_pythonic", "[f(a=" + "(" * 500 + ")" * 500 + ")]", "too many nested"),
    ("llama3_pythonic", "[f(a=1)", "was never closed"),
    ("qwen3_coder", "<tool_call>{}</tool_call>", "not followed by <function=name>"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</function>", "'a' is not closed"),
    ("qwen3_coder", "<function=f>a=1</function>", "text outside"),
    ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", "write key</arg_key><arg_value>"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>', "is not the name of a tool"),
    ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} {}<｜tool▁call▁end｜>", "other text follows"),
    ("kimi", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", "has no <|tool_call_argument_begin|>"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>", "write {} for none"),
    ("mistral", "[TOOL_CALLS]f", "has no arguments"),
    ("mistral", '[TOOL_CALLS][{"name": "f"', "not valid JSON"),
    ("mistral", "[TOOL_CALLS][f]", "not valid JSON"),
]


def test_malformed_calls_have_a_reason():
    for name, text, reason in MALFORMED:
        reply, events = streamed(name, [text])
        check_events(events)
        (call,) = reply.calls
        assert isinstance(call, MalformedCall), (name, text[:80], call)
        assert reason in call.reason, (name, text[:80], call.reason)
        assert len(call.reason) < 300


def test_a_malformed_call_does_not_hide_the_next_one():
    for name in set(NAMES) - WHOLE_MESSAGE - {"llama3_json"}:
        good = WRITERS[name](CALLS[1:2])
        broken = good.replace("add", 'a d"{').replace("1.5", "one]")
        reply = parser(name).parse(f"{broken} and {good}", SCHEMAS)
        assert isinstance(reply.calls[0], MalformedCall), name
        assert reply.calls[-1].arguments == CALLS[1][1], name


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", '{"name": "f", "arguments": {',
    '"a": ', "1", '"x', '"', "\\", "}", "]", "[", "{", ",", ";", "\n", " ", "<function=f>", "<parameter=a>",
    "</parameter>", "</function>", "f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>",
    "<|python_start|>", "[f(", "a=", ")", "'", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function",
    "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_begin|>",
    "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|im_end|>", "<|eot_id|>", "null", "\ud800", "é", "<", "<|", "</", '{"name": "g", "parameters": {}}',
]  # fmt: skip


@st.composite
def messages(draw) -> str:
    """Calls with small damage, or pieces of calls in any order."""
    if draw(st.booleans()):
        return "".join(draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=15)))
    text = draw(st.sampled_from(["", "<think>hm</think>", "So: "])) + WRITERS[draw(st.sampled_from(NAMES))](
        draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=2))
    )
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(["", *FRAGMENTS])) + text[place + draw(st.integers(0, 5)) :]
    return text


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(messages(), st.integers(0, 2**32))
@example('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', 0)
def test_every_split_gives_the_same_result(text, seed):
    for name in NAMES:
        for options in ({}, {"in_reasoning": True}):
            whole = parser(name).parse(text, SCHEMAS, **options)
            for pieces in (split(text, seed), list(text)):
                reply, events = streamed(name, pieces, **options)
                assert reply == whole, (name, pieces)
                check_events(events)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\"'\n", max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), JSON, max_size=3))
def test_any_arguments_survive(arguments):
    reserved = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
    if any(mark in json.dumps(arguments) for mark in reserved):
        return
    for name in set(NAMES) - {"qwen3_coder", "glm"}:
        if name == "llama3_pythonic" and any(key in ("as", "if", "in", "is", "or") for key in arguments):
            continue
        (call,) = parser(name).parse(WRITERS[name]([("f", arguments)])).calls
        assert isinstance(call, ToolCall), (name, call)
        assert call.arguments == arguments, name


SPECIAL = SimpleNamespace(content="<|user|>", special=True)
TEMPLATES = {
    "hermes": "...<tool_call>\\n{{ call | tojson }}\\n</tool_call>...",
    "qwen3_coder": "...<tool_call>\\n<function={{ name }}>...",
    "glm": "...<tool_call>{{ name }}\\n<arg_key>...",
    "mistral": "...[TOOL_CALLS]...",
    "deepseek": "...<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>...",
    "kimi": "...<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>...",
    "llama3_json": "...<|start_header_id|>...{{- '\"parameters\": ' }}...",
    "llama3_pythonic": "<|start_header_id|>{{- '\"parameters\": ' }} [func_name1(params_name1=params_value1, ...)]",
}


def test_the_format_is_chosen_from_the_template():
    for name, template in TEMPLATES.items():
        assert choose_parser(SimpleNamespace(chat_template=template)) == name
    assert choose_parser(SimpleNamespace(chat_template={"default": "x", "tool_use": TEMPLATES["kimi"]})) == "kimi"
    made = make_parser("auto", SimpleNamespace(chat_template=TEMPLATES["glm"], added_tokens_decoder={7: SPECIAL}))
    assert made.parse("Hi.<|user|>").content == "Hi."


def test_an_unknown_format_is_refused_with_the_names():
    plain = SimpleNamespace(chat_template="{{ messages }}")
    for name, message in (("auto", "tools.parser = auto: .*choose one of deepseek, glm"), ("hermez", "mean 'hermes'")):
        with pytest.raises(HeadwaterError, match=message):
            make_parser(name, plain)
