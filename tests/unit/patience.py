"""Time limits that are long enough for this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def long_enough(check: Callable[[float], T], *limits_s: float) -> T:
    """Call ``check`` with the first limit, and with the next longer one if it fails.

    For a limit that must end one thing and not another one. On a busy machine a short limit may end both, and a long
    one would make every run of the test slow. What is wrong with every limit is an error.
    """
    *shorter, longest = limits_s
    for limit_s in shorter:
        try:
            return check(limit_s)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  the longest limit tells
            continue
    return check(longest)
