"""Exact match of a digit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.rewards.exact_match import exact_match
from headwater.rewards.scorers import SCORERS


@SCORERS.register
def largest_digit(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1.0 when the response is the digit and nothing else, 0.0 otherwise."""
    return exact_match(solution_str, ground_truth)
