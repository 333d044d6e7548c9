"""Reading oracle vectors and comparing with them.

A family is a function from a case's ``args`` and ``inputs`` to outputs, registered under the name of its file:

    @family("verl_gae")
    def gae(args, inputs): return {"advantages": ..., "returns": ...}

It must give every output the file expects. A property family checks the answer itself and returns nothing. ``where``
names an expected mask: a run gives only trained tokens, and the file also has what AReaL leaves at the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "oracles"

FAMILIES: dict[str, Callable[[dict, dict], Mapping[str, Any]]] = {}
WHERE: dict[str, str] = {}
PROPERTIES: dict[str, Callable[[dict, dict, dict], None]] = {}


def family(name: str, where: str = ""):
    def register(function):
        assert name not in FAMILIES
        FAMILIES[name] = function
        WHERE[name] = where
        return function

    return register


def property_family(name: str):
    def register(function):
        assert name not in PROPERTIES
        PROPERTIES[name] = function
        return function

    return register


@cache
def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def run(name: str, case: dict[str, Any]) -> None:
    """Run one case and compare all that is expected of it."""
    if name in PROPERTIES:
        PROPERTIES[name](case["args"], case["inputs"], case["expected"])
        return
    actual = FAMILIES[name](case["args"], case["inputs"])
    assert set(actual) == set(case["expected"]), "an expected output was not compared"
    where = read(name).get("compare_where") or {}
    for output, expected in case["expected"].items():
        kept = tensor(case["inputs"][where[output]]) != 0 if output in where else None
        if WHERE[name] and output != WHERE[name]:
            kept = tensor(case["expected"][WHERE[name]]) != 0
        _compare(output, actual[output], expected, kept, case)


def _compare(output: str, actual: Any, expected: Any, kept: torch.Tensor | None, case: dict[str, Any]) -> None:
    if isinstance(expected, dict):
        assert set(actual) == set(expected), output
        for key, value in expected.items():
            _compare(f"{output}.{key}", actual[key], value, None, case)
        return
    if case["exact"]:
        assert_equal(torch.as_tensor(actual).tolist(), expected, output)
        return
    # Strings such as "inf" are floats too.
    expected = tensor(_floats(expected))
    actual = torch.as_tensor(actual).detach().float()
    if kept is not None:
        actual, expected = actual[kept], expected[kept]
    atol = case["atol"].get(output.split(".")[0], 0.0)
    torch.testing.assert_close(
        actual, expected, rtol=1e-5, atol=atol, equal_nan=True, msg=lambda text: f"{output}: {text}"
    )


def assert_equal(actual: Any, expected: Any, output: str) -> None:
    """Exactly equal, where NaN equals NaN: ``nan == nan`` is false, but it is the same answer."""
    if isinstance(expected, list):
        assert isinstance(actual, list), output
        assert len(actual) == len(expected), output
        for ours, theirs in zip(actual, expected, strict=True):
            assert_equal(ours, theirs, output)
        return
    # Strings such as "nan" are floats too.
    expected = float(expected) if isinstance(expected, str) else expected
    assert actual == expected or (actual != actual and expected != expected), output


def _floats(value: Any) -> Any:
    return [_floats(each) for each in value] if isinstance(value, list) else float(value)
