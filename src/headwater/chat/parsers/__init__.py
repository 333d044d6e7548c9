"""Parsers of tool calls, one file per format: they find the calls in a model's message."""

from __future__ import annotations

from typing import Protocol

from headwater.core.registry import Registry
from headwater.core.tool_calls import ParsedReply

PARSERS = Registry("tool-call parser", "headwater.chat.parsers")


class ToolCallParser(Protocol):
    """Reads one format. ``text`` is a complete message of the model with its special tokens (``Episode.raw_text``)."""

    def parse(self, text: str) -> ParsedReply: ...
