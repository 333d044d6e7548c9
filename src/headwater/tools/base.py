"""``BaseTool``: a tool with a state for each episode.

    class Counter(BaseTool):
        tool_schema = {"name": "count", "description": "Adds to a counter.", "parameters": {...}}

        async def create(self, instance_id, start=0, **kwargs):
            self._values[instance_id] = start

        async def execute(self, instance_id, parameters, **kwargs):
            self._values[instance_id] += parameters["by"]
            return str(self._values[instance_id])

        async def release(self, instance_id, **kwargs):
            del self._values[instance_id]

One object serves all episodes. An episode has its own ``instance_id``: ``create`` begins it before the first call, and
``release`` ends it, whatever happened in between. Each method may be a coroutine function or a plain function; plain
functions run in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.tools.schema import ToolSchema


class ToolUnavailable(HeadwaterError):
    """A tool cannot work at present, for example because its service is down. Raise it in ``execute`` or ``create``."""


class ToolError(HeadwaterError):
    """A call that cannot be answered. The model is told the text, and the failure is counted as ``raised``."""


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What a call returns, if text alone is not enough."""

    text: str = ""
    reward: float | None = None
    """A reward for this call."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are recorded with the episode."""
    image: Any = None
    """An image that the model is shown, or a list of them: Pillow images, encoded bytes, data URLs or paths."""
    video: Any = None
    """A video as a list of such images, or a list of videos."""


class BaseTool:
    """A tool that does nothing. Override ``execute``, and the other methods as needed."""

    tool_schema: Any = None
    """The tool's OpenAI function schema: the ``ToolSchema`` of an object; a class may state it as a dict."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        self.config = dict(config or {})
        """The settings of the tool, from ``config`` of its entry."""
        given = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        self.tool_schema = ToolSchema.read(given, f"tool {type(self).__name__}")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """The schema, if the entry of the tool does not give one."""
        return self.tool_schema

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin an episode. ``kwargs`` are the row's ``create_kwargs``."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one call: text, a Pillow image, ``(text, reward, metrics)``, or a ``ToolResponse``.

        ``parameters`` match the schema. ``kwargs`` are the row's ``execute_kwargs``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no execute method")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole episode, once at its end; None if there is none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode, and free what it holds."""

    async def check(self) -> None:
        """Raise ``ToolUnavailable`` if the tool cannot work. Called once, before a model is loaded."""

    async def close(self) -> None:
        """Free what the tool itself holds, at the end of a run."""
