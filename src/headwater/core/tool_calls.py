"""Tool calls of a model, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headwater.core.media import MediaContent

ToolFailure = Literal[
    "malformed", "unknown_tool", "bad_arguments", "raised", "timed_out", "bad_result", "unavailable", "over_limit"
]
"""Why a call has no regular result. Each kind is counted; the model is told about it in the tool's message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]

    def as_message(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls`` in a message. Chat templates expect the arguments as a mapping."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that begins as a tool call, but cannot be read as one."""

    call_id: str
    text: str
    reason: str
    """What is wrong, in words that help the model to write a better call."""
    name: str = ""
    """The tool's name, if that much could be read."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A message of the model, split into text and tool calls."""

    content: str
    """The text without the calls."""
    calls: tuple[ToolCall | MalformedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call returned."""

    text: str
    """What the model is told."""
    reward: float | None = None
    """A reward for this call, if the tool gives one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: ToolFailure | None = None
    media: tuple[MediaContent, ...] = ()
    """Images and videos that the model is shown with the text."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of the tool's message: the text, or parts if there are images or videos, which come first."""
        if not self.media:
            return self.text
        parts: list[dict[str, Any]] = [{"type": each.kind, each.kind: each} for each in self.media]
        return [*parts, {"type": "text", "text": self.text}] if self.text else parts
