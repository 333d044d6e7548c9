"""Running a program against unit tests in the sandbox."""

from __future__ import annotations

import binascii
import inspect
import json
import marshal
import math
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import HeadwaterError, RewardFailed
from headwater.rewards.programs import inside
from headwater.rewards.programs.cases import CallCases, Cases, CheckCases, OutputCases
from headwater.sandbox import Limits, Outcome, Sandbox

End = Literal["passed", "wrong", "error", "timed_out", "out_of_memory", "too_much_output", "killed"]
"""How the tests of a program ended. All but the first mean that the program is wrong, not that the reward failed."""

_RESULT_KIB = 2048
"""Room for the results, which contain what functions returned."""
_NOT_LOADED = "the program ended with an error when it was loaded"
_TOLERANCE = 1e-6
"""Relative and absolute difference of numbers with a decimal point: data sets print them with 6 digits or more."""


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


class JudgingPlace(Protocol):
    """Where programs and their tests run: the sandbox of this machine, or a service (``fusion.py``)."""

    def run(self, code: str, stdin: str = "", *, limits: Limits | None = None) -> Outcome: ...
    def run_tests(self, code: str, tests: str, *, limits: Limits | None = None) -> Outcome: ...
    def close(self) -> None: ...


class _Time:
    """What is left of the time for all tests of a program.

    On this machine the clock counts. In a service, requests wait for others, so only what it says about programs does.
    """

    def __init__(self, limit_s: float, *, by_clock: bool) -> None:
        self._by_clock = by_clock
        self._left_s = limit_s
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._left_s - (time.monotonic() - self._began) if self._by_clock else self._left_s

    def take(self, outcome: Outcome) -> None:
        if not self._by_clock:
            self._left_s -= outcome.seconds


class Judge:
    """Runs programs in one sandbox."""

    def __init__(self, config: SandboxConfig, service: JudgingPlace | None = None) -> None:
        """``service`` is used instead of the sandbox of this machine. Its Python may have another version."""
        self._config = config
        self._is_here = service is None
        self._sandbox: JudgingPlace = service or Sandbox(config)
        self._functions = _compiled_functions() if service is None else _source_functions()

    def judge(self, code: str, cases: Cases, rules: Rules) -> Report:
        """Run the tests. A sandbox that does not work is ``RewardFailed``; whatever the program does is a report."""
        left = _Time(rules.time_limit_s, by_clock=self._is_here)
        ends: list[tuple[End, str]] = []
        try:
            for end in self._ends(code, cases, rules, left):
                ends.append(end)
                if rules.stops_early and end[0] != "passed":
                    break
        except RewardFailed:
            raise
        except HeadwaterError as error:
            raise RewardFailed(f"unit tests cannot run: {error}") from error
        passed = sum(end == "passed" for end, _ in ends)
        failure = next((each for each in ends if each[0] != "passed"), None)
        return Report(passed, len(cases), *(failure or ("passed", "")))

    def close(self) -> None:
        self._sandbox.close()

    def _ends(self, code: str, cases: Cases, rules: Rules, left: _Time) -> Iterator[tuple[End, str]]:
        """How each test ends. Without ``stops_early``, every test is a separate run, so that one cannot end others."""
        if isinstance(cases, OutputCases):
            for given, expected in zip(cases.inputs, cases.outputs, strict=True):
                limits = _limits(rules.test_timeout_s, left, len(expected))
                yield _late() if limits is None else self._prints(code, given, expected, limits, left)
            return
        for part in [cases] if rules.stops_early else _split(cases):
            limits = _limits(rules.test_timeout_s * len(part), left, _RESULT_KIB << 10)
            if limits is not None:
                limits = replace(limits, cpu_s=self._config.cpu_s * len(part))
            yield from [_late()] if limits is None else self._calls(code, part, rules, limits, left)

    def _prints(self, code: str, given: str, expected: str, limits: Limits, left: _Time) -> tuple[End, str]:
        outcome = self._sandbox.run(code, stdin=given, limits=limits)
        left.take(outcome)
        if not outcome.is_ok:
            return _bad_end(outcome)
        return ("passed", "") if same_output(outcome.stdout, expected) else ("wrong", "the output differs")

    def _calls(
        self, code: str, cases: CallCases | CheckCases, rules: Rules, limits: Limits, left: _Time
    ) -> list[tuple[End, str]]:
        job: dict[str, Any] = {"entry": cases.entry, "prompt": "", "stops_early": rules.stops_early}
        if isinstance(cases, CallCases):
            job |= {"calls": cases.arguments}
        else:
            job |= {"prompt": cases.prompt, "setup": cases.setup, "tests": cases.tests}
        secret = secrets.token_hex(16)
        program = f"{self._functions}_inside()['load_program']({job['prompt']!r}, {code!r}, {cases.entry!r})\n"
        outcome = self._sandbox.run_tests(program, self._functions + _tests(job, secret), limits=limits)
        left.take(outcome)
        results = _results(outcome, secret)
        if results is None:
            return [_bad_end(outcome) if not outcome.is_ok else ("error", "the tests did not come to their end")]
        return [_end_of(result, cases, place, outcome) for place, result in enumerate(results)]


@cache
def _source_functions() -> str:
    """Code that defines what is in ``inside.py``, for any version of Python."""
    return (
        "def _inside():\n"
        "    names = {'__name__': 'inside'}\n"
        f"    exec(compile({inspect.getsource(inside)!r}, 'inside.py', 'exec'), names)\n"
        "    return names\n"
    )


@cache
def _compiled_functions() -> str:
    """The same, compiled, because compiling it takes longer than a test."""
    code = compile(inspect.getsource(inside), "inside.py", "exec", optimize=2)
    text = binascii.b2a_base64(zlib.compress(marshal.dumps(code)), newline=False).decode()
    return (
        "def _inside():\n"  # a function, so that a program does not find modules that it has not imported
        "    import binascii, marshal, zlib\n"
        "    names = {'__name__': 'inside'}\n"
        f"    exec(marshal.loads(zlib.decompress(binascii.a2b_base64({text!r}))), names)\n"
        "    return names\n"
    )


def _tests(job: dict[str, Any], secret: str) -> str:
    """The code of the tests' process. Its last line has a secret mark, because tests may print."""
    return (
        "import json\n"
        f"results = _inside()['Checks'](json.loads({json.dumps(job)!r}), solution).run()\n"
        f"print('\\n{secret}', json.dumps(results, default=lambda value: sorted(value)))\n"
    )


def _results(outcome: Outcome, secret: str) -> list[dict[str, Any]] | None:
    """What the tests' process reported; None if it did not finish."""
    marked = [line for line in outcome.stdout.splitlines() if line.startswith(secret)]
    if not marked or not outcome.is_ok:
        return None
    try:
        results: list[dict[str, Any]] = json.loads(marked[-1].removeprefix(secret))
    except (ValueError, RecursionError):  # a returned value that is nested too deeply
        return None
    if refused := next((result["cannot_send"] for result in results if "cannot_send" in result), ""):
        raise RewardFailed(f"the row's tests pass a value that cannot be sent to the program: {refused}")
    return results


def _end_of(result: dict[str, Any], cases: CallCases | CheckCases, place: int, outcome: Outcome) -> tuple[End, str]:
    """How one test ended."""
    if "error" in result:
        error = result["error"]
        if _NOT_LOADED in error:  # the program's own error says more
            return "error", _last_line(outcome.stderr) or error
        return ("wrong" if result["is_wrong"] else "error"), error
    if isinstance(cases, CallCases) and not same_value(result["value"], cases.returns[place]):
        return "wrong", "the returned value differs"
    return "passed", ""


def _limits(timeout_s: float, left: _Time, output_bytes: int) -> Limits | None:
    """The limits of the next run; None if no time is left."""
    left_s = left.left_s
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
    status = outcome.status
    end: End = "error" if status == "ok" or status == "failed" else status
    return end, outcome.detail or _last_line(outcome.stderr)


def _last_line(text: str) -> str:
    return next(iter(reversed(text.strip().splitlines())), "")[:300]


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same words in each line; spaces and empty lines at the end do not count."""
    lines, wanted = _lines(printed), _lines(expected)
    if lines == wanted:
        return True
    if len(lines) != len(wanted):
        return False
    return all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(map(str.split, lines), map(str.split, wanted), strict=True)
    )


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a returned value equals the expected one, both as JSON values. Some data sets put it in a list of one."""
    if _equal(returned, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(returned, expected[0])


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n").split("\n")


def _same_word(word: str, other: str) -> bool:
    if word == other:
        return True
    # Two whole numbers are compared as text: a float has too few digits for them.
    if "." not in word + other and "e" not in (word + other).lower():
        return False
    try:
        return _close(float(word), float(other))
    except ValueError:
        return False


def _close(number: float, other: float) -> bool:
    try:
        return math.isclose(number, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, float) or isinstance(other, float):
        is_number = isinstance(value, int | float) and isinstance(other, int | float)
        return is_number and (value == other or _close(value, other))
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        # JSON has only text as keys.
        mine, theirs = ({str(key): entry for key, entry in each.items()} for each in (value, other))
        return mine.keys() == theirs.keys() and all(_equal(entry, theirs[key]) for key, entry in mine.items())
    return type(value) is type(other) and bool(value == other)
