"""What code written for verl imports from ``verl.protocol``: functions on a DataProto, and DataProtoFuture.

    future = DataProtoFuture.concat([pool.submit(generate, part) for part in data.chunk(4)])
    halves = future.chunk(2)          # does not wait
    halves[0].get(timeout_s=600)      # waits for the four parts, and returns the first half of their rows

A part is a ``concurrent.futures.Future``, or an object whose ``future()`` returns one, such as a Ray ``ObjectRef``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from headwater.core.data_proto import DataProto
from headwater.core.waits import wait_for_future

_TIMEOUT_S = 1800.0


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """``data.pad_to_divisor`` under verl's name."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """``data.unpad`` under verl's name."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Group the rows into ``new_batch_size`` rows of equally many: a tensor (6, 5) folded to 2 rows is (2, 3, 5).

    A row of an object column becomes an array of the objects that it groups.
    """
    if new_batch_size < 1:
        raise ValueError(f"new_batch_size = {new_batch_size}: must be >= 1")
    size, remainder = divmod(len(data), new_batch_size)
    if remainder:
        raise ValueError(f"new_batch_size = {new_batch_size}: does not divide {len(data)} rows")
    tensors = {name: column.reshape(new_batch_size, size, *column.shape[1:]) for name, column in data.batch.items()}
    arrays = {name: list(column.reshape(new_batch_size, size)) for name, column in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first ``batch_dims`` dimensions of every tensor into the rows; the inverse of ``fold_batch_dim``.

    A row of an object column must be an array or list of the objects of its new rows.
    """
    if batch_dims != 2:
        raise ValueError(f"batch_dims = {batch_dims}: must be 2; unfold more dimensions one after the other")
    if flat := [name for name, column in data.batch.items() if column.ndim < 2]:
        raise ValueError(f"unfold_batch_dim: tensor column {flat[0]!r} has no second dimension")
    tensors = {name: column.flatten(0, 1) for name, column in data.batch.items()}
    arrays = {name: [cell for row in column for cell in row] for name, column in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, data.meta_info)


@dataclass(frozen=True)
class DataProtoFuture:
    """A batch that others still compute: its parts, how to combine them, and which rows of the result to return."""

    collect_fn: Callable[[Sequence[DataProto]], DataProto]
    """Combines the computed parts."""
    futures: Sequence[Any]
    """One for each part: a Future, or an object whose ``future()`` returns one."""
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    """Selects rows of the combined batch; ``None`` returns all."""

    @classmethod
    def concat(cls, data: Sequence[Any]) -> DataProtoFuture:
        """Return the concatenation of the parts, without waiting for them."""
        if not data:
            raise ValueError("concat got no futures, so the columns are unknown; pass at least one")
        return cls(collect_fn=DataProto.concat, futures=tuple(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return one future for each of ``chunks`` equal parts, without waiting for the batch."""
        if chunks < 1:
            raise ValueError(f"chunks = {chunks}: must be >= 1")
        selections = [functools.partial(_chunk, before=self.dispatch_fn, chunks=chunks, part=i) for i in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, selection) for selection in selections]

    def get(self, timeout_s: float = _TIMEOUT_S) -> DataProto:
        """Wait for all parts and return the batch. An error that a part raised is raised here."""
        end = time.monotonic() + timeout_s
        parts = [self._part(number, end) for number in range(len(self.futures))]
        data = self.collect_fn(parts)
        return data if self.dispatch_fn is None else self.dispatch_fn(data)

    def _part(self, number: int, end: float) -> DataProto:
        source = self.futures[number]
        future: Future[Any] = source if isinstance(source, Future) else source.future()
        label = f"part {number} of {len(self.futures)} of a DataProtoFuture"
        limit_s = max(0.0, end - time.monotonic())
        part = wait_for_future(future, lambda: label, kind="data_future", hard_limit_s=limit_s)
        if not isinstance(part, DataProto):
            raise TypeError(f"{label} is a {type(part).__name__}; every part must be a DataProto")
        return part


def _chunk(data: DataProto, before: Callable[[DataProto], DataProto] | None, chunks: int, part: int) -> DataProto:
    return (data if before is None else before(data)).chunk(chunks)[part]
