"""Toolboxes and calls for tests of tools."""

from __future__ import annotations

import asyncio
from typing import Any

import tiny

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.records import Prompt
from headwater.core.tool_calls import ToolCall, ToolResult
from headwater.data.media import MediaSettings
from headwater.tools.toolbox import Toolbox


def toolbox(*tools: Any, media: MediaSettings | None = None, **settings: Any) -> Toolbox:
    """``tools`` are objects; ``settings`` are those of the section ``tools``; ``media`` those of a vision model."""
    return Toolbox(ToolsConfig(**settings), SandboxConfig(), tiny.tokenizer(), tools, media=media)


def row(uid: str = "row", **fields: Any) -> Prompt:
    return Prompt(uid, ({"role": "user", "content": "?"},), "?", (1,), "test", **fields)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("call", name, arguments)


def ask(box: Toolbox, *calls: ToolCall, prompt: Prompt | None = None) -> list[ToolResult]:
    """The results of calls in one episode, one after the other."""

    async def run() -> list[ToolResult]:
        async with box.open(prompt or row()) as session:
            results = [await session.call(each) for each in calls]
        await box.close()
        return results

    return asyncio.run(run())
