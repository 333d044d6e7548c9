"""Packing sequences into micro-batches under a token budget: first-fit decreasing, evened out where that fits."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.errors import DataError
from headwater.learner.partition import partition

_MANY_BINS = 64
"""A rest costs one bin: among so many that is little, and evening them out takes longer than first fit."""


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    min_bins: int = 1,
    multiple_of: int = 1,
    group_size: int = 1,
) -> list[list[int]]:
    """Row numbers of each bin: few bins, none over ``max_tokens``.

    There are at least ``min_bins`` and a multiple of ``multiple_of``, so that all ranks can have equally many.
    ``group_size`` consecutive rows always share a bin. A run sets only ``min_bins``: its ranks agree on that, and rows
    that share a prompt come as one item. The other two are what AReaL's and verl's packing take, and their test vectors
    ask for them.

    >>> pack([6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    sizes = _group_sizes(lengths, max_tokens, group_size)
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        for number, left in enumerate(room):
            if sizes[item] <= left:
                bins[number].append(item)
                room[number] -= sizes[item]
                break
        else:
            bins.append([item])
            room.append(max_tokens - sizes[item])
    return _rows(_split_bins(bins, sizes, _target(len(bins), min_bins, multiple_of)), group_size)


def pack_evenly(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    min_bins: int = 1,
    multiple_of: int = 1,
    group_size: int = 1,
) -> list[list[int]]:
    """As ``pack``, with bins of about the same number of tokens: no pass is spent on a small rest.

    Where the even ones would not fit, or there are so many that one rest among them does not matter, it is ``pack``.
    """
    first_fit = pack(lengths, max_tokens, min_bins=min_bins, multiple_of=multiple_of, group_size=group_size)
    sizes = _group_sizes(lengths, max_tokens, group_size)
    fewest = _target(-(-sum(sizes) // max_tokens), min_bins, multiple_of)
    for num_bins in dict.fromkeys((fewest, len(first_fit))):
        if num_bins <= _MANY_BINS:
            bins = partition(sizes, num_bins)
            if all(sum(sizes[item] for item in each) <= max_tokens for each in bins):
                return _rows(bins, group_size)
    return first_fit


def _group_sizes(lengths: Sequence[int], max_tokens: int, group_size: int) -> list[int]:
    if len(lengths) % group_size:
        raise DataError(f"{len(lengths)} rows are no whole number of groups of {group_size}")
    sizes = [sum(lengths[start : start + group_size]) for start in range(0, len(lengths), group_size)]
    for item, size in enumerate(sizes):
        if size > max_tokens:
            what = f"row {item}" if group_size == 1 else f"rows {item * group_size}-{(item + 1) * group_size - 1}"
            raise DataError(
                f"{what} of the batch: {size} tokens, over learner.max_tokens_per_microbatch = {max_tokens}; "
                f"raise it to {size}"
            )
    return sizes


def _target(num_bins: int, min_bins: int, multiple_of: int) -> int:
    return -(-max(num_bins, min_bins) // multiple_of) * multiple_of


def _check_enough(num_items: int, num_bins: int) -> None:
    if num_items < num_bins:
        raise DataError(f"{num_items} sequences cannot fill {num_bins} micro-batches; use more samples or fewer ranks")


def _split_bins(bins: list[list[int]], sizes: list[int], num_bins: int) -> list[list[int]]:
    """Halve the fullest bins until there are ``num_bins``."""
    _check_enough(len(sizes), num_bins)
    while len(bins) < num_bins:
        fullest = max((each for each in bins if len(each) > 1), key=lambda each: sum(sizes[item] for item in each))
        bins.remove(fullest)
        halves = partition([sizes[item] for item in fullest], 2)
        bins.extend([fullest[position] for position in half] for half in halves)
    return bins


def _rows(bins: list[list[int]], group_size: int) -> list[list[int]]:
    return [sorted(row for item in each for row in range(item * group_size, (item + 1) * group_size)) for each in bins]
