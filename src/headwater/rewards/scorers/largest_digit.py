"""Score of the ``largest_digit`` task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.scorers import SCORERS


@SCORERS.register(ScorerTraits(is_quick=True))
def largest_digit(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1.0 if the response is exactly the digit, 0.0 otherwise."""
    return float(solution_str.strip() == str(ground_truth))
