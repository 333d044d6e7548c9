"""The tools of a run, for agent loops that call verl's tools themselves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import RolloutFailed
from headwater.core.tool_calls import ToolCall
from headwater.tools.base import ToolResponse
from headwater.tools.schema import ToolSchema
from headwater.tools.session import ToolSession
from headwater.workflows.adapters.journal import current_journal


@dataclass(frozen=True)
class SessionTool:
    """A tool with the calls of verl's ``BaseTool``. The episode's session runs them, with its limits and counts.

    The tool is created before its first call and released when the episode ends, so it keeps its state between calls.
    """

    tool_schema: ToolSchema
    session: ToolSession = field(repr=False)

    @property
    def name(self) -> str:
        return self.tool_schema.name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or uuid.uuid4().hex, ToolResponse("")

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any] | str, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        given = json.loads(parameters) if isinstance(parameters, str) else dict(parameters)
        result = await self.session.call(ToolCall(instance_id, self.name, given))
        return ToolResponse(result.text), result.reward or 0.0, dict(result.metrics)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return (await self.session.rewards()).get(self.name, 0.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Without effect: the episode releases its tools."""


def initialize_tools_from_config(tools_config_file: Any = None) -> list[SessionTool]:
    """The tools of the recipe that the row may use. ``tools.config`` names the file, also one in verl's format."""
    journal = current_journal()
    if journal is None or journal.tools is None:
        raise RolloutFailed(
            "initialize_tools_from_config: the run has no tools; set tools.config to the tool config file, and "
            "call this in the constructor or in run"
        )
    return [SessionTool(ToolSchema.read(schema, "tools"), journal.tools) for schema in journal.tool_schemas]
