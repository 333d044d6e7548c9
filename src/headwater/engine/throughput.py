"""How many tokens the engine generates."""

from __future__ import annotations

import threading
import time
from collections import deque

_WINDOW_S = 5.0
_LEAST_SPAN_S = 1.0


class Throughput:
    """Counts tokens and computes the recent rate. The engine's thread counts; other threads read."""

    def __init__(self) -> None:
        self.total = 0
        self._born = time.monotonic()
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, num_tokens: int) -> None:
        now = time.monotonic()
        self.total += num_tokens
        with self._lock:
            self._marks.append((now, num_tokens))
            self._forget_before(now - _WINDOW_S)

    def per_second(self) -> float:
        now = time.monotonic()
        with self._lock:
            self._forget_before(now - _WINDOW_S)
            num_recent = sum(count for _, count in self._marks)
        # Divide by the whole window, including idle time. Since the first mark, a single round would look enormous.
        return num_recent / min(_WINDOW_S, max(_LEAST_SPAN_S, now - self._born))

    def _forget_before(self, when: float) -> None:
        while self._marks and self._marks[0][0] < when:
            self._marks.popleft()
