"""The unit tests of a row, in the layouts of the usual data sets.

| data set | ground truth |
|---|---|
| APPS, TACO, CodeContests, Codeforces (verl, PRIME) | `{"inputs": [...], "outputs": [...]}`, as text or an object |
| the same, function style | in addition `"fn_name": "f"`; an input is a list of arguments, or one JSON value per line |
| LiveCodeBench, DeepCoder | `[{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...]` |
| MBPP | `["assert f(1) == 2", ...]`, or the row with `test_list` and `test_setup_code` |
| HumanEval, LeetCodeDataset | `{"prompt": ..., "test": ..., "entry_point": ...}`; the test defines `check(candidate)` |
| any other | Python code that raises if the program is wrong |

What the ground truth lacks is read from ``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OutputCases:
    """A program reads standard input and prints."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class CallCases:
    """A function is called, and what it returns is compared."""

    entry: str
    arguments: tuple[tuple[Any, ...], ...]
    returns: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.arguments)


@dataclass(frozen=True)
class CheckCases:
    """Python code that raises if the program is wrong."""

    tests: tuple[str, ...]
    setup: str = ""
    """Code before the first test."""
    entry: str = ""
    """The function that the tests call ``candidate``."""
    prompt: str = ""
    """Code that the response completes, such as the head of a function."""

    def __len__(self) -> int:
        return len(self.tests)


Cases = OutputCases | CallCases | CheckCases

_SHAPES = "inputs and outputs, test_list, test and entry_point, or a list of asserts"


def read_cases(ground_truth: Any, extra_info: Mapping[str, Any]) -> Cases:
    """The tests of a row. ValueError if there are none, or if they have no known layout."""
    given = _parsed(ground_truth)
    if isinstance(given, str):
        given = {"test": given} if given.strip() else {}
    if isinstance(given, Sequence) and not isinstance(given, str):
        given = _of_list(given)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise ValueError(f"the ground truth is a {type(given).__name__}; give the unit tests as {_SHAPES}")
    fields = {**extra_info, **given}
    if "input_output" in fields:
        fields |= _parsed(fields["input_output"])
    cases = _read(fields)
    if not len(cases):
        raise ValueError("the ground truth has no unit tests")
    return cases


def _read(fields: Mapping[str, Any]) -> Cases:
    if "inputs" in fields and "outputs" in fields:
        return _of_inputs(fields)
    asserts = fields.get("test_list", fields.get("assert_case"))
    if asserts is not None:
        setup = "\n".join([*_texts(fields.get("test_imports")), *_texts(fields.get("test_setup_code"))])
        entry = str(fields.get("entry_point") or fields.get("fn_name") or "")
        return CheckCases(tuple(_texts(asserts)), setup=setup, entry=entry)
    test = fields.get("test", fields.get("functional"))
    if isinstance(test, str) and test.strip():
        entry = str(fields.get("entry_point") or "")
        prompt = fields.get("prompt")
        # HumanEval's tests only define check(); a row without an entry point has tests that run by themselves.
        run = f"{test}\n\ncheck(candidate)" if entry and "def check(" in test else test
        return CheckCases((run,), entry=entry, prompt=prompt if entry and isinstance(prompt, str) else "")
    raise ValueError(f"the ground truth has no unit tests that are understood; give {_SHAPES}")


def _of_inputs(fields: Mapping[str, Any]) -> Cases:
    inputs, outputs = _parsed(fields["inputs"]), _parsed(fields["outputs"])
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("the ground truth needs as many inputs as outputs, both as lists")
    entry = fields.get("fn_name")
    if entry:
        return CallCases(str(entry), tuple(map(_arguments, inputs)), tuple(map(_parsed, outputs)))
    return OutputCases(tuple(map(_joined, inputs)), tuple(map(_joined, outputs)))


def _of_list(given: Sequence[Any]) -> dict[str, Any]:
    """Fields from a list of tests: asserts as text, or objects with input and output."""
    if all(isinstance(each, str) for each in given):
        return {"test_list": given}
    if not all(isinstance(each, Mapping) and "input" in each and "output" in each for each in given):
        raise ValueError(f"the ground truth is a list of unknown things; give the unit tests as {_SHAPES}")
    fields: dict[str, Any] = {
        "inputs": [each["input"] for each in given],
        "outputs": [each["output"] for each in given],
    }
    if given and given[0].get("testtype") == "functional":
        metadata = _parsed(given[0].get("metadata")) or {}
        name = given[0].get("fn_name") or metadata.get("func_name")
        if name:
            fields["fn_name"] = name
    return fields


def _arguments(given: Any) -> tuple[Any, ...]:
    """The arguments of a call: a list, or text with one JSON value per line."""
    if isinstance(given, str):
        lines = [line for line in given.splitlines() if line.strip()]
        return tuple(map(_parsed, lines))
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _joined(given: Any) -> str:
    """Input or output as text; some data sets have a list of lines."""
    if isinstance(given, str):
        return given
    return "\n".join(map(str, given)) if isinstance(given, Sequence) else str(given)


def _texts(given: Any) -> list[str]:
    given = _parsed(given)
    if isinstance(given, str):
        return [given] if given.strip() else []
    return [str(each) for each in given or ()]


def _parsed(given: Any) -> Any:
    """The value of a JSON text; anything else as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given
