"""HumanEval: every canonical solution passes, and none passes after its results are changed."""

from __future__ import annotations

import ast
import gzip
import json
import random
from pathlib import Path

import pytest
from ending import end_judge
from sandbox_here import skip_without_sandbox

from headwater.rewards.scorers.code import code

FILE = Path(__file__).parents[2] / "data" / "HumanEval.jsonl.gz"
PATIENT = {"test_timeout_s": 120.0, "time_limit_s": 600.0}
"""The machine may be busy."""
CHANGE = """

def _changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, None]
    if isinstance(value, tuple):
        return (*value, None)
    if isinstance(value, dict):
        return {**value, "x": None}
    return 0 if value is None else None
"""


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    skip_without_sandbox()
    yield
    end_judge()


@pytest.fixture(scope="module")
def rows():
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class _ChangesReturns(ast.NodeTransformer):
    """Changes what a function returns, but not its inner functions."""

    def visit_Return(self, node):
        value = node.value or ast.Constant(None)
        return ast.Return(ast.Call(ast.Name("_changed", ast.Load()), [value], []))

    def visit_FunctionDef(self, node):
        return node

    visit_Lambda = visit_FunctionDef


def mutated(row) -> str:
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name == row["entry_point"]:
            function.body = [_ChangesReturns().visit(statement) for statement in function.body]
    return ast.unparse(ast.fix_missing_locations(tree)) + CHANGE


def fails_without_sandbox(row, source: str) -> bool:
    """Whether a program fails its tests in this process. Canonical solutions are harmless."""
    names: dict[str, object] = {}
    exec(row["prompt"], names)
    exec(source, names)
    exec(row["test"], names)
    random.seed(0)
    try:
        names["check"](names[row["entry_point"]])  # type: ignore[operator]
    except Exception:  # noqa: BLE001  a wrong value may also end in a TypeError of the test
        return True
    return False


def check(rows) -> tuple[int, int]:
    """How many canonical and how many mutated solutions score."""
    right = wrong = 0
    for row in rows:
        truth = {key: row[key] for key in ("prompt", "test", "entry_point")}
        right += code("openai_humaneval", row["canonical_solution"], truth, {}, **PATIENT)["score"] == 1.0
        source = mutated(row)
        assert fails_without_sandbox(row, source), row["task_id"]
        wrong += code("openai_humaneval", f"```python\n{source}\n```", truth, {})["score"] != 0.0
    return right, wrong


def test_some_problems(rows):
    some = [
        rows[number] for number in (0, 7, 16, 25, 32, 38, 44, 50, 53, 61, 70, 83, 92, 105, 113, 124, 137, 148, 155, 163)
    ]
    assert check(some) == (len(some), 0)


@pytest.mark.slow
def test_all_problems(rows):
    assert check(rows) == (164, 0)
