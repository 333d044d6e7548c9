"""Writing the reply to a chat call of an agent, complete or as a stream, in the format of OpenAI."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from headwater.chat.parsers import ToolCallParser
from headwater.core.records import ModelRequest, SamplingParams
from headwater.serving.openai.chat import ChatReply
from headwater.serving.openai.plan import CallReading, Plan
from headwater.serving.output import Piece, whole
from headwater.workflows.agents.calls import ChatCall
from headwater.workflows.episode import Episode


class CallReply:
    """The reply to a call whose choices are the last replies of ``episodes``."""

    def __init__(self, call: ChatCall, episodes: Sequence[Episode], parser: ToolCallParser | None) -> None:
        first = episodes[0]
        tokenizer = self._tokenizer = first.context.tokenizer
        # The same in every run, because some chat templates show the ids of tool calls, which begin with it.
        name = f"{first.data.rng_key} {first.name} {first.num_turns}"
        self.id = f"chatcmpl-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
        calls, shape = None, call.shape
        if parser is not None and call.tools.schemas:
            calls = CallReading(parser, call.tools.schemas, call.tools.is_parallel, first.begins_in_reasoning)
            # Many formats mark calls with special tokens. The parser leaves the others out.
            shape = replace(shape, rules=replace(shape.rules, skip_special_tokens=False))
        responses = [each.response for each in episodes if each.response is not None]
        self._pieces: list[Piece] = [whole(each, tokenizer, shape.rules) for each in responses]
        self._version = max((version for piece in self._pieces for version in piece.versions), default=0)
        request = ModelRequest(self.id, responses[0].input_tokens, SamplingParams(max_new_tokens=1), rng_key=0)
        requests = (request,) * len(responses)
        self._plan = Plan(self.id, call.model, int(time.time()), requests, len(requests), shape, calls)
        self.body = ChatReply(self._plan, tokenizer).whole(self._pieces, self._version)
        self.messages: list[dict[str, Any]] = [each["message"] for each in self.body["choices"]]
        """What the client receives, one message per choice."""
        several = [f"{self.id}/{choice}" for choice in range(len(requests))]
        self.completion_ids: list[str] = several if len(requests) > 1 else [self.id]
        """The names by which an agent gives a reward to a choice. Several choices have the same ``id``."""

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        writer = ChatReply(self._plan, self._tokenizer)
        for place, piece in enumerate(self._pieces):
            for chunk in writer.chunks(place, piece, self._version):
                yield chunk
        if self._plan.shape.include_usage:
            yield writer.last_chunk(sum(len(piece.tokens) for piece in self._pieces), self._version)
