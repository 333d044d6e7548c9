"""Score of the ``arithmetic`` task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.scorers import SCORERS
from headwater.rewards.scorers.exact_match import exact_match


@SCORERS.register(ScorerTraits(is_quick=True))
def arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1.0 if the response is exactly the number, 0.0 otherwise."""
    return exact_match(data_source, solution_str, ground_truth, extra_info)
