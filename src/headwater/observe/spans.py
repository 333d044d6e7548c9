"""Measures where time is spent, as named spans. Overlapping spans of one name count once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.observe.trace import Trace


class Spans:
    """Wall-clock seconds during which at least one span of a name was open.

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

    @contextmanager
    def span(self, name: str, /, **args: object) -> Iterator[None]:
        with self._lock:
            self._open[name] = self._open.get(name, 0) + 1
            if self._open[name] == 1:
                self._since[name] = time.perf_counter()
        if self._trace is not None:
            self._trace.begin(name, **args)
        try:
            yield
        finally:
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
