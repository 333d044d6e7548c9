"""The API of an episode: one call, from its body to its reply. The endpoint sends it over HTTP; see ``server.py``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headwater.serving.errors import ApiError, cut, wrong
from headwater.serving.openai.responses import ResponseWriter, chat_body, event_bytes, input_messages
from headwater.workflows.agents.calls import read_call
from headwater.workflows.agents.session import Session

CHAT, RESPONSES = "chat/completions", "responses"


@dataclass(frozen=True)
class ApiReply:
    """A reply, complete or as a stream of events."""

    body: dict[str, Any] | None
    events: AsyncGenerator[dict[str, Any], None] | None = None

    @property
    def is_stream(self) -> bool:
        return self.events is not None

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The stream as server-sent events."""
        assert self.events is not None
        async with aclosing(self.events):
            async for event in self.events:
                yield event_bytes(event)
        yield b"data: [DONE]\n\n"


async def answer_call(session: Session, path: str, body: Mapping[str, Any]) -> ApiReply:
    """The answer to a call of ``chat/completions`` or ``responses``. Errors are ``HeadwaterError``."""
    with session.counting(is_answer=False):
        if path not in (CHAT, RESPONSES):
            raise ApiError(
                f"{cut(path)}: episodes offer /v1/chat/completions and /v1/responses; configure the client for one of "
                "them",
                status=404,
                code="unknown_path",
            )
        chat = body if path == CHAT else chat_body(body, _history(session, body))
        if session.media is None:
            call = read_call(chat, session.sampling)
        else:  # in a thread, because other episodes would wait while pictures are decoded
            call = await asyncio.to_thread(read_call, chat, session.sampling, session.media)
    if path == CHAT:
        return ApiReply(None, session.stream(call)) if call.shape.stream else ApiReply(await session.answer(call))
    writer = ResponseWriter(body)
    if call.shape.stream:
        return ApiReply(None, _stored(session, body, writer.events(session.stream(call))))
    made = writer.whole(await session.answer(call))
    _store(session, body, made)
    return ApiReply(made)


def _history(session: Session, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    previous = body.get("previous_response_id")
    if previous is None:
        return []
    if not isinstance(previous, str) or previous not in session.stored:
        raise wrong("previous_response_id", previous, "this episode has no such response; send the whole conversation")
    return session.stored[previous]


async def _stored(
    session: Session, body: Mapping[str, Any], events: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(events):
        async for event in events:
            if event["type"] in ("response.completed", "response.incomplete"):
                _store(session, body, event["response"])
            yield event


def _store(session: Session, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Keep the conversation up to a response, for a call that names it."""
    before = _history(session, body)
    session.stored[response["id"]] = [*before, *input_messages(body["input"]), *input_messages(response["output"])]
