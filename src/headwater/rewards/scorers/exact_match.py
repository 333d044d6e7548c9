"""Exact match with the ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.scorers import SCORERS


@SCORERS.register(ScorerTraits(data_sources=("shapes",), is_quick=True))
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1.0 if the response, without surrounding spaces, equals the ground truth, else 0.0.

    A row without ground truth cannot be scored and raises.
    """
    if ground_truth is None:
        raise ValueError("the row has no ground truth; give it a ground_truth or reward_model.ground_truth")
    return float(solution_str.strip() == str(ground_truth))
