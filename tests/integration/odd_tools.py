"""Tools that fail in every way, and a parser that reads a call from whatever an untrained model writes."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from pathlib import Path

from headwater.core.tool_calls import ParsedReply, ToolCall
from headwater.tools.base import BaseTool, ToolResponse


class EveryReply:
    """The text alone decides whether it is a call, and of which tool."""

    def __init__(self, hidden=()) -> None:
        pass

    def parse(self, text, schemas=(), *, salt="", in_reasoning=False) -> ParsedReply:
        names = [schema["function"]["name"] for schema in schemas]
        number = zlib.crc32(text.encode(errors="replace"))
        calls = [ToolCall(f"call{place}", names[(number + place) % len(names)], {}) for place in range(number % 3)]
        return ParsedReply(text, tuple(calls))


class WholeReply:
    """Every reply is a call of ``measure`` with all of its text."""

    def __init__(self, hidden=()) -> None:
        pass

    def parse(self, text, schemas=(), *, salt="", in_reasoning=False) -> ParsedReply:
        return ParsedReply("", (ToolCall("call", "measure", {"text": text}),))


class WholeExpression(WholeReply):
    """Every reply is a call of ``calculator`` with all of its text."""

    def parse(self, text, schemas=(), *, salt="", in_reasoning=False) -> ParsedReply:
        return ParsedReply("", (ToolCall("call", "calculator", {"expression": text}),))


def calculated(messages: list) -> float:
    """1 for a call that the calculator answered, else the share of digits in it."""
    called = [each for each in messages if each.get("tool_calls")]
    if messages[-2]["role"] == "tool" and not messages[-2]["content"].startswith("Error"):
        return 1.0
    text = called[-1]["tool_calls"][0]["function"]["arguments"]["expression"] if called else ""
    return sum(each.isdecimal() for each in text) / max(1, len(text))


def measure(text: str) -> ToolResponse:
    """Reward digits.

    Args:
        text: Any text.
    """
    return ToolResponse("ok", reward=sum(each.isdecimal() for each in text) / max(1, len(text)))


def no_score(solution_str: str) -> float:
    return 0.0


def fine() -> str:
    """Works."""
    return "ok"


def raises() -> str:
    """Raises an error."""
    raise RuntimeError("broken")


async def hangs() -> str:
    """Never ends."""
    await asyncio.sleep(3600)
    return "never"


def blocks() -> str:
    """Never ends and occupies a thread."""
    while True:
        time.sleep(0.05)


def huge() -> str:
    """Returns five megabytes."""
    return "x" * 5_000_000


def odd() -> object:
    """Returns something that is not text."""
    return object()


class Kept(BaseTool):
    """Notes what was created and what was released in the folder $ODD_TOOLS; hangs while a file ``hang`` is there."""

    tool_schema = {"type": "function", "function": {"name": "kept", "description": "Keeps state."}}  # noqa: RUF012

    async def create(self, instance_id: str) -> str:
        self._note("created")
        return instance_id

    async def execute(self, instance_id: str, parameters: dict) -> str:
        if (_folder() / "hang").exists():
            self._note("hanging")
            await asyncio.sleep(3600)
        return "ok"

    async def release(self, instance_id: str) -> None:
        self._note("released")

    def _note(self, what: str) -> None:
        with (_folder() / what).open("a") as file:
            file.write("x")


def _folder() -> Path:
    return Path(os.environ["ODD_TOOLS"])


def count(folder: Path, what: str) -> int:
    path = folder / what
    return len(path.read_text()) if path.exists() else 0
