"""Programs, judged by unit tests in the sandbox: APPS, TACO, CodeContests, Codeforces, MBPP, HumanEval, LeetCode."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headwater.config.rollout_schema import SandboxConfig
from headwater.config.traits import ScorerTraits
from headwater.rewards.programs.cases import CallCases, Cases, CheckCases, OutputCases, read_cases
from headwater.rewards.programs.judge import Judge, JudgingPlace, Rules
from headwater.rewards.scorers import SCORERS

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy", "pypy3"})


@SCORERS.register(
    ScorerTraits(
        data_sources=("codecontests", "apps", "codeforces", "taco", "taco-verified", "deepmind/code_contests",
                      "humaneval*", "openai_humaneval", "mbpp*", "leetcode*", "livecodebench*", "lcbv5", "kodcode*",
                      "primeintellect"),
    )
)  # fmt: skip
def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    continuous: bool = False,
    max_tests: int = 0,
    test_timeout_s: float = 10.0,
    time_limit_s: float = 40.0,
    sandbox_fusion_url: str = "",
    sandbox: SandboxConfig | None = None,
) -> dict[str, Any]:
    """1.0 if the program passes all unit tests of the row; ``continuous`` gives the share of tests that it passes.

    ``max_tests`` limits the tests of a row; 0 runs all. ``time_limit_s`` must be less than ``reward.timeout_s``: a slow
    program is a wrong one, but a scoring function that takes too long has failed. ``sandbox_fusion_url`` is a service
    with Sandbox Fusion's protocol that runs the tests, instead of the sandbox of this machine.
    """
    cases = _first(read_cases(ground_truth, extra_info), max_tests)
    rules = Rules(stops_early=not continuous, test_timeout_s=test_timeout_s, time_limit_s=time_limit_s)
    program = find_program(solution_str)
    report = _judge(sandbox or SandboxConfig(), sandbox_fusion_url, time_limit_s).judge(program, cases, rules)
    passed_all = float(report.num_passed == report.num_tests)
    return {
        "score": report.share if continuous else passed_all,
        "acc": passed_all,
        "passed_share": report.share,
        "timed_out": float(report.end == "timed_out"),
        "verdict": report.end,
        "detail": report.detail,
    }


_judges: dict[tuple[int, SandboxConfig, str, float], Judge] = {}
"""The judges by process and settings. A forked process makes its own. Their sandboxes end when the process does."""
_judges_lock = threading.Lock()


def _judge(config: SandboxConfig, url: str, time_limit_s: float) -> Judge:
    key = os.getpid(), config, url, time_limit_s if url else 0.0
    with _judges_lock:
        if key not in _judges:
            _judges[key] = Judge(
                replace(config, max_concurrent=1),  # programs run one at a time
                _service(config, url, time_limit_s) if url else None,
            )
        return _judges[key]


def _service(config: SandboxConfig, url: str, time_limit_s: float) -> JudgingPlace:
    from headwater.rewards.programs.fusion import FusionSandbox  # its HTTP client takes long to import

    return FusionSandbox(url, config, longest_s=time_limit_s)


def _first(cases: Cases, count: int) -> Cases:
    """The first tests of a row."""
    if not count:
        return cases
    match cases:
        case OutputCases():
            return OutputCases(cases.inputs[:count], cases.outputs[:count])
        case CallCases():
            return replace(cases, arguments=cases.arguments[:count], returns=cases.returns[:count])
        case CheckCases():
            return replace(cases, tests=cases.tests[:count])


def find_program(response: str) -> str:
    """The last block of Python code in a response; without one, its last block of any kind, or all of it.

    Thoughts before ``</think>`` do not count. A block that is not closed reaches to the end of the response.
    """
    answer = response.rpartition("</think>")[2]
    blocks = _blocks(answer)
    python = [content for language, content in blocks if language.lower() in _PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else answer


def _blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks with their languages."""
    found: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        else:
            found.append((opened[1], text[opened.end() + 1 : fence.start()]))
            # A fence with a language opens a block, also if the one before was not closed.
            opened = fence if fence[1] else None
    if opened is not None:
        found.append((opened[1], text[opened.end() + 1 :]))
    return found
