"""What a stream of a parser reports while the model's message arrives.

Joined, the ``ContentText`` of a stream is ``ParsedReply.content``, and its ``CallDone`` are ``ParsedReply.calls``.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.tool_calls import MalformedCall, ToolCall


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text that is certainly not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call whose name is known. Its arguments follow."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """More of the arguments of the call that began last, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The call is complete, or cannot be read. A ``ToolCall`` has begun before; a ``MalformedCall`` may have begun."""

    call: ToolCall | MalformedCall


CallEvent = ContentText | CallBegun | ArgumentText | CallDone
