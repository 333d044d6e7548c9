"""DataProtoFuture, a batch that other threads or processes are still computing.

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


@dataclass(frozen=True)
class DataProtoFuture:
    """The parts of a batch, how to combine them, and which rows of the result to return."""

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
