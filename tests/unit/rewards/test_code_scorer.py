"""Programs judged by unit tests: the layouts of data sets, and how programs end."""

from __future__ import annotations

import json

import pytest
from ending import end_judge
from sandbox_here import skip_without_sandbox

from headwater.config.rollout_schema import SandboxConfig
from headwater.core.errors import RewardFailed
from headwater.rewards.programs.cases import CallCases, CheckCases, OutputCases, read_cases
from headwater.rewards.programs.judge import same_output, same_value
from headwater.rewards.scorers.code import code, find_program


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    skip_without_sandbox()
    yield
    end_judge()


def run(response, truth, **settings):
    given = {"test_timeout_s": 120.0, "time_limit_s": 600.0, **settings}  # the machine may be busy
    return code("apps", response, truth, {}, **given)


DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
HUMANEVAL = {
    "prompt": "import math\n\n\ndef root(x: float) -> float:\n    '''The root of x.'''\n",
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert math.isclose(candidate(2) ** 2, 2)\n",
}


def test_programs_that_read_and_print():
    assert run("print(int(input()) * 2)", DOUBLE)["score"] == 1.0
    assert run("print(int(input()) * 2)", json.dumps(DOUBLE))["score"] == 1.0
    assert run("print(4)", DOUBLE) == {
        "score": 0.0, "acc": 0.0, "passed_share": 0.5, "timed_out": 0.0, "verdict": "wrong",
        "detail": "the output differs",
    }  # fmt: skip
    assert run("print(4)", DOUBLE, continuous=True)["score"] == 0.5
    assert run("print(4)", DOUBLE, max_tests=1)["score"] == 1.0
    guarded = "def main():\n    print(2 * int(input()))\n\nif __name__ == '__main__':\n    main()\n"
    assert run(f"Here it is:\n```python\n{guarded}```\nDone.", DOUBLE)["score"] == 1.0


def test_functions():
    truth = {"inputs": [[[3, 1, 2]], "[1]"], "outputs": [[1, 2, 3], [[1]]], "fn_name": "order"}
    assert run("def order(x):\n    return sorted(x)", truth)["score"] == 1.0
    assert run("class Solution:\n    def order(self, x):\n        return tuple(sorted(x))", truth)["score"] == 1.0
    assert run("def order(x):\n    print('noise')\n    return x", truth, continuous=True)["score"] == 0.5
    assert run("def other(x):\n    return x", truth)["detail"] == "NameError: name 'order' is not defined"
    assert run("def order(x):\n    return 1 / 0", truth)["detail"] == "ZeroDivisionError: division by zero"
    livecodebench = [
        {"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional", "metadata": {"func_name": "add"}}
    ]
    assert run("def add(x, y):\n    return x + [y]", livecodebench)["score"] == 1.0


def test_asserts_of_mbpp():
    truth = {"test_list": ["assert f(2) == (2, 2)", "assert math.isclose(g, 0.5)"], "test_setup_code": "import math"}
    assert run("def f(x):\n    return (x, x)\ng = 1 / 2", truth)["score"] == 1.0
    assert run("def f(x):\n    return [x, x]\ng = 1 / 2", truth, continuous=True)["score"] == 0.5
    pairs = ["assert longest([Pair(5, 24), Pair(15, 25)]) == 19", "assert Pair(1, 2).sum() == 3"]
    program = """
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def sum(self):
        return self.a + self.b

def longest(pairs):
    return max(pair.b - pair.a for pair in pairs)
"""
    assert run(program, pairs)["score"] == 1.0
    in_place = ["x = [3, 1]\nsort(x)\nassert x == [1, 3]", "assert list(count(3)) == [0, 1, 2]"]
    program = """
def sort(x):
    x.sort()

def count(n):
    yield from range(n)
"""
    assert run(program, in_place, continuous=True)["score"] == 1.0
    assert run("def f(x):\n    raise KeyError(x)", ["try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert 0"])[
        "acc"
    ]


def test_humaneval_takes_whole_functions_and_completions():
    whole = "```python\ndef root(x):\n    return math.sqrt(x)\n```"
    assert run(whole, HUMANEVAL)["score"] == 1.0
    assert run("    return math.sqrt(x)\n", HUMANEVAL)["score"] == 1.0
    assert run("```python\n    return math.sqrt(x)\n```", HUMANEVAL)["score"] == 1.0
    assert run("    return x / 2\n", HUMANEVAL)["verdict"] == "wrong"
    leetcode = {"prompt": "from typing import *", "entry_point": "Solution().twice",
                "test": "def check(candidate):\n    assert candidate(x=2) == 4\n"}  # fmt: skip
    assert run("class Solution:\n    def twice(self, x: int) -> int:\n        return 2 * x", leetcode)["score"] == 1.0


def test_a_program_has_only_what_it_imports():
    for name in ("random", "sys", "ast", "json", "zlib", "pack", "Checks", "Any"):
        result = run(f"def f(x):\n    return {name} and 1", ["assert f(1) == 1"])
        assert result["detail"] == f"NameError: name {name!r} is not defined", name


def test_classes_of_the_prompt_are_shared():
    truth = {
        "prompt": "class ListNode:\n    def __init__(self, val=0, next=None):\n"
        "        self.val, self.next = val, next\n\n\n"
        "def made(values):\n    return ListNode(values[0], made(values[1:])) if values else None\n\n\n"
        "def listed(node):\n    return [node.val, *listed(node.next)] if node else []\n",
        "test": "def check(candidate):\n    assert listed(candidate(made([1, 2, 3]))) == [3, 2, 1]\n"
        "    assert candidate(head=None) is None\n    kept = made([4])\n    assert candidate(kept).val == 4\n",
        "entry_point": "Solution().reverse",
    }
    program = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

    def __eq__(self, other):
        return True

class Solution:
    def reverse(self, head):
        before = None
        while head is not None:
            head.next, before, head = before, head, head.next
        return before
"""
    assert run(program, truth)["score"] == 1.0
    assert run(program.partition("class Solution")[1] + program.partition("class Solution")[2], truth)["score"] == 1.0
    assert run(program.replace("return before", "return head"), truth)["score"] == 0.0
    assert run(program.replace("return before", "return Solution()"), truth)["score"] == 0.0


def test_how_programs_end():
    asserts, short = ["assert f(1) == 1"], {"test_timeout_s": 1.0}
    for program, verdict, detail in [
        ("while True:\n    pass", "timed_out", "1 s"),
        ("raise ValueError('no')", "error", "ValueError: no"),
        ("import os\nos._exit(3)", "error", ""),
        ("def f(x) return x", "error", "SyntaxError"),
        ("", "wrong", "the output differs"),
    ]:
        result = run(program, DOUBLE, **(short if verdict == "timed_out" else {}))
        assert (result["score"], result["verdict"]) == (0.0, verdict), (program, result)
        assert detail in result["detail"]
    memory = "x = []\nwhile True:\n    x.append(bytearray(10**8))"
    assert run(memory, DOUBLE)["verdict"] == "out_of_memory"
    assert run("while True:\n    print('x' * 10000)", DOUBLE)["verdict"] == "too_much_output"
    for program, verdict, detail in [
        ("def f(x):\n    while True:\n        pass", "timed_out", ""),
        ("def f(x):\n    return f(x)", "error", "RecursionError"),
        ("import sys\nsys.exit(0)", "error", "NameError"),
        ("def f(x) return x", "error", "SyntaxError"),
        ("", "error", "NameError"),
    ]:
        result = run(program, asserts, **(short if verdict == "timed_out" else {}))
        assert (result["score"], result["verdict"]) == (0.0, verdict), (program, result)
        assert detail in result["detail"]
    slow = "import time\ntime.sleep(0.4)\nprint(int(input()) * 2)"
    many = {"inputs": ["2"] * 50, "outputs": ["4"] * 50}
    result = run(slow, many, time_limit_s=1.0)
    assert (result["score"], result["timed_out"]) == (0.0, 1.0)


def test_a_sandbox_that_does_not_work_is_a_failed_reward(monkeypatch, tmp_path):
    end_judge()
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(RewardFailed, match="unit tests cannot run"):
            run("print(4)", DOUBLE, sandbox=SandboxConfig(isolation="bubblewrap"))
    finally:
        end_judge()


def test_a_program_cannot_make_the_reward_fail():
    for returned in ("10 ** 5000", "10 ** 400", "float('nan')", "lambda: 0", "object()", "'\\ud800'", "{object(): 1}"):
        for truth in (["assert f(1) == 1.5"], {"inputs": [[1]], "outputs": [1.5], "fn_name": "f"}):
            assert run(f"def f(x):\n    return {returned}", truth)["score"] == 0.0, returned
    deep = "def f(x):\n    y = []\n    for _ in range(%d):\n        y = [y]\n    return y"
    for depth in (200, 500, 900, 5000):
        assert run(deep % depth, {"inputs": [[1]], "outputs": [1.5], "fn_name": "f"})["score"] == 0.0
    refused = "def f(x):\n    raise TypeError('function: only plain values and objects can be passed to it')"
    assert run(refused, ["assert f(1) == 1"])["verdict"] == "error"
    assert run("print('\\ud800')", DOUBLE)["score"] == 0.0
    assert run("print('9' * 5000 + '.5')", {"inputs": [""], "outputs": ["1.5"]})["score"] == 0.0
    assert run("\ud800 \x00", DOUBLE)["verdict"] == "error"
    assert run("\ud800 \x00", ["assert f(1) == 1"])["verdict"] == "error"


def test_tests_that_are_not_understood_are_named():
    for truth, message in [
        (None, "no unit tests"),
        ("", "no unit tests"),
        ([], "no unit tests"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ({"inputs": [], "outputs": []}, "no unit tests"),
        ([1, 2], "unknown things"),
        (5, "is a int"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_cases(truth, {})
    with pytest.raises(RewardFailed, match="cannot be sent"):
        run("def f(x):\n    return 1", ["class A:\n    pass\n\nassert f(A()) == 1"])


def test_layouts():
    assert read_cases({"input_output": json.dumps(DOUBLE)}, {}) == OutputCases(("2\n", "5\n"), ("4\n", "10"))
    assert read_cases({"inputs": [["1", "2"]], "outputs": [["3"]]}, {}) == OutputCases(("1\n2",), ("3",))
    assert read_cases([{"input": "1", "output": "2"}], {}) == OutputCases(("1",), ("2",))
    assert read_cases({"inputs": ["[1]\n2"], "outputs": [3], "fn_name": "f"}, {}) == CallCases("f", (([1], 2),), (3,))
    assert read_cases("assert f() == 1", {}) == CheckCases(("assert f() == 1",))
    assert read_cases("def check(candidate):\n    pass", {"entry_point": "f"}).entry == "f"


def test_finding_the_program():
    for text, program in [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```\nrun:\n```bash\nls\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
        ("    return 1", "    return 1"),
        ("1. so\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
    ]:
        assert find_program(text) == program, text


def test_comparing_output():
    for printed, expected, same in [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\r\n2", "1\n2", True),
        ("0.3333333", "0.333333333333", True),
        ("2.0", "2", True),
        ("1e3", "1000.0", True),
        ("0.33", "0.34", False),
        ("1 2", "12", False),
        ("12\n", "1\n2", False),
        ("", "0", False),
        ("yes", "YES", False),
        ("10000000000000000000001", "10000000000000000000002", False),
        ("nan", "nan", True),
        ("inf", "1.0", False),
    ]:
        assert same_output(printed, expected) == same, (printed, expected)
    for value, expected, same in [
        ([1, 2], [1, 2], True),
        (5, [5], True),
        ([5], [5], True),
        (0.1 + 0.2, 0.3, True),
        (True, 1, False),
        (1, True, False),
        ({"1": 2}, {1: 2}, True),
        ("a", ["b"], False),
        (None, [None], True),
        ([1, 2], [2, 1], False),
        ("1", 1, False),
    ]:
        assert same_value(value, expected) == same, (value, expected)
