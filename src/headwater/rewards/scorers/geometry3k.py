"""Geometry problems with a figure: the boxed answer, and whether the response thinks before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.config.traits import ScorerTraits
from headwater.rewards.answers import last_boxed
from headwater.rewards.scorers import SCORERS
from headwater.rewards.scorers.math import VERIFY_CPU_S, judged


@SCORERS.register(ScorerTraits(data_sources=("hiyouga/geometry3k", "geo3k", "hiyouga/geo3k")))
def geometry3k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    format_score: float = 0.1,
    verify_cpu_s: float = VERIFY_CPU_S,
) -> dict[str, Any]:
    r"""``format_score`` for ``<think>...</think>`` followed by ``\boxed{}``, and the rest for the right answer."""
    if not 0.0 <= format_score <= 1.0:
        raise ValueError(f"reward.function_args.format_score = {format_score!r}: must be between 0 and 1")
    result = judged(last_boxed(solution_str), ground_truth, verify_cpu_s)
    thoughts, closing, rest = solution_str.partition("</think>")
    thinks = bool(closing) and thoughts.lstrip().startswith("<think>")
    well_formed = float(thinks and last_boxed(rest) is not None)
    score = (1.0 - format_score) * result["acc"] + format_score * well_formed
    return {**result, "score": score, "well_formed": well_formed}
