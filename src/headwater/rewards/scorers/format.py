"""The form of a response, whatever it says: tags in order, or a regular expression."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from headwater.rewards.scorers import SCORERS


@SCORERS.register
def format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    tags: Sequence[str] = ("think", "answer"),
    pattern: str = "",
) -> float:
    """1.0 if the response consists of the tags, each once and in this order, with only spaces between and around them.

    ``pattern`` is a regular expression that the whole response must match instead; ``.`` matches line breaks, too.
    """
    if pattern:
        return float(_compiled(pattern).fullmatch(solution_str) is not None)
    return float(_consists_of(solution_str.strip(), tags))


def _consists_of(text: str, tags: Sequence[str]) -> bool:
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening):
            return False
        content, _, rest = text.removeprefix(opening).partition(closing)
        if not content.strip():
            return False
        text = rest.strip()
    return not text


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"reward.function_args.pattern = {pattern!r}: {error}") from error
