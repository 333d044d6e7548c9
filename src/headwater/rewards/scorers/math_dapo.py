"""AIME and DAPO's training data: the answer after the last ``Answer:``, or in the last box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.answers import last_boxed, last_of_either
from headwater.rewards.scorers import SCORERS
from headwater.rewards.scorers.math import VERIFY_CPU_S, judged


@SCORERS.register(
    ScorerTraits(
        data_sources=(
            "aime*",
            "math_dapo*",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            "BytedTsinghua-SIA/AIME-2024",
            "HuggingFaceH4/aime_2024",
            "Maxwell-Jia/AIME_2024",
            "amc*",
        )
    )
)
def math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    strict_box_verify: bool = False,
    wrong_score: float = -1.0,
    verify_cpu_s: float = VERIFY_CPU_S,
) -> dict[str, Any]:
    r"""1.0 for the right answer and ``wrong_score`` otherwise; ``strict_box_verify`` accepts only ``\boxed{}``."""
    answer = last_boxed(solution_str) if strict_box_verify else last_of_either(solution_str)
    result = judged(answer, ground_truth, verify_cpu_s)
    return {**result, "score": 1.0 if result["acc"] else wrong_score}
