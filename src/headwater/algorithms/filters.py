"""Which groups have something to teach (DAPO's dynamic sampling)."""

from __future__ import annotations

from torch import Tensor

from headwater.algorithms.groups import Groups


def informative(scores: Tensor, groups: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """``[samples]``: whether the scores of the own group differ by more than ``tolerance``.

    Where they do not, a group-relative advantage is 0 for all. A sample that is alone in its group is kept.
    """
    grouping = Groups.of(groups)
    return grouping.single | (grouping.max(scores) - grouping.min(scores) > tolerance)
