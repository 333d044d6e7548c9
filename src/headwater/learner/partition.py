"""Sharing work out evenly: Karmarkar–Karp differencing, then trades with the fullest and the emptiest part."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import NamedTuple

from headwater.core.errors import DataError

Part = tuple[float, list[int]]
"""The sum of a part and the numbers of its items."""

_MANY_ITEMS = 16
"""Above so many items in a part, single items offer enough choice; below, pairs are traded too."""
_FEW_PARTS = 8
"""How many parts the fullest and the emptiest try to trade with, which keeps hundreds of ranks fast."""


def workload(length: int, *, linear: float = 24576.0, quadratic: float = 1.0) -> float:
    """What a sequence costs: the linear layers grow with its length, attention with the square.

    The default ratio is that of a 7B model, where the two meet at about 25k tokens.
    """
    return linear * length + quadratic * length * length


def partition(workloads: Sequence[float], num_parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Item numbers of each part, the parts' sums as even as we can; with ``equal_sizes`` also the same item count.

    A run leaves ``equal_sizes`` off, since its ranks may hold different numbers of rows; it is there for
    ``partition_groups`` and for verl's vectors, which ask for both.

    >>> partition([8, 7, 6, 5, 4], 2)
    [[0, 1], [2, 3, 4]]
    """
    if len(workloads) < num_parts:
        raise DataError(f"{len(workloads)} items cannot fill {num_parts} parts; use fewer ranks or more samples")
    if equal_sizes and len(workloads) % num_parts:
        raise DataError(f"{len(workloads)} items cannot be split into {num_parts} parts of the same count")
    parts = _difference(workloads, num_parts, equal_sizes)
    _exchange(parts, workloads, equal_sizes)
    return sorted(sorted(items) for _, items in parts)


def partition_groups(lengths: Sequence[int], groups: Sequence[Hashable], num_parts: int) -> list[list[int]]:
    """Row numbers of each part: groups stay whole, parts get equally many of them and about the same workload.

    No run calls it: ``balance.py`` does not give ranks equally many groups, which evens the work out more. It is here
    for learners that need equally many, as verl's do, and is checked against verl's vectors.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    members = list(rows.values())
    workloads = [sum(workload(lengths[row]) for row in each) for each in members]
    parts = partition(workloads, num_parts, equal_sizes=True)
    return [sorted(row for group in part for row in members[group]) for part in parts]


def _difference(workloads: Sequence[float], num_parts: int, equal_sizes: bool) -> list[Part]:
    """Largest differencing: merge the two most uneven tentative splits, fullest part against emptiest, until one is
    left."""
    order = sorted(range(len(workloads)), key=lambda item: -workloads[item])
    # A split starts as one item, or, for equal counts, as one item in each part. Parts that are still empty are not
    # listed: few splits ever fill all parts, and going over empty ones would take time by items times parts.
    step = num_parts if equal_sizes else 1
    splits: list[list[Part]] = [
        [(workloads[item], [item]) for item in order[start : start + step]] for start in range(0, len(order), step)
    ]
    heap = [(_evenness(split, num_parts), number, split) for number, split in enumerate(splits)]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = _merge(one, other, num_parts)
        heapq.heappush(heap, (_evenness(merged, num_parts), number, merged))
    return heap[0][2]


def _evenness(split: list[Part], num_parts: int) -> float:
    lowest = split[-1][0] if len(split) == num_parts else 0.0
    return lowest - split[0][0]


def _merge(one: list[Part], other: list[Part], num_parts: int) -> list[Part]:
    """The two as one, fullest part first; only parts that no empty one is left for are put together."""
    shared = max(0, len(one) + len(other) - num_parts)
    alone, other_alone = len(one) - shared, len(other) - shared
    both = zip(one[alone:], reversed(other[other_alone:]), strict=True)
    merged = one[:alone] + [(a[0] + b[0], a[1] + b[1]) for a, b in both] + other[:other_alone][::-1]
    merged.sort(key=lambda part: -part[0])
    return merged


def _exchange(parts: list[Part], workloads: Sequence[float], equal_sizes: bool) -> None:
    """Exchange items of the fullest part, or of the emptiest, with another part while that evens the two out.

    Both new sums lie between the old ones, so the spread over all parts never grows.
    """
    for _ in range(len(workloads)):
        order = sorted(range(len(parts)), key=lambda part: parts[part][0])
        lowest, highest = order[:-1][:_FEW_PARTS], order[:0:-1][1:_FEW_PARTS]
        pairs = [(order[-1], low) for low in lowest] + [(high, order[0]) for high in highest]
        for high, low in pairs:
            trade = _best_trade(parts[high], parts[low], workloads, equal_sizes)
            if trade is not None:
                parts[high], parts[low] = (
                    _replace(parts[high], trade.given, trade.taken, workloads),
                    _replace(parts[low], trade.taken, trade.given, workloads),
                )
                break
        else:
            return


def _replace(part: Part, removed: tuple[int, ...], added: tuple[int, ...], workloads: Sequence[float]) -> Part:
    items = [item for item in part[1] if item not in removed] + list(added)
    return sum(workloads[item] for item in items), items


class _Trade(NamedTuple):
    given: tuple[int, ...]
    taken: tuple[int, ...]


def _best_trade(high: Part, low: Part, workloads: Sequence[float], equal_sizes: bool) -> _Trade | None:
    """The items to give and to take back that bring the two parts closest; None where none helps."""
    best: _Trade | None = None
    gap = high[0] - low[0]
    best_miss = gap / 2
    most = 2 if max(len(high[1]), len(low[1])) <= _MANY_ITEMS else 1
    for num_given in range(1, most + 1):
        for num_taken in [num_given] if equal_sizes else range(most + 1):
            if len(high[1]) - num_given + num_taken < 1:
                continue
            back = sorted((sum(workloads[item] for item in each), each) for each in combinations(low[1], num_taken))
            sizes = [size for size, _ in back]
            for given in combinations(high[1], num_given):
                wanted = sum(workloads[item] for item in given) - gap / 2
                position = bisect_left(sizes, wanted)
                for size, taken in back[max(position - 1, 0) : position + 1]:
                    if abs(size - wanted) < best_miss:
                        best, best_miss = _Trade(given, taken), abs(size - wanted)
    return best
