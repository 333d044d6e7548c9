"""The final number of a GSM8K solution."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from headwater.config.traits import ScorerTraits
from headwater.rewards.scorers import SCORERS

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = re.compile(r"####\s*(" + _NUMBER + ")")
_ANY = re.compile(_NUMBER)


@SCORERS.register(ScorerTraits(data_sources=("openai/gsm8k", "openai/grade-school-math"), is_quick=True))
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1.0 when the last number after ``####`` equals the answer; ``flexible`` uses the last number of the text.

    A wrong number gets ``format_score``, and a response without one 0.0.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"reward.function_args.method = {method!r}: use 'strict' or 'flexible'")
    right = _number(str(ground_truth))
    if right is None:
        raise ValueError(f"the row's ground truth {ground_truth!r} is not a number")
    found = (_MARKED if method == "strict" else _ANY).findall(solution_str)
    if not found:
        return 0.0
    return 1.0 if _number(found[-1]) == right else format_score


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
