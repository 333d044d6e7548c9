"""A message with tool calls in OpenAI's format, complete or in parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from headwater.chat.call_events import ArgumentText, CallBegun, CallEvent, ContentText
from headwater.chat.parsers import CallStream
from headwater.core.tool_calls import MalformedCall


class ToolMessage:
    """The message of one choice. Streaming it or sending it complete gives the same calls.

    A malformed call whose name is known is sent as a call, with its arguments as the model wrote them; OpenAI's clients
    must expect arguments that are not valid JSON. Without a name, its text is part of the content.
    """

    def __init__(self, stream: CallStream, *, is_parallel: bool = True) -> None:
        self._stream = stream
        self._is_parallel = is_parallel
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self._is_in_call = False
        self._is_sent = True
        """Whether the call that began last is sent. Without parallel calls, only the first one is."""

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def take(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that ``text`` adds."""
        events = self._stream.feed(text)
        if is_last:
            events += self._stream.finish()
        return [delta for event in _joined(events) if (delta := self._delta(event)) is not None]

    def whole(self) -> dict[str, Any]:
        """The message, after all text was taken."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = self._calls
        return message

    def _delta(self, event: CallEvent) -> dict[str, Any] | None:
        if isinstance(event, ContentText):
            return self._text(event.text)
        if isinstance(event, CallBegun):
            return self._begin(event)
        if isinstance(event, ArgumentText):
            return self._argument(event.text) if self._is_sent else None
        has_begun, self._is_in_call = self._is_in_call, False
        return self._text(event.call.text) if isinstance(event.call, MalformedCall) and not has_begun else None

    def _text(self, text: str) -> dict[str, Any]:
        self._content += text
        return {"content": text}

    def _begin(self, event: CallBegun) -> dict[str, Any] | None:
        self._is_in_call, self._is_sent = True, self._is_parallel or not self._calls
        if not self._is_sent:
            return None
        call = {"id": event.call_id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        self._calls.append(call)
        return {"tool_calls": [{"index": len(self._calls) - 1, **copy.deepcopy(call)}]}

    def _argument(self, text: str) -> dict[str, Any]:
        self._calls[-1]["function"]["arguments"] += text
        return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]}


def _joined(events: Sequence[CallEvent]) -> list[CallEvent]:
    """``events`` with neighbouring texts of one kind joined, so that fewer deltas are sent."""
    joined: list[CallEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ArgumentText) and isinstance(last, ArgumentText):
            joined[-1] = ArgumentText(last.text + event.text)
        else:
            joined.append(event)
    return joined
