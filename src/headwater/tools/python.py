"""``python``: runs each program from the beginning, in the sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

from headwater.sandbox import Sandbox
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse
from headwater.tools.code_output import outcome_response


@TOOLS.register
class Python(BaseTool):
    """Runs Python code. The limits are those of the section ``sandbox``."""

    tool_schema = {  # noqa: RUF012 - the schema of the class
        "name": "python",
        "description": "Run a Python program and return what it prints. Nothing is kept between two calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. Print what you want to see."}},
            "required": ["code"],
        },
    }

    def __init__(self, *, sandbox: Sandbox, tool_schema: Any = None) -> None:
        super().__init__(tool_schema=tool_schema)
        self._sandbox = sandbox
        # More calls would wait inside the sandbox, where waiting counts as time of the call.
        self.max_concurrent = sandbox.max_concurrent

    async def check(self) -> None:
        await asyncio.to_thread(self._sandbox.start)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        return outcome_response(await self._sandbox.arun(str(parameters.get("code", ""))))
