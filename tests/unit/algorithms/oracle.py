"""Reading oracle vectors and comparing with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "oracles"


def cases(family: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{family}.json").read_text())["public"]


def tensor(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def check(case: dict[str, Any], output: str, actual: torch.Tensor, where: torch.Tensor | None = None) -> None:
    expected = tensor(case["expected"][output])
    if where is not None:
        actual, expected = actual[where != 0], expected[where != 0]
    torch.testing.assert_close(actual.detach(), expected, rtol=1e-5, atol=case["atol"][output])
