"""A batch over ranks and back.

Every rank gets equally many rows, so that collective calls line up; where the rows do not divide, the first ones are
repeated at the end. Each part's ``meta_info`` carries a mark that says which rows are padding. A rank that returns its
part with columns added hands the mark back unknowingly, and ``collect`` uses it to remove the padding again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.core.data_proto import DataProto

DISPATCH_KEY = "_dispatch"
"""The mark's key in ``meta_info``. A part may be dispatched again: its mark is then kept inside the new one."""


def dispatch(data: DataProto, num_ranks: int) -> list[DataProto]:
    """Equal parts for ``num_ranks`` ranks, each with its mark."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks = {num_ranks}: must be >= 1")
    padded, num_padding = data.pad_to_divisor(num_ranks) if len(data) else (data, 0)
    mark = {"num_ranks": num_ranks, "num_rows": len(data), "num_padding": num_padding}
    if DISPATCH_KEY in data.meta_info:
        mark["outer"] = data.meta_info[DISPATCH_KEY]
    return [
        part.with_columns(meta_info={DISPATCH_KEY: {"rank": rank, **mark}})
        for rank, part in enumerate(padded.chunk(num_ranks))
    ]


def collect(parts: Sequence[DataProto], num_rows: int | None) -> DataProto:
    """The parts of one dispatch as one batch without its padding, which is ``num_rows`` long where that is given."""
    if not parts:
        raise ValueError("collect got no parts; pass the result of every rank, in rank order")
    marks = [part.meta_info.get(DISPATCH_KEY) for part in parts]
    if num_rows is None:
        num_rows = _num_rows_of(parts, marks)
    joined = type(parts[0]).concat([_without_mark(part) for part in parts])
    if not 0 <= num_rows <= len(joined):
        raise ValueError(f"num_rows = {num_rows}: the parts hold {len(joined)} rows; pass the number before padding")
    collected = joined[:num_rows]
    if marks[0] is not None and "outer" in marks[0]:
        return collected.with_columns(meta_info={DISPATCH_KEY: marks[0]["outer"]})
    return collected


def _num_rows_of(parts: Sequence[DataProto], marks: list[Any]) -> int:
    """The row count that the marks record, after checking that the parts are one whole dispatch, row for row."""
    for rank, mark in enumerate(marks):
        if mark is None:
            raise ValueError(
                f"part {rank} has no meta_info[{DISPATCH_KEY!r}], so its padding is unknown; "
                "pass num_rows, the number of rows before padding, or join unpadded parts with DataProto.concat"
            )
    ranks = [mark["rank"] for mark in marks]
    num_ranks = marks[0]["num_ranks"]
    if ranks != list(range(num_ranks)):
        raise ValueError(f"parts come from ranks {ranks} of {num_ranks}; pass one part of every rank, in rank order")
    num_rows: int = marks[0]["num_rows"]
    num_per_rank = (num_rows + marks[0]["num_padding"]) // num_ranks
    for rank, (part, mark) in enumerate(zip(parts, marks, strict=True)):
        if (mark["num_ranks"], mark["num_rows"]) != (num_ranks, num_rows):
            raise ValueError(f"part {rank} is from another dispatch than part 0: {mark} and {marks[0]}")
        if len(part) != num_per_rank:
            raise ValueError(
                f"part {rank} has {len(part)} rows but was given {num_per_rank}; return one row per row given, "
                "or pass num_rows, the number of rows to keep of the joined parts"
            )
    return num_rows


def _without_mark(part: DataProto) -> DataProto:
    return part.select(meta_keys=[key for key in part.meta_info if key != DISPATCH_KEY])
