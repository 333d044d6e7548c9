"""The endpoint's other ways to ask: streams of tokens, ``/v1/responses``, and replies that must match a grammar."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
import tiny
from endpoint_parts import KeyedEngine, encode, episode
from test_endpoint import ASK, SEARCH, check_tokens, served, trajectories

from headwater.core.protocols import generate_aloud
from headwater.core.requests import Delta
from headwater.rollout.group import episode_metrics
from headwater.serving.openai.responses import chat_body, completion_id

CALL = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
TOOL = {"type": "function", **SEARCH["function"]}


class Streaming(KeyedEngine):
    """Yields one token at a time. All but the first wait until ``may_continue`` is set."""

    def __init__(self, texts=()):
        super().__init__(texts)
        self.inner = KeyedEngine(texts)
        self.inner.astream = self._astream
        self.may_continue = asyncio.Event()

    async def agenerate(self, request):
        self.requests.append(request)
        return await generate_aloud(self.inner, request)  # as the rollout's own engine does

    async def _astream(self, request):
        response = await KeyedEngine.agenerate(self.inner, request)
        for place, token in enumerate(response.output_tokens):
            if place:
                await self.may_continue.wait()
            is_last = place == len(response.output_tokens) - 1
            yield Delta((token,), (response.output_logprobs[place],), (3,), response.stop_reason if is_last else None)


def client_of(chat) -> openai.AsyncOpenAI:
    return chat._client


def test_tokens_are_streamed_while_the_model_writes():
    async def run() -> None:
        engine = Streaming(["hello there"])
        async with served(engine) as (chat, session):
            stream = await chat.create(model="m", messages=ASK, stream=True, stream_options={"include_usage": True})
            texts = []
            async for chunk in stream:
                texts += [each.delta.content for each in chunk.choices if each.delta.content]
                if texts and not engine.may_continue.is_set():
                    assert session.transcript.num_replies == 0, "the model is still writing"
                    engine.may_continue.set()
                last = chunk
            assert "".join(texts) == "hello there"
            assert len(texts) > 3
            assert last.usage.completion_tokens == len(encode("hello there")) + 1
            (made,) = trajectories(session)
            check_tokens(made)
            assert dict(session.counts) == {"answered": 1}
            # A client that goes away in the middle leaves no trace.
            engine.may_continue.clear()
            stream = await chat.create(model="m", messages=[*ASK, *ASK], stream=True)
            await anext(aiter(stream))
            await stream.close()
            while session.counts["disconnected"] == 0:  # noqa: ASYNC110  the server notices it when it can
                await asyncio.sleep(0.01)
            assert session.transcript.num_replies == 1

    asyncio.run(run())


def test_responses_are_chat_completions_in_other_words():
    async def run(stream: bool) -> None:
        engine = KeyedEngine([f"Let me see.{CALL}", "It is 42.", "Bye."])
        async with served(engine) as (chat, session):
            client = client_of(chat)

            async def ask(**fields):
                if not stream:
                    return await client.responses.create(model="m", tools=[TOOL], **fields)
                stream_of = await client.responses.create(stream=True, model="m", tools=[TOOL], **fields)
                events = [each async for each in stream_of]
                kinds = [each.type for each in events]
                assert kinds[:2] == ["response.created", "response.in_progress"]
                assert [each.sequence_number for each in events] == list(range(len(events)))
                written = "".join(each.delta for each in events if each.type == "response.output_text.delta")
                assert written == events[-1].response.output_text
                return events[-1].response

            items = [{"role": "user", "content": [{"type": "input_text", "text": "12+34="}]}]
            first = await ask(input=items, instructions="Be brief.")
            assert (first.status, first.output_text) == ("completed", "Let me see.")
            (call,) = [each for each in first.output if each.type == "function_call"]
            assert (call.name, json.loads(call.arguments)) == ("search", {"query": "x"})
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
            sent = [each.model_dump(exclude_none=True) for each in first.output]
            second = await ask(input=[*items, *sent, output], instructions="Be brief.")
            assert second.output_text == "It is 42."
            third = await ask(input="Thanks.", previous_response_id=second.id, instructions="Be brief.")
            assert third.output_text == "Bye."
            assert third.usage.output_tokens == len(encode("Bye.")) + 1
            (made,) = trajectories(session)
            check_tokens(made)
            assert len(made.turn_ends) == 3
            assert completion_id(second.id) in session.transcript.completion_ids()
            with pytest.raises(openai.BadRequestError, match="no such response"):
                await ask(input="x", previous_response_id="resp_1")
            with pytest.raises(openai.BadRequestError, match="only function tools"):
                await client.responses.create(model="m", input="x", tools=[{"type": "web_search"}])

    asyncio.run(run(stream=False))
    asyncio.run(run(stream=True))


def test_the_fields_of_a_response_become_those_of_a_chat():
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = {
        "model": "m",
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
        ],
        "text": {"format": schema},
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "search"},
        "max_output_tokens": 7,
        "background": False,
        "include": ["reasoning.encrypted_content"],
    }
    chat = chat_body(body)
    assert [each["role"] for each in chat["messages"]] == ["user", "assistant", "tool"]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "search"}}
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (chat["tools"], chat["max_completion_tokens"]) == ([SEARCH], 7)


def test_replies_that_must_match_a_grammar_are_not_trained():
    schema = {"name": "answer", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}

    async def run() -> None:
        engine = KeyedEngine(['{"x": 1}', CALL, "plain"])
        async with served(engine) as (chat, session):
            form = {"type": "json_schema", "json_schema": schema}
            await chat.create(model="m", messages=ASK, response_format=form)
            named = {"type": "function", "function": {"name": "search"}}
            await chat.create(model="m", messages=ASK, tools=[SEARCH], tool_choice=named)
            await chat.create(model="m", messages=[*ASK, *ASK])
            first, second, third = engine.requests
            assert first.sampling.grammar.text == json.dumps(schema["schema"])
            assert "search" in second.sampling.grammar.text
            assert third.sampling.grammar is None
            made = trajectories(session)
            texts = [tiny.tokenizer().decode(each.response_tokens).partition("<|end|>")[0] for each in made]
            trained = dict(zip(texts, (any(each.loss_mask) for each in made), strict=True))
            assert trained == {'{"x": 1}': False, CALL: False, "plain": True}
        async with served(KeyedEngine(), client_grammar="refuse") as (chat, session):
            with pytest.raises(openai.BadRequestError, match="client_grammar to follow or ignore"):
                await chat.create(model="m", messages=ASK, tools=[SEARCH], tool_choice="required")
            assert dict(session.counts) == {"grammar_refused": 1}

    asyncio.run(run())


def test_with_client_grammar_ignore_all_replies_are_sampled_freely_and_trained(caplog):
    async def run() -> None:
        engine = KeyedEngine(["free", "text", CALL])
        async with served(engine, client_grammar="ignore") as (chat, session):
            await chat.create(model="m", messages=ASK, response_format={"type": "json_object"})
            required = {"tools": [SEARCH], "tool_choice": "required"}
            plain = await chat.create(model="m", messages=[*ASK, *ASK], **required)
            called = await chat.create(model="m", messages=[*ASK, *ASK, *ASK], **required)
            assert [each.sampling.grammar for each in engine.requests] == [None] * 3
            assert plain.choices[0].message.content == "text"
            assert called.choices[0].message.tool_calls[0].function.name == "search"
            assert [any(each.loss_mask) for each in trajectories(session)] == [True] * 3

    asyncio.run(run())
    noted = [each.getMessage() for each in caplog.records if "client_grammar" in each.getMessage()]
    assert len(noted) == 2, "once for each kind"
    assert all("has no effect" in each for each in noted)


def test_refused_calls_are_a_metric():
    (made,) = asyncio.run(episode("asks_wrongly", KeyedEngine()))
    assert made.info["refused_calls"] == {"invalid_api_key": 1, "unknown_path": 1}
    metrics = episode_metrics([made])
    assert metrics["episode/refused_calls/invalid_api_key"] == 1.0
