"""The endpoint as OpenAI's own client uses it: what it answers, and what becomes trajectories, token by token."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import tiny
from endpoint_parts import END, KeyedEngine, context, encode, episode
from hypothesis import given, settings
from hypothesis import strategies as st
from log import own_records

from headwater.chat.parsers import make_parser
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Trajectory
from headwater.workflows import Episode
from headwater.workflows.agents.conversation import prefix_keys
from headwater.workflows.agents.server import EndpointServer
from headwater.workflows.agents.session import Session, SessionRules

ASK = [{"role": "user", "content": "12+34="}]
AGAIN = {"role": "user", "content": "Again."}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@asynccontextmanager
async def served(
    engine: KeyedEngine, *, room: int = 200, client_sampling: str = "ignore", client_grammar="follow", **sampling
):
    """OpenAI's client of one episode, and its session."""
    here = context(room, **sampling)
    rules = SessionRules(64, client_sampling, client_grammar, lambda: make_parser("hermes", here.tokenizer), set())
    server = await EndpointServer.here("127.0.0.1", 0)
    made = Episode(here, engine, EpisodeInput(tiny.prompt(), 0, rng_key=11))
    async with server.session(made, rules) as session:
        url = server.base_url(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=0) as client:
            yield client.chat.completions, session


def trajectories(session: Session) -> list[Trajectory]:
    return [leaf.episode.finish(1.0) for leaf in session.transcript.leaves()]


def text_of(trajectory: Trajectory) -> str:
    return tiny.tokenizer().decode(trajectory.tokens)


def check_tokens(trajectory: Trajectory) -> None:
    """The mask, the log-probs and the versions are those of sampled tokens, and only of those."""
    sampled = [version != -1 for version in trajectory.versions]
    assert sampled == [bool(mask) for mask in trajectory.loss_mask]
    assert all((logprob < 0) == is_sampled for logprob, is_sampled in zip(trajectory.logprobs, sampled, strict=True))


def test_a_sequential_agent_gets_the_tokens_of_a_workflow_with_reply_and_tell():
    async def run() -> None:
        engine = KeyedEngine()
        async with served(engine) as (chat, session):
            messages = list(ASK)
            for _ in range(3):
                reply = await chat.create(model="m", messages=messages)
                messages += [reply.choices[0].message.model_dump(), AGAIN]
            (through,) = trajectories(session)
        direct = Episode(context(200), KeyedEngine(), EpisodeInput(tiny.prompt(), 0, rng_key=11))
        for _ in range(2):
            await direct.reply()
            direct.tell([AGAIN])
        await direct.reply()
        wanted = direct.finish(1.0)
        assert through.tokens == wanted.tokens
        assert through.logprobs == wanted.logprobs
        assert [each.rng_key for each in engine.requests] == [each.rng_key for each in direct.engine.requests]
        assert [each.request_id for each in engine.requests] == ["row#0", "row#0/1", "row#0/2"]
        check_tokens(through)
        # What the engine has read and written is the beginning of what it reads next.
        for before, after in zip(engine.requests, engine.requests[1:], strict=False):
            assert after.input_tokens[: len(before.input_tokens)] == before.input_tokens

    asyncio.run(run())


def test_sampled_tokens_are_kept_even_if_their_text_has_other_tokens():
    """The engine writes 4 and 6 as two tokens, and the client sends back 46, which could be one."""

    class Odd(KeyedEngine):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            tokens = (*encode("4"), *encode("6"), *encode(" "), *encode(END))
            return type(response)(request.input_tokens, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")

    async def run() -> None:
        engine = Odd()
        async with served(engine) as (chat, session):
            reply = await chat.create(model="m", messages=ASK)
            content = reply.choices[0].message.content.strip()  # many agents do that
            await chat.create(model="m", messages=[*ASK, {"role": "assistant", "content": content}, AGAIN])
            (one,) = trajectories(session)
            start = one.prompt_length
            assert one.tokens[start : start + 3] == (*encode("4"), *encode("6"), *encode(" "))

    asyncio.run(run())


def test_branches_become_trajectories():
    async def run() -> None:
        engine = KeyedEngine(["1", "2", "3", "4", "5", "6"])
        async with served(engine) as (chat, session):

            async def ask(*messages: Any) -> dict[str, Any]:
                reply = await chat.create(model="m", messages=list(messages))
                return reply.choices[0].message.model_dump()

            one = await ask(*ASK)
            two = await ask(*ASK, one, AGAIN)
            await ask(*ASK, one, AGAIN, two, AGAIN)
            await ask(*ASK, one, {"role": "user", "content": "Other."})  # from an earlier reply
            await ask(*ASK, {"role": "assistant", "content": "edited"}, AGAIN)  # a history that never was
            await ask(*ASK)  # the same question again
            found = {text_of(each).replace("<|end|>", "|") for each in trajectories(session)}
        turn = "<|assistant|>"
        begin = "<|user|>12+34=|"
        assert found == {
            f"{begin}{turn}1|<|user|>Again.|{turn}2|<|user|>Again.|{turn}3|",
            f"{begin}{turn}1|<|user|>Other.|{turn}4|",
            f"{begin}{turn}edited|<|user|>Again.|{turn}5|",
            f"{begin}{turn}6|",
        }
        for each in trajectories(session):
            check_tokens(each)
        edited = next(each for each in trajectories(session) if "edited" in text_of(each))
        assert sum(edited.loss_mask) == 2  # only what the model wrote
        assert len({request.rng_key for request in engine.requests}) == 6

    asyncio.run(run())


def test_concurrent_calls_get_the_same_tokens_in_any_order():
    async def run(seed: int) -> list[Trajectory]:
        rng = random.Random(seed)
        engine = KeyedEngine(delay_s=lambda request: rng.random() / 50)
        async with served(engine) as (chat, session):

            async def worker(name: str) -> None:
                await asyncio.sleep(rng.random() / 50)
                messages: list[Any] = [{"role": "user", "content": name}]
                for _ in range(2):
                    reply = await chat.create(model="m", messages=messages)
                    messages += [reply.choices[0].message.model_dump(), AGAIN]

            await asyncio.gather(*[worker(f"Part {number}") for number in range(6)])
            return trajectories(session)

    first, second = asyncio.run(run(1)), asyncio.run(run(2))
    assert len(first) == 6
    assert [each.tokens for each in first] == [each.tokens for each in second]


def test_several_choices_share_their_prompt_and_each_may_continue():
    async def run() -> None:
        async with served(KeyedEngine(["1", "2", "3", "4"])) as (chat, session):
            reply = await chat.create(model="m", messages=ASK, n=3)
            assert [each.message.content for each in reply.choices] == ["1", "2", "3"]
            assert reply.usage.completion_tokens == 6
            await chat.create(model="m", messages=[*ASK, reply.choices[1].message.model_dump(), AGAIN])
            texts = [text_of(each) for each in trajectories(session)]
        assert [text.count("<|assistant|>") for text in texts] == [1, 2, 1]
        assert texts[1].endswith("<|assistant|>2<|end|><|user|>Again.<|end|><|assistant|>4<|end|>")

    asyncio.run(run())


def test_streams_stops_limits_and_logprobs():
    async def run() -> None:
        async with served(KeyedEngine(["one STOP two", "three four five", "1234"])) as (chat, session):
            stream = await chat.create(
                model="m", messages=ASK, stream=True, stop=["STOP"], stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "one "
            assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
            assert chunks[-1].usage.completion_tokens == len(encode("one STOP"))
            reply = await chat.create(
                model="m", messages=[*ASK, {"role": "assistant", "content": text}, AGAIN], max_tokens=2
            )
            assert reply.choices[0].finish_reason == "length"
            (one,) = trajectories(session)
            assert "<|assistant|>one STOP<|end|>" in text_of(one)  # the model reads what it wrote
            check_tokens(one)
            reply = await chat.create(model="m", messages=[{"role": "user", "content": "x"}], logprobs=True)
            entries = reply.choices[0].logprobs.content
            assert "".join(each.token for each in entries) == "1234<|end|>"
            assert [each.logprob for each in entries][:2] == [-0.5, -0.625]

    asyncio.run(run())


def test_tool_calls_and_their_results():
    call = '<tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>'

    async def run(stream: bool) -> None:
        engine = KeyedEngine([f"Let me look.{call}", "Twice a day."])
        async with served(engine, room=400) as (chat, session):
            fields: dict[str, Any] = {"model": "m", "tools": [SEARCH]}
            if stream:
                chunks = [each async for each in await chat.create(messages=ASK, stream=True, **fields)]
                parts = [part for each in chunks for part in each.choices[0].delta.tool_calls or ()]
                arguments = "".join(part.function.arguments or "" for part in parts)
                written = {"name": parts[0].function.name, "arguments": arguments}
                calls = [{"id": parts[0].id, "type": "function", "function": written}]
                message = {
                    "role": "assistant",
                    "content": "Let me look.",
                    "tool_calls": calls,
                }
                reason = chunks[-1].choices[0].finish_reason
            else:
                reply = await chat.create(messages=ASK, **fields)
                message, reason = reply.choices[0].message.model_dump(exclude_none=True), reply.choices[0].finish_reason
            function = message["tool_calls"][0]["function"]
            assert (reason, function["name"], json.loads(function["arguments"])) == (
                "tool_calls", "search", {"query": "tides"},
            )  # fmt: skip
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 h 25 min"}
            last = await chat.create(messages=[*ASK, message, result], **fields)
            assert last.choices[0].message.content == "Twice a day."
            assert last.choices[0].message.tool_calls is None
            (one,) = trajectories(session)
        assert text_of(one).endswith(
            f"<|assistant|>Let me look.{call}<|end|><|tool|>12 h 25 min<|end|><|assistant|>Twice a day.<|end|>"
        )
        assert '"name": "search"' in text_of(one)[:200]  # the model is shown its tools
        check_tokens(one)
        assert one.messages[1]["tool_calls"][0]["function"]["name"] == "search"

    asyncio.run(run(stream=False))
    asyncio.run(run(stream=True))


def test_a_broken_tool_call_is_text():
    async def run() -> None:
        async with served(KeyedEngine(['<tool_call>{"name": </tool_call>']), room=400) as (chat, _):
            reply = await chat.create(model="m", messages=ASK, tools=[SEARCH])
            assert reply.choices[0].message.tool_calls is None
            assert "<tool_call>" in reply.choices[0].message.content

    asyncio.run(run())


def test_the_run_decides_how_tokens_are_sampled(caplog):
    async def run() -> None:
        engine = KeyedEngine()
        async with served(engine, temperature=0.7) as (chat, _):
            await chat.create(model="m", messages=ASK, temperature=0.7)
            assert not own_records(caplog)
            await chat.create(model="m", messages=ASK, temperature=0.0, seed=4, tools=[SEARCH], tool_choice="required")
            assert {request.sampling.temperature for request in engine.requests} == {0.7}
            noted = [record.getMessage() for record in own_records(caplog)]
            assert len(noted) == 3
            assert "temperature = 0" in "".join(noted)
        async with served(engine, client_sampling="refuse") as (chat, _):
            with pytest.raises(openai.BadRequestError, match="samples with its own settings"):
                await chat.create(model="m", messages=ASK, temperature=0.2)

    asyncio.run(run())


def test_no_room_is_an_error_that_clients_know():
    async def run() -> None:
        async with served(KeyedEngine(), room=12) as (chat, session):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat.create(model="m", messages=[{"role": "user", "content": "long " * 200}])
            assert caught.value.code == "context_length_exceeded"
            assert session.limit == "room"
            assert not session.transcript.num_replies

    asyncio.run(run())


def test_models_and_sync_client():
    async def run() -> None:
        async with served(KeyedEngine(["7"])) as (chat, session):

            def use() -> tuple[list[str], str | None]:
                with openai.OpenAI(base_url=str(chat._client.base_url), api_key=session.key) as client:
                    names = [each.id for each in client.models.list()]
                    return names, client.chat.completions.create(model="x", messages=ASK).choices[0].message.content

            assert await asyncio.to_thread(use) == (["default"], "7")

    asyncio.run(run())


def test_rewards_for_single_completions():
    async def run() -> None:
        (one,) = await episode("rewards_each", KeyedEngine())
        assert (one.reward, one.turn_rewards) == (0.75, (0.25, 0.5))
        first, second = await episode("rewards_each", KeyedEngine(), agent_args={"branches": True})
        assert sorted([first.turn_rewards, second.turn_rewards]) == [(0.25, 0.5), (2.0,)]
        choices = await episode("rewards_choices", KeyedEngine(["a", "b", "c"]))
        assert {text_of(each)[-len("a<|end|>")]: each.reward for each in choices} == {"a": 0.0, "b": 1.0, "c": 2.0}

    asyncio.run(run())


def test_agents_in_threads():
    async def run() -> None:
        for agent, reward in [("twice", 0.5), ("answers_async", 0.25), ("InheritsItsCall", 0.25)]:
            (one,) = await episode(agent, KeyedEngine(), run_in="thread")
            assert one.reward == reward
        with pytest.raises(Exception, match="raised KeyError"):
            await episode("raises", KeyedEngine(), run_in="thread")
        with pytest.raises(Exception, match="raised CancelledError"):
            await episode("is_cancelled", KeyedEngine(), run_in="thread")
        with pytest.raises(Exception, match=r"did not end within 0\.2 s"):
            await episode("sleeps", KeyedEngine(), run_in="thread", timeout_s=0.2)

    asyncio.run(run())


TEXTS = st.text(alphabet='ab \n{}"', max_size=6)
CALLS = st.lists(
    st.builds(lambda name, value: (name, {"x": value, "y": [1]}), st.sampled_from(["f", "g"]), TEXTS), max_size=2
)


@settings(max_examples=60, deadline=None)
@given(TEXTS, CALLS, TEXTS)
def test_a_conversation_is_recognised_however_it_is_written(text, calls, result):
    plain = [
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": text or None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for name, arguments in calls
            ],
        },
        {"role": "tool", "content": result, "tool_call_id": "1"},
    ]
    parts = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]
    others = [{"id": "other", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    written = [
        {"role": "user", "content": parts, "name": None},
        {"role": "assistant", "content": f" {text}\n", "refusal": None, **({"tool_calls": others} if calls else {})},
        {"role": "tool", "content": [{"type": "text", "text": result}]},
    ]
    assert prefix_keys(plain, {}) == prefix_keys(written, {})
    assert prefix_keys(plain, {})[0] != prefix_keys(plain, {"tools": [SEARCH]})[0]
    changed = [{**written[0], "content": text + "x"}, *written[1:]]
    assert not set(prefix_keys(plain, {})) & set(prefix_keys(changed, {}))
