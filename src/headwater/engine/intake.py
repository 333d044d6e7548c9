"""The way in: requests get places in the queue, become sequences and are handed to the loop; callers may leave."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

from headwater.core.errors import QueueFull
from headwater.core.records import Delta, ModelRequest
from headwater.engine.loop import EngineLoop
from headwater.engine.request_limits import RequestLimits
from headwater.engine.sequence import Sequence as EngineSequence

_ENTER_AT_ONCE = 256


class Intake:
    def __init__(
        self, loop: EngineLoop, limits: RequestLimits, *, max_queue: int, end_token_ids: Sequence[int]
    ) -> None:
        self.num_open = 0
        """Requests that wait or run."""
        self._loop = loop
        self._limits = limits
        self._max_queue = max_queue
        self._end_token_ids = end_token_ids
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def check(self, request: ModelRequest) -> None:
        self._limits.check(request)

    def enter(
        self,
        requests: Sequence[ModelRequest],
        on_end: Callable[[int, EngineSequence], None],
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[EngineSequence]:
        """All of ``requests`` or none. ``on_end`` is told the place of the request that has ended."""
        for request in requests:
            self.check(request)  # all of them before the first one starts
        self._reserve(len(requests))
        entered: list[EngineSequence] = []
        try:
            # In slices: the first ones run while the others are made ready.
            for start in range(0, len(requests), _ENTER_AT_ONCE):
                part = [
                    self._open(request, partial(on_end, start + place), on_delta)
                    for place, request in enumerate(requests[start : start + _ENTER_AT_ONCE])
                ]
                self._loop.add(part)
                entered += part
        except BaseException:  # also Ctrl-C: nobody will wait for those that have entered
            self._free(len(requests) - len(entered))
            self.leave(entered)
            raise
        return entered

    def leave(self, sequences: Sequence[EngineSequence]) -> None:
        """Nobody waits for these any more: those that have not ended are abandoned. Does not wait for it either."""
        left = [each for each in sequences if each.stop_reason is None and each.error is None]
        if left:
            self._loop.abandon(left)

    def _open(
        self,
        request: ModelRequest,
        on_end: Callable[[EngineSequence], None],
        on_delta: Callable[[Delta], None] | None,
    ) -> EngineSequence:
        """What the loop works on for ``request``."""
        own_ends = () if request.sampling.ignore_end else self._end_token_ids

        def ended(sequence: EngineSequence) -> None:
            self._free(1)
            on_end(sequence)

        return EngineSequence(
            request,
            stop_ids=tuple(dict.fromkeys((*own_ends, *request.sampling.stop_token_ids))),
            order=next(self._numbers),
            on_end=ended,
            on_delta=on_delta,
        )

    def _reserve(self, num_requests: int) -> None:
        """Places in the queue for so many requests, or ``QueueFull``."""
        with self._lock:
            if self.num_open + num_requests > self._max_queue:
                raise QueueFull(
                    f"{num_requests} more requests: {self.num_open} wait or run already and engine.max_queue is "
                    f"{self._max_queue}; send fewer at a time or later, or raise the limit"
                )
            self.num_open += num_requests

    def _free(self, num_requests: int) -> None:
        with self._lock:
            self.num_open -= num_requests
