"""Splitting work: rows over ranks, and sequences into micro-batches.

Ranks compute their layers together, so they wait for the slowest one at every pass. A batch is therefore split by cost,
mini-batch by mini-batch (``balanced_parts``). The partition itself is Karmarkar-Karp differencing followed by exchanges
with the fullest and the emptiest part; micro-batches under a token budget start from first-fit decreasing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError

Part = tuple[float, list[int]]
"""The total cost of a part and the indices of its items."""

_MANY_ITEMS = 16
"""Parts with more items than this exchange single items only; smaller parts also exchange pairs."""
_FEW_PARTS = 8
"""The number of parts that the fullest and the emptiest try to exchange with. It keeps hundreds of ranks fast."""
_MANY_BINS = 64
"""Above this number of micro-batches, a small last one costs little and evening them out takes too long."""


def minibatch_rows(num_rows: int, num_minibatches: int) -> list[range]:
    """The rows of each mini-batch. Samples of a prompt are adjacent, so most prompts stay whole."""
    cuts = [part * num_rows // num_minibatches for part in range(num_minibatches + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def balanced_parts(batch: DataProto, num_parts: int, *, num_minibatches: int = 1) -> list[list[int]]:
    """The row indices of each rank, for ``core.dispatch.dispatch``.

    The batch is cut into mini-batches first, and each mini-batch is split separately, because ranks wait for each other
    at every optimiser step. Samples of one prompt stay together, since they share its computation, unless a mini-batch
    has fewer prompts than there are ranks. If it also has fewer rows than ranks, some ranks get none of it.
    """
    costs = [workload(int(length)) for length in batch.batch["attention_mask"].sum(dim=1).tolist()]
    uids: list[str] = batch.non_tensor_batch["uid"].tolist()
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for rows in minibatch_rows(len(batch), num_minibatches):
        shares = _shares(rows, uids, costs, num_parts)
        # Passes without a gradient cover all mini-batches at once: the rank with the least work so far gets the most.
        for rank, share in zip(sorted(range(num_parts), key=loads.__getitem__), shares, strict=False):
            parts[rank] += share
            loads[rank] += _cost(share, costs)
    return parts


def imbalance(batch: DataProto, parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How evenly ``parts`` spread the tokens and the work of a batch, and how even parts of adjacent rows would be."""
    lengths: list[int] = batch.batch["attention_mask"].sum(dim=1).tolist()
    tokens = [sum(lengths[row] for row in part) for part in parts]
    in_order = [sum(lengths[row] for row in part) for part in minibatch_rows(len(lengths), len(parts))]
    costs = [sum(workload(lengths[row]) for row in part) for part in parts]
    return {
        "ranks/tokens_mean": sum(lengths) / len(parts),
        "ranks/tokens_min": min(tokens),
        "ranks/tokens_max": max(tokens),
        "ranks/in_order_tokens_min": min(in_order),
        "ranks/in_order_tokens_max": max(in_order),
        "ranks/imbalance": len(parts) * max(costs) / max(sum(costs), 1.0) - 1.0,
    }


def _shares(rows: range, uids: Sequence[str], costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """The rows of one mini-batch in at most ``num_parts`` shares of similar cost, the most expensive share first."""
    by_uid: dict[str, list[int]] = {}
    for row in rows:
        by_uid.setdefault(uids[row], []).append(row)
    groups = list(by_uid.values())
    if len(groups) < num_parts:  # fewer prompts than ranks: samples of a prompt are separated
        groups = [[row] for row in rows]
    if not groups:
        return []
    shares = partition([_cost(group, costs) for group in groups], min(num_parts, len(groups)))
    row_shares = [sorted(row for group in share for row in groups[group]) for share in shares]
    return sorted(row_shares, key=lambda share: -_cost(share, costs))


def _cost(rows: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[row] for row in rows)


def workload(length: int, *, linear: float = 24576.0, quadratic: float = 1.0) -> float:
    """The cost of a sequence: linear layers grow with its length, attention with the square of its length.

    The default ratio is that of a 7B model, where the two terms are equal at about 25k tokens.
    """
    return linear * length + quadratic * length * length


def partition(workloads: Sequence[float], num_parts: int) -> list[list[int]]:
    """The item indices of each part, with sums as even as possible. Parts may have different numbers of items.

    >>> partition([8, 7, 6, 5, 4], 2)
    [[0, 1], [2, 3, 4]]
    """
    if len(workloads) < num_parts:
        raise DataError(f"{len(workloads)} items cannot fill {num_parts} parts; use fewer ranks or more samples")
    parts = _difference(workloads, num_parts)
    _exchange(parts, workloads)
    return sorted(sorted(items) for _, items in parts)


def _difference(workloads: Sequence[float], num_parts: int) -> list[Part]:
    """Largest differencing: merge the two most uneven partial splits, fullest part with emptiest, until one is left."""
    order = sorted(range(len(workloads)), key=lambda item: -workloads[item])
    # A split starts as one item. Empty parts are not listed: few splits ever fill all parts, and iterating over empty
    # ones would cost the number of items times the number of parts.
    splits: list[list[Part]] = [[(workloads[item], [item])] for item in order]
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
    """Both splits as one, fullest part first. Parts are joined only when no empty part is left for them."""
    shared = max(0, len(one) + len(other) - num_parts)
    alone, other_alone = len(one) - shared, len(other) - shared
    both = zip(one[alone:], reversed(other[other_alone:]), strict=True)
    merged = one[:alone] + [(a[0] + b[0], a[1] + b[1]) for a, b in both] + other[:other_alone][::-1]
    merged.sort(key=lambda part: -part[0])
    return merged


def _exchange(parts: list[Part], workloads: Sequence[float]) -> None:
    """Exchange items between the fullest or the emptiest part and another part while that makes the two more even.

    Both new sums lie between the old ones, so the spread over all parts never grows.
    """
    for _ in range(len(workloads)):
        order = sorted(range(len(parts)), key=lambda part: parts[part][0])
        lowest, highest = order[:-1][:_FEW_PARTS], order[:0:-1][1:_FEW_PARTS]
        pairs = [(order[-1], low) for low in lowest] + [(high, order[0]) for high in highest]
        for high, low in pairs:
            trade = _best_trade(parts[high], parts[low], workloads)
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


def _best_trade(high: Part, low: Part, workloads: Sequence[float]) -> _Trade | None:
    """The exchange that brings the two sums closest, or None if no exchange helps."""
    best: _Trade | None = None
    gap = high[0] - low[0]
    best_miss = gap / 2
    most = 2 if max(len(high[1]), len(low[1])) <= _MANY_ITEMS else 1
    for num_given in range(1, most + 1):
        for num_taken in range(most + 1):
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


def pack(lengths: Sequence[int], max_tokens: int, *, min_bins: int = 1) -> list[list[int]]:
    """The row indices of each bin: few bins, none over ``max_tokens``, and at least ``min_bins``.

    >>> pack([6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    _check_lengths(lengths, max_tokens)
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        for number, left in enumerate(room):
            if lengths[row] <= left:
                bins[number].append(row)
                room[number] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(max_tokens - lengths[row])
    return [sorted(each) for each in _split_bins(bins, lengths, max(len(bins), min_bins))]


def pack_evenly(lengths: Sequence[int], max_tokens: int, *, min_bins: int = 1) -> list[list[int]]:
    """Like ``pack``, with bins of similar size, so that no pass is spent on a small remainder.

    Falls back to ``pack`` if even bins do not fit, or if there are so many bins that one remainder does not matter.
    """
    first_fit = pack(lengths, max_tokens, min_bins=min_bins)
    fewest = max(-(-sum(lengths) // max_tokens), min_bins)
    for num_bins in dict.fromkeys((fewest, len(first_fit))):
        if num_bins <= _MANY_BINS:
            bins = partition(lengths, num_bins)
            if all(sum(lengths[row] for row in each) <= max_tokens for each in bins):
                return bins
    return first_fit


def _check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise DataError(
                f"row {row} of the batch: {length} tokens, over the {max_tokens} tokens of a pass; raise "
                f"learner.max_tokens_per_microbatch or learner.max_tokens_per_forward_pass to {length}"
            )


def _check_enough(num_items: int, num_bins: int) -> None:
    if num_items < num_bins:
        raise DataError(f"{num_items} sequences cannot fill {num_bins} micro-batches; use more samples or fewer ranks")


def _split_bins(bins: list[list[int]], sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halve the fullest bins until there are ``num_bins`` bins."""
    _check_enough(len(sizes), num_bins)
    while len(bins) < num_bins:
        fullest = max((each for each in bins if len(each) > 1), key=lambda each: sum(sizes[item] for item in each))
        bins.remove(fullest)
        halves = partition([sizes[item] for item in fullest], 2)
        bins.extend([fullest[position] for position in half] for half in halves)
    return bins
