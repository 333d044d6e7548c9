"""Tools in /v1/chat/completions: requests, replies, and OpenAI's client against a server with the embedded engine."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager, closing

import openai
import pytest
from aiohttp.test_utils import TestServer
from chat.written_calls import WRITERS, schema
from engine.engine_parts import run
from serving.parts import NAME, OPTIONS, assert_refused, limits
from tiny import tokenizer

from headwater.chat.parsers import PARSERS, make_parser
from headwater.config.schema import EngineConfig
from headwater.core.errors import HeadwaterError
from headwater.engine.engine import Engine
from headwater.serving.app import build_app
from headwater.serving.openai.chat import ChatReply, read_chat
from headwater.serving.options import ServerOptions
from headwater.serving.output import PieceMaker
from headwater.serving.state import find_parser

HELLO = [{"role": "user", "content": "hello"}]
ADD = schema("add", a={"type": "integer", "minimum": 0, "maximum": 9}, b={"type": "boolean"})
NOW = {"type": "function", "function": {"name": "now", "description": None, "strict": True}}
TOOLS = [ADD, NOW]
NAMED = {"type": "function", "function": {"name": "now"}}


def read(body, parser="hermes"):
    made = make_parser(parser, tokenizer()) if parser else None
    return read_chat(body, limits(max_model_tokens=2000), OPTIONS, made)


def prompt(body) -> str:
    return tokenizer().decode(read(body).requests[0].input_tokens)


def test_tools_are_shown_to_the_model():
    text = prompt({"messages": HELLO, "tools": TOOLS})
    assert "add(a, b)" in text
    assert "now" in text
    plain = prompt({"messages": HELLO})
    assert prompt({"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}) == plain
    assert prompt({"messages": HELLO, "tools": [], "tool_choice": "auto"}) == plain


def test_calls_and_results_of_the_history_reach_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "1", "content": "2"}]  # fmt: skip
    text = prompt({"messages": [{"role": "developer", "content": "Be short."}, *history]})
    assert text == (
        '<|system|>Be short.<|end|><|user|>hello<|end|><|assistant|><tool_call>{"name": "add", "arguments": {"a": 1}}'
        "</tool_call><|end|><|tool|>2<|end|><|assistant|>"
    )
    # What a model wrote as arguments need not be JSON.
    call["function"]["arguments"] = "{a}"
    assert '"arguments": "{a}"' in prompt({"messages": history})


def test_only_required_calls_need_a_grammar():
    def grammar(**fields):
        return read({"messages": HELLO, "tools": TOOLS, **fields}).requests[0].sampling.grammar

    as_json = {"response_format": {"type": "json_object"}}
    assert grammar() is None
    assert grammar(tool_choice="none") is None
    assert grammar(tool_choice="none", **as_json).kind == "json_schema"
    assert "answer:" in grammar(**as_json).text
    assert "answer:" not in grammar(tool_choice="required", **as_json).text
    assert "add" in grammar(tool_choice="required").text
    named = grammar(tool_choice=NAMED)
    assert "call_1" not in named.text
    assert "now" in named.text


BAD_TOOLS = [
    ({"tools": "add"}, 'tools = "add": must be a list of tools'),
    ({"tools": [{"type": "function"}]}, "tools[0] = "),
    ({"tools": [{"type": "web_search"}]}, 'must be {"type": "function"'),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 'tools[0].function.name = "a b": must be 1 to 64'),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "must be a JSON schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "must be object"),
    ({"tools": [schema("f", a=7)]}, "must be an object with a JSON schema for each argument"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name = \"now\": another tool has this name"),
    ({"tools": [NOW] * 600}, "tools: has 600 tools"),
    ({"tool_choice": "required"}, "the request has no tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, 'tool_choice = "always": must be none, auto, required or'),
    ({"tools": TOOLS, "tool_choice": NAMED | {"function": {"name": "sub"}}}, "no such tool; the request has add"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls = 1: must be true or false"),
    ({"functions": [{"name": "f"}]}, "use tools"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls = 5: must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0] = {}"),
]  # fmt: skip


def test_bad_tools_are_refused():
    assert_refused(read, [({"messages": HELLO, **body}, message) for body, message in BAD_TOOLS])


def test_a_model_without_a_known_format_refuses_tools():
    assert_refused(
        lambda body: read(body, parser=None),
        [({"messages": HELLO, "tools": TOOLS}, "start the server with --tool-parser and one of deepseek, glm")],
    )
    assert find_parser("auto", tokenizer()) is not None
    with pytest.raises(HeadwaterError, match=r"--tool-parser = hermez: .*did you mean 'hermes'"):
        find_parser("hermez", tokenizer())


def replies(body, parser: str, text: str, stop_reason="stop"):
    """The complete message, and the message that a client puts together from a stream."""
    plan = read(body, parser)
    tokens = tokenizer().encode(text, add_special_tokens=False)
    steps = [([token], stop_reason if place == len(tokens) - 1 else None) for place, token in enumerate(tokens)]

    def piece(maker, tokens, reason):
        return maker.piece(tokens, [-0.5] * len(tokens), [3] * len(tokens), reason)

    whole = ChatReply(plan, tokenizer()).whole(
        [piece(PieceMaker(tokenizer(), plan.shape.rules), tokens, stop_reason)], version=3
    )["choices"][0]
    writer, maker = ChatReply(plan, tokenizer()), PieceMaker(tokenizer(), plan.shape.rules)
    chunks = [chunk for step in steps for chunk in writer.chunks(0, piece(maker, *step), 3)]
    return whole, chunks


def assembled(chunks) -> tuple[str, list[dict], str, list[int]]:
    content, calls, ending, tokens = "", [], None, []
    for chunk in chunks:
        choice = chunk["choices"][0]
        tokens += choice.get("token_ids") or ()
        delta, ending = choice["delta"], choice["finish_reason"] or ending
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                assert part["type"] == "function"
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content, calls, ending, tokens


def test_streamed_and_complete_replies_are_equal():
    calls = [("add", {"a": 1, "b": True}), ("now", {})]
    damages = ["", "}", "]", '"', "</tool_call>", "x"]
    for name in PARSERS.names():
        for number, damage in enumerate(damages):
            text = f"<think>hm</think>\n{WRITERS[name](calls)}<|end|>"
            place = random.Random(number).randrange(20, len(text) - 8)
            text = text[:place] + damage + text[place:]
            body = {"messages": HELLO, "tools": TOOLS, "return_token_ids": True}
            whole, chunks = replies(body, name, text)
            content, streamed, ending, tokens = assembled(chunks)
            message = whole["message"]
            got = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
            assert (message["content"] or "") == content, (name, text)
            assert [(each["name"], each["arguments"]) for each in got] == [
                (each["name"], each["arguments"]) for each in streamed
            ]
            assert tuple(tokens) == whole["token_ids"]
            assert ending == whole["finish_reason"] == ("tool_calls" if got else "stop")
            if not damage:
                assert [(each["name"], json.loads(each["arguments"])) for each in got] == calls, name
                assert content == "<think>hm</think>"


def test_without_parallel_calls_only_the_first_is_sent():
    text = WRITERS["hermes"]([("add", {"a": 1}), ("now", {})])
    body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    whole, chunks = replies(body, "hermes", text)
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["add"]
    assert [call["name"] for call in assembled(chunks)[1]] == ["add"]
    assert whole["message"]["content"] is None


def test_a_call_that_is_cut_off_ends_with_length():
    text = WRITERS["hermes"]([("add", {"a": 1, "b": True})]).partition("true")[0]
    whole, chunks = replies({"messages": HELLO, "tools": TOOLS}, "hermes", text, "length")
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["arguments"] == assembled(chunks)[1][0]["arguments"] == '{"a": 1, "b": '
    assert whole["finish_reason"] == assembled(chunks)[2] == "length"


def test_a_reply_without_calls_is_text():
    whole, chunks = replies({"messages": HELLO, "tools": TOOLS}, "hermes", " Just text. <|end|>")
    assert whole["message"] == {"role": "assistant", "content": " Just text. ", "refusal": None}
    assert whole["finish_reason"] == "stop"
    assert assembled(chunks)[:3] == (" Just text. ", [], "stop")


# OpenAI's client


@asynccontextmanager
async def connected(engine):
    async with TestServer(build_app(engine, tokenizer(), ServerOptions(NAME))) as server:
        address = {"base_url": str(server.make_url("/v1")), "api_key": "unused", "max_retries": 0}
        async with openai.AsyncOpenAI(**address) as client:
            with openai.OpenAI(**address) as plain:
                yield client, plain


def check_add(function) -> None:
    assert function.name == "add"
    arguments = json.loads(function.arguments)
    assert set(arguments) == {"a", "b"}
    assert 0 <= arguments["a"] <= 9


def test_openais_client_gets_calls():
    common = {"model": NAME, "messages": HELLO, "tools": TOOLS, "seed": 3, "max_completion_tokens": 150}
    add = {"type": "function", "function": {"name": "add"}}

    async def scenario(engine) -> None:
        async with connected(engine) as (client, plain):
            reply = await client.chat.completions.create(**common, tool_choice=add)
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            (call,) = choice.message.tool_calls
            check_add(call.function)

            stream = await client.chat.completions.create(
                **common, tool_choice=add, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
            _, (streamed,), ending, _ = assembled([each.model_dump() for each in chunks[:-1]])
            assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)
            assert ending == "tool_calls"
            assert len([each for each in chunks if each.choices and each.choices[0].delta.tool_calls]) > 3

            # The client's own helper, which checks the arguments against the schema.
            async with client.chat.completions.stream(**common, tool_choice=add) as helper:
                async for _ in helper:
                    pass
                final = await helper.get_final_completion()
            assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments

            def talk() -> None:
                """A loop of a synchronous client: call, result, and the next call."""
                messages = list(HELLO)
                for turn in range(2):
                    reply = plain.chat.completions.create(
                        **{**common, "messages": messages}, tool_choice="required", parallel_tool_calls=False
                    )
                    message = reply.choices[0].message
                    (call,) = message.tool_calls
                    assert call.function.name in ("add", "now")
                    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"}]

            await asyncio.to_thread(talk)
            either = await client.chat.completions.create(
                **{**common, "max_completion_tokens": 40}, n=2, response_format={"type": "json_object"}
            )
            for each in either.choices:
                if each.finish_reason == "stop":
                    assert isinstance(json.loads(each.message.content), dict)
            assert (
                (await client.chat.completions.create(**{**common, "max_completion_tokens": 8}, tool_choice="none"))
                .choices[0]
                .message.content
            )
            with pytest.raises(openai.BadRequestError, match="no such tool"):
                await client.chat.completions.create(**common, tool_choice=NAMED | {"function": {"name": "sub"}})

    with closing(Engine.load("tiny:qwen3", EngineConfig(), device="cpu")) as engine:
        run(scenario(engine))
