"""``python_session``: runs Python code that keeps its variables and files during an episode."""

from __future__ import annotations

import asyncio
from typing import Any

from headwater.sandbox import Sandbox
from headwater.sandbox.session import CodeSession
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse
from headwater.tools.code_output import outcome_response


@TOOLS.register
class PythonSession(BaseTool):
    """As ``python``, with one session of the sandbox for each episode that calls it."""

    tool_schema = {  # noqa: RUF012 - the schema of the class
        "name": "python",
        "description": "Run Python code and return what it prints. Variables and files are kept for later calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code. Print what you want to see."}},
            "required": ["code"],
        },
    }

    def __init__(self, *, sandbox: Sandbox, tool_schema: Any = None) -> None:
        super().__init__(tool_schema=tool_schema)
        self._sandbox = sandbox
        self.max_concurrent = sandbox.max_concurrent
        self._sessions: dict[str, CodeSession] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def check(self) -> None:
        await asyncio.to_thread(self._sandbox.start)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        # Parallel calls of one episode share its variables, so they run one after the other.
        async with self._turns.setdefault(instance_id, asyncio.Lock()):
            session = self._sessions.get(instance_id)
            if session is None:
                session = await self._sandbox.session().__aenter__()
                self._sessions[instance_id] = session
            return outcome_response(await session.run(str(parameters.get("code", ""))))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._turns.pop(instance_id, None)
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.__aexit__(None, None, None)
