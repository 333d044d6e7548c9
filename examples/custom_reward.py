"""A custom reward: a function in a file, named in the config.

    headwater train quickstart reward.function=examples/custom_reward.py:compute_score

It may be `async`, may take settings (reward.function_args), and returns a number or a dict with `score`. If it raises
or takes too long, the run stops with the cause, or the row is dropped and counted (rollout.on_failure). A failure
never becomes a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    close_score: float = 0.2,
    tolerance: int = 3,
) -> dict[str, float]:
    """1.0 for the right number, `close_score` for one within `tolerance`, 0.0 otherwise."""
    try:
        error = abs(int(solution_str) - int(ground_truth))
    except ValueError:  # not a number: a wrong answer, not a failed reward
        return {"score": 0.0, "is_number": 0.0}
    if error == 0:
        return {"score": 1.0, "is_number": 1.0}
    return {"score": close_score if error <= tolerance else 0.0, "is_number": 1.0}
