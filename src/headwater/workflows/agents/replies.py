"""Writing the reply to a chat call of an agent, complete or as a stream, in the format of OpenAI."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.chat.parsers import ToolCallParser
from headwater.core.protocols import Tokenizer
from headwater.core.records import ModelRequest, ModelResponse, SamplingParams
from headwater.core.tool_calls import ToolCall
from headwater.serving.openai.chat import ChatReply
from headwater.serving.openai.plan import Plan
from headwater.serving.output import Piece, TextRules, whole
from headwater.workflows.agents.calls import ChatCall


@dataclass(frozen=True)
class Choice:
    """One reply of the model to a call, as the client receives it."""

    response: ModelResponse
    content: str
    calls: tuple[ToolCall, ...] = ()


def read_choice(call: ChatCall, response: ModelResponse, tokenizer: Tokenizer, parser: ToolCallParser | None) -> Choice:
    """The reply without its stop text, split into text and tool calls."""
    stops = call.shape.rules.stops
    if not call.parses_calls or parser is None:
        return Choice(response, whole(response, tokenizer, TextRules(stops)).text)
    # Many models mark their calls with special tokens.
    parsed = parser.parse(whole(response, tokenizer, TextRules(stops, skip_special_tokens=False)).text)
    calls = tuple(each for each in parsed.calls if isinstance(each, ToolCall))
    # A client that sees the text of a broken call can tell the model about it.
    broken = [each.text for each in parsed.calls if not isinstance(each, ToolCall)]
    return Choice(response, "".join([parsed.content, *broken]), calls)


class CallReply:
    """Formats the choices of one call."""

    def __init__(self, call: ChatCall, choices: Sequence[Choice], tokenizer: Tokenizer) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._choices = choices
        self._version = max((version for each in choices for version in each.response.output_versions), default=0)
        self._pieces = [_piece(choice, tokenizer, call) for choice in choices]
        inputs = choices[0].response.input_tokens
        request = ModelRequest(self.id, inputs, SamplingParams(max_new_tokens=1), rng_key=0)
        plan = Plan(self.id, call.model, int(time.time()), (request,) * len(choices), len(choices), call.shape)
        self._writer = ChatReply(plan, tokenizer)
        self._include_usage = call.shape.include_usage

    def whole(self) -> dict[str, Any]:
        reply = self._writer.whole(self._pieces, self._version)
        for choice, written in zip(self._choices, reply["choices"], strict=True):
            if choice.calls:
                message = written["message"]
                message["content"] = choice.content or None
                message["tool_calls"] = [each.as_openai() for each in choice.calls]
        return reply

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        for place in range(len(self._choices)):
            for chunk in self._chunks(place):
                yield chunk
        if self._include_usage:
            yield self._writer.last_chunk(sum(len(each.tokens) for each in self._pieces), self._version)

    def _chunks(self, place: int) -> Iterator[dict[str, Any]]:
        choice, piece = self._choices[place], self._pieces[place]
        *begun, ended = self._writer.chunks(place, piece, self._version)
        yield from begun
        for number, each in enumerate(choice.calls):
            called = {"tool_calls": [{"index": number, **each.as_openai()}]}
            yield {**ended, "choices": [{**ended["choices"][0], "delta": called, "finish_reason": None}]}
        yield ended


def _piece(choice: Choice, tokenizer: Tokenizer, call: ChatCall) -> Piece:
    piece = whole(choice.response, tokenizer, call.shape.rules)
    reason = "tool_calls" if choice.calls else piece.stop_reason
    return replace(piece, text=choice.content, stop_reason=reason)
