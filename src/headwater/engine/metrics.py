"""What the engine is doing, in numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass

_WINDOW_S = 5.0


@dataclass(frozen=True)
class EngineMetrics:
    version: int
    is_paused: bool
    is_asleep: bool
    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_preempted: int
    num_interrupted: int
    num_weight_updates: int
    last_update_pause_s: float
    """How long the last weight update held generation up."""
    kv_pages_total: int
    kv_pages_used: int
    num_tokens_generated: int
    num_tokens_prefilled: int
    num_tokens_cached: int
    """Prompt tokens that were found in the prefix cache and not computed."""
    tokens_per_s: float
    """Generated tokens over the last few seconds."""


class Throughput:
    """Counts tokens, and how many of them are recent."""

    def __init__(self) -> None:
        self.total = 0
        self._marks: list[tuple[float, int]] = []

    def add(self, num_tokens: int) -> None:
        now = time.monotonic()
        self.total += num_tokens
        self._marks.append((now, num_tokens))
        while self._marks and self._marks[0][0] < now - _WINDOW_S:
            self._marks.pop(0)

    def per_second(self) -> float:
        now = time.monotonic()
        recent = [(when, count) for when, count in list(self._marks) if when >= now - _WINDOW_S]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(now - recent[0][0], 1e-3)
