"""Unit tests in a remote sandbox with Sandbox Fusion's protocol (POST ``/run_code``), instead of that of this machine.

The service runs one script per test. For tests that are code, the script starts the program in a second process, as the
local sandbox does, with the same two sides (``sandbox/inside/examiner.py`` and ``answering.py``).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import ConfigError, RewardFailed
from headwater.sandbox import Limits, Outcome
from headwater.sandbox.inside import answering, examiner, frames, runner, values
from headwater.sandbox.records import Status
from headwater.tools.base import ToolUnavailable
from headwater.tools.http import HttpService
from headwater.tools.results import BadResult

_MARGIN_S = 10.0
"""How much longer than the code itself a request may take."""
_NUM_RETRIES = 3
_MAX_CONNECTIONS = 64

_INSTALL = """
def install(parts):
    import sys, types
    for name in ("headwater", "headwater.sandbox", "headwater.sandbox.inside"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, source in parts.items():
        full = "headwater.sandbox.inside." + name
        module = sys.modules[full] = types.ModuleType(full)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
        setattr(sys.modules["headwater.sandbox.inside"], name, module)

def control(option, value):
    import ctypes
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (AttributeError, OSError):  # not on Linux
        pass
"""
_PROGRAM_SIDE = f"""{_INSTALL}
import json, os, sys, tempfile
control(1, 9)  # PR_SET_PDEATHSIG: ends with the tests
given = json.load(sys.stdin)
install(given["parts"])
os.chdir(tempfile.mkdtemp())
with open("main.py", "w", encoding="utf-8", errors="surrogatepass") as file:
    file.write(given["program"])
from headwater.sandbox.inside.answering import serve_calls
serve_calls(os.path.abspath("main.py"), int(sys.argv[1]), int(sys.argv[2]))
"""
_TESTS_SIDE = f"""{_INSTALL}
import json, os, subprocess, sys
try:
    os.unlink(os.path.abspath(__file__))  # the program must not read its tests
except (NameError, OSError):
    pass
control(4, 0)  # PR_SET_DUMPABLE: nor look into the memory of this process
calls_from, calls_to = os.pipe()
answers_from, answers_to = os.pipe()
command = [sys.executable, "-c", PROGRAM_SIDE, str(calls_from), str(answers_to)]
process = subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(calls_from, answers_to)
)
os.close(calls_from)
os.close(answers_to)
process.stdin.write(json.dumps({{"parts": PARTS, "program": PROGRAM}}).encode())
process.stdin.close()
install(PARTS)
from headwater.sandbox.inside.examiner import run_tests
run_tests(TESTS, calls_to, answers_from)
"""


class FusionSandbox:
    """A sandbox service. Any thread may use it."""

    def __init__(self, url: str, config: SandboxConfig, *, longest_s: float) -> None:
        """``longest_s`` is the longest time that a program may run."""
        try:
            self._service = HttpService(
                url,
                "/run_code",
                attempt_timeout_s=longest_s + _MARGIN_S,
                num_retries=_NUM_RETRIES,
                max_connections=_MAX_CONNECTIONS,
            )
        except ConfigError as error:
            raise RewardFailed(f"reward.function_args.sandbox_fusion_url: {error.problems[0]}") from error
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox service", daemon=True)
        self._thread.start()

    def run(self, code: str, stdin: str = "", *, limits: Limits | None = None) -> Outcome:
        bounds = (limits or Limits()).bounds(self._config)
        request = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "run_timeout": bounds.timeout_s,
            "memory_limit_MB": self._config.memory_mib,
        }
        asked = asyncio.run_coroutine_threadsafe(self._service.post(request), self._loop)
        try:
            answer = asked.result()
        except (ToolUnavailable, BadResult) as error:
            raise RewardFailed(f"unit tests cannot run: {error}") from error
        return self._outcome(answer)

    def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> Outcome:
        """As ``Sandbox.run_tests``."""
        given = {"PROGRAM_SIDE": _PROGRAM_SIDE, "PARTS": _parts(), "PROGRAM": code, "TESTS": tests}
        script = "".join(f"{name} = {value!r}\n" for name, value in given.items())
        return self.run(script + _TESTS_SIDE, limits=limits)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _outcome(self, answer: Any) -> Outcome:
        status = answer.get("status") if isinstance(answer, Mapping) else None
        result = answer.get("run_result") if isinstance(answer, Mapping) else None
        if status not in ("Success", "Failed") or not isinstance(result, Mapping):
            told = str(answer.get("message") or answer) if isinstance(answer, Mapping) else str(answer)
            raise RewardFailed(f"unit tests cannot run: {self._service.url}: the sandbox failed: {told[:200]}")
        end, code = str(result.get("status")), result.get("return_code")
        return Outcome(
            _status(end, code),
            stdout=str(result.get("stdout") or ""),
            stderr=str(result.get("stderr") or ""),
            exit_code=code if isinstance(code, int) else None,
            seconds=float(result.get("execution_time") or 0.0),
            detail="the limit of time was exceeded" if end == "TimeLimitExceeded" else "",
        )


def _status(end: str, code: Any) -> Status:
    if end == "TimeLimitExceeded":
        return "timed_out"
    if end == "Finished" and code == 0:
        return "ok"
    return "killed" if isinstance(code, int) and (code < 0 or code > 128) else "failed"


@cache
def _parts() -> dict[str, str]:
    """The files of ``sandbox/inside`` that the two sides need, in the order of their imports."""
    modules = {"frames": frames, "runner": runner, "values": values, "answering": answering, "examiner": examiner}
    return {name: inspect.getsource(module) for name, module in modules.items()}
