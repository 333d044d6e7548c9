"""Splitting a batch over ranks and putting it back together.

    outputs = [work(part) for part in dispatch(data, [[0, 3], [1, 2]])]
    data = collect(outputs)

A part is a list of row indices, so parts may have different sizes and no row is repeated. Each row carries its index in
a column, and ``meta_info`` records which part of which dispatch it belongs to. A rank may reorder its rows, repeat them
or add columns; ``collect`` restores the order of the original batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headwater.core.data_proto import DataProto

DISPATCH_KEY = "_dispatch"
"""The entry of ``meta_info`` that records the dispatches a part went through, the latest last."""
_NUM_NAMED = 5


class PartRows(NamedTuple):
    """Which rows of the dispatched batch a part holds."""

    indices: torch.Tensor
    num_rows: int
    """The number of rows of the whole batch."""


def dispatched_rows(part: DataProto) -> PartRows:
    """The rows that ``part`` holds of the batch it was dispatched from."""
    marks = part.meta_info[DISPATCH_KEY]
    return PartRows(part.batch[_column(len(marks))], marks[-1]["num_rows"])


def dispatch(data: DataProto, parts: Sequence[Sequence[int]]) -> list[DataProto]:
    """One batch per rank, of the given row indices.

    Parts may have different sizes and may be empty. Together they must name each row of ``data`` once. ``collect`` is
    the inverse.
    """
    if sorted(row for part in parts for row in part) != list(range(len(data))):
        raise ValueError(
            f"dispatch: the parts do not name each of the {len(data)} rows once; assign every row to one rank"
        )
    outer = tuple(data.meta_info.get(DISPATCH_KEY, ()))
    column = _column(len(outer) + 1)
    dispatched = []
    for rank, part in enumerate(parts):
        mark = {"rank": rank, "num_ranks": len(parts), "num_rows": len(data)}
        dispatched.append(
            data[list(part)].with_columns(
                tensors={column: torch.tensor(list(part), dtype=torch.long)}, meta_info={DISPATCH_KEY: (*outer, mark)}
            )
        )
    return dispatched


def collect(parts: Sequence[DataProto]) -> DataProto:
    """The rows that the ranks return for ``dispatch`` as one batch, in the order of the original batch.

    Each rank returns the part it was given, perhaps with columns added, rows reordered or rows repeated.
    """
    if not parts:
        raise ValueError("collect got no parts; pass the result of every rank")
    marks = _marks(parts)
    column = _column(len(marks[0]))
    outer = marks[0][:-1]
    joined = type(parts[0]).concat([_without_mark(part) for part in parts])
    rows = joined.batch[column]
    missing = sorted(set(range(marks[0][-1]["num_rows"])) - set(rows.tolist()))
    if missing:
        named = ", ".join(map(str, missing[:_NUM_NAMED]))
        raise ValueError(f"collect: no rank returned row {named}; return every row that was given")
    collected = joined[torch.argsort(rows, stable=True)]
    collected.pop(batch_keys=[column])
    return collected.with_columns(meta_info={DISPATCH_KEY: outer}) if outer else collected


def _marks(parts: Sequence[DataProto]) -> list[tuple[dict[str, Any], ...]]:
    """The recorded dispatches of each part, after checking that the parts are one whole dispatch."""
    marks = [tuple(part.meta_info.get(DISPATCH_KEY, ())) for part in parts]
    for number, mark in enumerate(marks):
        if not mark:
            raise ValueError(
                f"part {number} has no meta_info[{DISPATCH_KEY!r}], so its rows are unknown; return the part that was "
                "given, with columns added, or join other batches with DataProto.concat"
            )
    first = marks[0][-1]
    for number, mark in enumerate(marks):
        if (len(mark), mark[:-1]) != (len(marks[0]), marks[0][:-1]) or mark[-1] != {**first, "rank": mark[-1]["rank"]}:
            raise ValueError(f"part {number} is from another dispatch than part 0: {mark[-1]} and {first}")
    ranks = [mark[-1]["rank"] for mark in marks]
    if sorted(ranks) != list(range(first["num_ranks"])):
        raise ValueError(f"parts come from ranks {ranks} of {first['num_ranks']}; pass one part of every rank")
    return marks


def _column(depth: int) -> str:
    """The column of row indices of the ``depth``-th dispatch. A part may be dispatched again."""
    return f"_row_{depth}"


def _without_mark(part: DataProto) -> DataProto:
    return part.select(meta_keys=[key for key in part.meta_info if key != DISPATCH_KEY])
