"""Comparing a response with the one right answer."""

from __future__ import annotations

from typing import Any


def exact_match(response_text: str, ground_truth: Any) -> float:
    """1.0 when the response is the answer and nothing else. A row without an answer cannot be scored at all."""
    if ground_truth is None:
        raise ValueError("the row has no ground truth; give it a ground_truth or reward_model.ground_truth")
    return float(response_text.strip() == str(ground_truth))
