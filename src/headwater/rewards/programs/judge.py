"""Running a program against unit tests in the sandbox."""

from __future__ import annotations

import asyncio
import binascii
import json
import marshal
import secrets
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import HeadwaterError, RewardFailed
from headwater.rewards.programs.cases import CallCases, Cases, CheckCases, OutputCases
from headwater.rewards.programs.compare import same_output, same_value
from headwater.sandbox import Limits, Outcome, Sandbox

End = Literal["passed", "wrong", "error", "timed_out", "out_of_memory", "too_much_output", "killed"]
"""How the tests of a program ended. All but the first mean that the program is wrong, not that the reward failed."""

_RESULT_KIB = 4096
"""Room for the verdict, which contains what functions returned."""


@dataclass(frozen=True)
class Report:
    """How many tests a program passed, and how the first failure came about."""

    num_passed: int
    num_tests: int
    end: End
    detail: str = ""

    @property
    def share(self) -> float:
        return self.num_passed / self.num_tests


@dataclass(frozen=True)
class Rules:
    """How tests are run."""

    stops_early: bool = True
    """End at the first failure."""
    test_timeout_s: float = 10.0
    """Time limit of one test."""
    time_limit_s: float = 40.0
    """Time limit of all tests of one program; tests after it count as failed."""


class Judge:
    """Runs programs in one sandbox, one after the other."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sandbox = Sandbox(config)
        self._lock = threading.Lock()
        self._runner = asyncio.Runner()

    def judge(self, code: str, cases: Cases, rules: Rules) -> Report:
        """Run the tests. A sandbox that does not work is ``RewardFailed``; whatever the program does is a report."""
        deadline = time.monotonic() + rules.time_limit_s
        ends: list[tuple[End, str]] = []
        try:
            with self._lock:
                for end in self._ends(code, cases, rules, deadline):
                    ends.append(end)
                    if rules.stops_early and end[0] != "passed":
                        break
        except RewardFailed:
            raise
        except HeadwaterError as error:
            raise RewardFailed(f"unit tests cannot run: {error}") from error
        passed = sum(end == "passed" for end, _ in ends)
        end, detail = next((each for each in ends if each[0] != "passed"), ("passed", ""))
        return Report(passed, len(cases), end, detail)

    def close(self) -> None:
        self._runner.close()
        self._sandbox.close()

    def _ends(self, code: str, cases: Cases, rules: Rules, deadline: float) -> Iterator[tuple[End, str]]:
        """How each test ends. Without ``stops_early``, every test is a separate run, so that one cannot end others."""
        if isinstance(cases, OutputCases):
            for given, expected in zip(cases.inputs, cases.outputs, strict=True):
                limits = _limits(rules.test_timeout_s, deadline, len(expected))
                yield _late() if limits is None else self._prints(code, given, expected, limits)
            return
        for part in [cases] if rules.stops_early else _split(cases):
            limits = _limits(rules.test_timeout_s * len(part), deadline, _RESULT_KIB << 10)
            yield from [_late()] if limits is None else self._calls(code, part, rules, limits)

    def _prints(self, code: str, given: str, expected: str, limits: Limits) -> tuple[End, str]:
        outcome = self._sandbox.run(code, stdin=given, limits=limits)
        if not outcome.is_ok:
            return _bad_end(outcome)
        return ("passed", "") if same_output(outcome.stdout, expected) else ("wrong", "the output differs")

    def _calls(self, code: str, cases: CallCases | CheckCases, rules: Rules, limits: Limits) -> list[tuple[End, str]]:
        secret = secrets.token_hex(16)
        job: dict[str, Any] = {
            "secret": secret,
            "code": code,
            "entry": cases.entry,
            "prompt": "",
            "stops_early": rules.stops_early,
            "must_be_separate": self._config.isolation != "unprotected",
        }
        if isinstance(cases, CallCases):
            job |= {"calls": cases.arguments}
        else:
            job |= {"prompt": cases.prompt, "setup": cases.setup, "tests": cases.tests}
        outcome = self._runner.run(_in_session(self._sandbox, job, limits))
        verdict = _verdict(outcome, secret)
        if verdict is None:
            return [_bad_end(outcome) if not outcome.is_ok else ("error", "the program ended its tests")]
        return _read_results(verdict, cases)


async def _in_session(sandbox: Sandbox, job: dict[str, Any], limits: Limits) -> Outcome:
    """Fork the program's process first, and send the tests after that."""
    async with sandbox.session(limits) as session:
        started = await session.run(_driver())
        if not started.is_ok:
            raise RewardFailed(f"unit tests cannot start: {started.status} {started.detail} {started.stderr[-500:]}")
        return await session.run(f"finish(pipe, {json.dumps(job)!r})")


@cache
def _driver() -> str:
    """The driver as compiled code: compiling it takes longer than a test."""
    source = Path(__file__).with_name("driver.py").read_text(encoding="utf-8") + "\npipe = start()\n"
    compiled = marshal.dumps(compile(source, "driver.py", "exec", optimize=2))  # without docstrings
    text = binascii.b2a_base64(zlib.compress(compiled, 9), newline=False).decode()
    unpack = f"marshal.loads(zlib.decompress(binascii.a2b_base64({text!r})))"
    return f"import binascii, marshal, zlib\nexec({unpack}, globals())"


def _limits(timeout_s: float, deadline: float, output_bytes: int) -> Limits | None:
    """The limits of the next run; None if no time is left."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return None
    return Limits(timeout_s=min(timeout_s, left_s), max_output_kib=256 + 2 * (output_bytes >> 10))


def _late() -> tuple[End, str]:
    return "timed_out", "no time was left for this test"


def _split(cases: CallCases | CheckCases) -> list[CallCases | CheckCases]:
    if isinstance(cases, CheckCases):
        return [CheckCases((test,), cases.setup, cases.entry, cases.prompt) for test in cases.tests]
    return [
        CallCases(cases.entry, (arguments,), (returned,))
        for arguments, returned in zip(cases.arguments, cases.returns, strict=True)
    ]


def _bad_end(outcome: Outcome) -> tuple[End, str]:
    """How a run ended that did not end well; an exception is the last line of its traceback."""
    detail = outcome.detail or next(iter(reversed(outcome.stderr.strip().splitlines())), "")
    status = outcome.status if outcome.status in get_args(End) else "error"
    return status, detail[:300]  # type: ignore[return-value]


def _verdict(outcome: Outcome, secret: str) -> dict[str, Any] | None:
    marked = [line for line in outcome.stdout.splitlines() if line.startswith(secret)]
    if not marked:
        return None
    verdict: dict[str, Any] = json.loads(marked[-1].removeprefix(secret))
    if "exposed" in verdict:
        raise RewardFailed(
            "the sandbox does not keep a program from reading the memory of its tests; "
            "run headwater doctor --sandbox, or set sandbox.isolation=unprotected to accept it"
        )
    if "cannot_send" in verdict:
        raise RewardFailed(
            f"the row's tests pass something to the program that cannot be sent: {verdict['cannot_send']}"
        )
    return verdict


def _read_results(verdict: dict[str, Any], cases: CallCases | CheckCases) -> list[tuple[End, str]]:
    if "error" in verdict:
        return [("error", verdict["error"])]
    results = verdict["results"]
    if isinstance(cases, CheckCases):
        return [_test_end(result) for result in results]
    return [_call_end(result, expected) for result, expected in zip(results, cases.returns, strict=False)]


def _test_end(result: dict[str, Any]) -> tuple[End, str]:
    if result["passed"]:
        return "passed", ""
    error = result["error"]
    return ("wrong" if error.startswith("AssertionError") else "error"), error


def _call_end(result: dict[str, Any], expected: Any) -> tuple[End, str]:
    if "error" in result:
        return "error", result["error"]
    return ("passed", "") if same_value(result["value"], expected) else ("wrong", "the returned value differs")
