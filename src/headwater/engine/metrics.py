"""Counters and throughput of the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

_WINDOW_S = 5.0
_LEAST_SPAN_S = 1.0


@dataclass(frozen=True)
class EngineMetrics:
    """The state and the counters of an engine at one moment."""

    version: int
    is_paused: bool
    is_asleep: bool
    needs_weights: bool
    """An update failed midway; nothing is generated until a complete one succeeds."""
    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_failed: int
    """Requests whose logits were NaN or infinite."""
    num_preempted: int
    num_interrupted: int
    num_weight_updates: int
    last_update_pause_s: float
    """How long generation was stopped for the last weight update."""
    kv_pages_total: int
    kv_pages_used: int
    num_tokens_generated: int
    num_tokens_prefilled: int
    num_tokens_cached: int
    """Prompt tokens that were found in the prefix cache instead of being computed."""
    tokens_per_s: float
    """Generated tokens per second over the last five seconds, or over the engine's lifetime if that is shorter."""


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
