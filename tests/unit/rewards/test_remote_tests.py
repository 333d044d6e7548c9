"""Unit tests that a sandbox service runs, with a real service on this machine."""

from __future__ import annotations

import time

import pytest
from ending import end_judge
from tools.services import run_scripts

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import RewardFailed
from headwater.rewards.programs.cases import OutputCases
from headwater.rewards.programs.judge import Judge, Rules
from headwater.rewards.scorers.code import code
from headwater.rewards.verl_scores import default_compute_score
from headwater.sandbox import Outcome

DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
ORDER = {"inputs": [[[3, 1, 2]], [[1]]], "outputs": [[1, 2, 3], [1]], "fn_name": "order"}
ROOT = {
    "prompt": "def root(x: float) -> float:\n    '''The root of x.'''\n",
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert abs(candidate(2) ** 2 - 2) < 1e-6\n",
}


@pytest.fixture(scope="module")
def service():
    with run_scripts() as running:
        yield running
        end_judge()


@pytest.fixture
def run(service):
    def score(response, truth, **settings):
        given = {"test_timeout_s": 120.0, "time_limit_s": 600.0, **settings}  # the machine may be busy
        return code("apps", response, truth, {}, sandbox_fusion_url=service.url, **given)

    return score


def test_programs_that_print_functions_and_checks(run, service):
    assert run("print(int(input()) * 2)", DOUBLE)["score"] == 1.0
    assert service.requests[-1] | {"code": ""} == {
        "code": "", "stdin": "5\n", "language": "python", "run_timeout": 120.0, "memory_limit_MB": 512,
    }  # fmt: skip
    assert run("print(4)", DOUBLE, continuous=True)["score"] == 0.5
    assert run("def order(x):\n    return sorted(x)", ORDER)["score"] == 1.0
    assert run("class Solution:\n    def order(self, x):\n        return x", ORDER, continuous=True)["score"] == 0.5
    assert run("    return x ** 0.5\n", ROOT)["score"] == 1.0
    wrong = run("    return x\n", ROOT)
    assert (wrong["score"], wrong["verdict"]) == (0.0, "wrong")
    assert run("def f(x): return (x, x)", ["assert f(2) == (2, 2)"])["score"] == 1.0


def test_the_end_of_a_program_is_told(run):
    assert run("1 / 0", DOUBLE)["detail"] == "ZeroDivisionError: division by zero"
    slow = run("while True: pass", DOUBLE, test_timeout_s=0.5)
    assert (slow["verdict"], slow["timed_out"]) == ("timed_out", 1.0)
    assert run("def order(x):\n    while True: pass", ORDER, test_timeout_s=0.5)["verdict"] == "timed_out"
    assert run("def order(x): return 1 / 0", ORDER)["detail"] == "ZeroDivisionError: division by zero"
    assert run("import os\nos.kill(os.getpid(), 9)", DOUBLE)["verdict"] == "killed"
    assert "SyntaxError" in run("def order(x", ORDER)["detail"]


CHEATS = {
    "ends": "import os\nos._exit(0)",
    "exits in a call": "import sys\ndef order(x): sys.exit(0)",
    "equals everything": "class A:\n    def __eq__(self, other): return True\ndef order(x): return A()",
    "reads the script": "import os\n"
    "def order(x):\n"
    "    open(os.readlink(f'/proc/{os.getppid()}/cwd') + '/main.py')\n"
    "    return sorted(x)\n",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_cheats_has_failed(run, cheat):
    assert run(CHEATS[cheat], ORDER, continuous=True)["score"] == 0.0


def test_a_service_that_does_not_work_is_a_failure_of_the_reward(run, service):
    service.next = [{"status": "SandboxError", "message": "no worker"}]
    with pytest.raises(RewardFailed, match=r"/run_code: the sandbox failed: no worker"):
        run("print(4)", DOUBLE)
    service.next = [500, "not JSON"]
    with pytest.raises(RewardFailed, match="is not JSON"):
        run("print(4)", DOUBLE)
    service.next = [404]
    with pytest.raises(RewardFailed, match="status 404"):
        run("print(4)", DOUBLE)
    with pytest.raises(RewardFailed, match=r"sandbox_fusion_url: url = 'here': must begin with http"):
        code("apps", "print(4)", DOUBLE, {}, sandbox_fusion_url="here")


def test_the_queue_of_a_service_takes_no_time_from_the_program():
    class Queue:
        """A service that is asked by many: an answer takes long, and the program itself ``seconds``."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def run(self, code, stdin="", *, limits=None) -> Outcome:
            time.sleep(0.05)
            return Outcome("ok", stdin, "", 0, self.seconds)

        run_tests = run

        def close(self) -> None: ...

    cases = OutputCases(("1", "2", "3"), ("1", "2", "3"))
    for seconds, end, num_passed in ((0.001, "passed", 3), (0.015, "timed_out", 2)):
        report = Judge(SandboxConfig(), Queue(seconds)).judge("", cases, Rules(time_limit_s=0.02))
        assert (report.end, report.num_passed) == (end, num_passed)


def test_verls_function_passes_the_service_on(service):
    given = {"sandbox_fusion_url": service.url, "test_timeout_s": 120.0, "time_limit_s": 600.0}
    made = default_compute_score("apps", "print(int(input()) * 2)", DOUBLE, **given)
    assert made["score"] == 1.0
    assert service.requests[-1]["stdin"] == "5\n"
    assert default_compute_score("openai/gsm8k", "#### 4", "4", sandbox_fusion_url=service.url) == 1.0
