"""``sandbox_fusion``: runs code in a remote sandbox with Sandbox Fusion's protocol (POST ``/run_code``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from headwater.config.constraints import AtLeast, MoreThan, NotEmpty
from headwater.tools import TOOLS
from headwater.tools.base import BaseTool, ToolResponse, ToolUnavailable
from headwater.tools.code_output import code_response
from headwater.tools.http import HttpService
from headwater.tools.results import BadResult

_MARGIN_S = 10.0
"""How much longer than the code itself a request may take."""


@TOOLS.register
class SandboxFusion(BaseTool):
    """Sends code to a sandbox service and returns what it printed."""

    tool_schema = {  # noqa: RUF012 - the schema of the class
        "name": "code_interpreter",
        "description": "Run a program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    }

    def __init__(
        self,
        *,
        url: str,
        language: Annotated[str, NotEmpty()] = "python",
        run_timeout_s: Annotated[float, MoreThan(0)] = 10.0,
        compile_timeout_s: Annotated[float, MoreThan(0)] = 10.0,
        memory_mib: Annotated[int, AtLeast(16)] = 1024,
        num_retries: Annotated[int, AtLeast(0)] = 3,
        max_connections: Annotated[int, AtLeast(1)] = 64,
        tool_schema: Any = None,
    ) -> None:
        super().__init__(tool_schema=tool_schema)
        self.max_concurrent = max_connections  # the time limit of a call does not count while it waits for a connection
        self._settings = {
            "language": language,
            "run_timeout": run_timeout_s,
            "compile_timeout": compile_timeout_s,
            "memory_limit_MB": memory_mib,
        }
        self._service = HttpService(
            url,
            "/run_code",
            attempt_timeout_s=run_timeout_s + compile_timeout_s + _MARGIN_S,
            num_retries=num_retries,
            max_connections=max_connections,
        )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        language = parameters.get("language")
        chosen = {"language": language} if isinstance(language, str) and language else {}
        return await self._run(str(parameters.get("code", "")), chosen)

    async def check(self) -> None:
        # An empty program is valid in most languages. Whether it succeeds does not matter here.
        try:
            await self._run("", {})
        except BadResult as error:
            raise ToolUnavailable(f"{error}; is this a service with Sandbox Fusion's protocol?") from error
        finally:
            await self._service.close()

    async def close(self) -> None:
        await self._service.close()

    async def _run(self, code: str, chosen: Mapping[str, str]) -> ToolResponse:
        answer = await self._service.post({"code": code, **self._settings, **chosen})
        status = answer.get("status") if isinstance(answer, Mapping) else None
        if status == "SandboxError":
            raise ToolUnavailable(f"{self._service.url}: the sandbox failed: {str(answer.get('message'))[:200]}")
        if status not in ("Success", "Failed"):
            raise BadResult(f"got an answer from {self._service.url} without a valid status: {str(answer)[:100]!r}")
        for stage in ("compile_result", "run_result"):
            result = answer.get(stage)
            if result is None:
                continue
            if not isinstance(result, Mapping):
                raise BadResult(f"got an answer from {self._service.url} in which {stage} is not a mapping")
            if stage == "run_result" or _problem(result):
                return code_response(_text(result, "stdout"), _text(result, "stderr"), _problem(result))
        return code_response(
            "", "", str(answer.get("message") or "the program did not run") if status == "Failed" else ""
        )


def _text(result: Mapping[str, Any], key: str) -> str:
    value = result.get(key)
    return value if isinstance(value, str) else ""


def _problem(result: Mapping[str, Any]) -> str:
    """What went wrong with a stage; empty if nothing did."""
    status, code = result.get("status"), result.get("return_code")
    if status == "TimeLimitExceeded":
        return "the program took too long"
    if status == "Finished" and code in (0, None):
        return ""
    return f"the program ended with exit code {code}" if code is not None else f"the program ended with {status}"
