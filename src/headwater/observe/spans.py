"""Measures where time is spent: stages of one thread, which add up, and spans of all threads, which overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from headwater.observe.trace import Trace

OTHER = "other"
"""The stage outside of all others."""


class StageClock:
    """Divides the time of one thread into stages: every moment belongs to exactly one, the innermost.

    with clock.stage("train"):
        ...
    seconds = clock.take()      # {"train": 1.2, "other": 0.1}: they add up to the time since the last call
    """

    def __init__(self, on_leave: Callable[[str], None] = lambda stage: None) -> None:
        """``on_leave`` is called with the name of a stage whenever it ends, or is interrupted by an inner one."""
        self._on_leave = on_leave
        self._stage = OTHER
        self._since = time.perf_counter()
        self._total: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer = self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call. The present stage counts up to now; the rest counts later."""
        self._enter(self._stage)
        total, self._total = self._total, {}
        return total

    def _enter(self, name: str) -> str:
        now = time.perf_counter()
        self._total[self._stage] = self._total.get(self._stage, 0.0) + now - self._since
        outer, self._stage, self._since = self._stage, name, now
        self._on_leave(outer)
        return outer


class Spans:
    """Wall-clock seconds during which at least one span of a name was open. Overlapping spans of one name count once.

    A hundred episodes that wait for their rewards at the same time spend one second of "reward" per second, not a
    hundred. With a ``trace``, each span is also drawn there, with its arguments.

        with spans.span("generate", version=3):
            ...
        seconds = spans.drain()      # {"generate": 1.2}, and reset
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._total: dict[str, float] = {}

    def span(self, name: str, /, **args: object) -> AbstractContextManager[None]:
        return _Span(self, name, args)

    def _begin(self, name: str, args: Mapping[str, object]) -> None:
        with self._lock:
            self._open[name] = self._open.get(name, 0) + 1
            if self._open[name] == 1:
                self._since[name] = time.perf_counter()
        if self._trace is not None:
            self._trace.begin(name, **args)

    def _end(self, name: str) -> None:
        if self._trace is not None:
            self._trace.end(name)
        with self._lock:
            self._open[name] -= 1
            if self._open[name] == 0:
                self._total[name] = self._total.get(name, 0.0) + time.perf_counter() - self._since.pop(name)

    def drain(self) -> dict[str, float]:
        """Seconds per name since the last call. A span that is still open counts up to now; the rest counts later."""
        with self._lock:
            now = time.perf_counter()
            for name, since in self._since.items():
                self._total[name] = self._total.get(name, 0.0) + now - since
                self._since[name] = now
            total, self._total = self._total, {}
            return total


class _Span:
    """An open span. A class, because thousands of short episodes enter one each."""

    __slots__ = ("_args", "_name", "_spans")

    def __init__(self, spans: Spans, name: str, args: Mapping[str, object]) -> None:
        self._spans = spans
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._spans._begin(self._name, self._args)

    def __exit__(self, *_: object) -> None:
        self._spans._end(self._name)
