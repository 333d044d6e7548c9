"""Records what a rank computes, for steps that the config names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from headwater.core.learner import ProfileOrder

_MOST_EVENTS = 200_000
"""Allocations of which a memory snapshot keeps the place in the code."""


class Profiler:
    """Records from its creation to ``finish``, which writes the files. Both must happen on the same thread."""

    def __init__(self, order: ProfileOrder, rank: int, device: torch.device) -> None:
        order.folder.mkdir(parents=True, exist_ok=True)
        self._start = order.folder / f"{order.name}_rank_{rank}"
        self._snapshots = order.memory and device.type == "cuda"
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities, profile_memory=order.memory, record_shapes=order.memory)
        self._profile.start()

    def finish(self) -> list[Path]:
        """Write the trace, and the memory snapshot if there is one."""
        self._profile.stop()
        trace = self._start.with_name(f"{self._start.name}.json.gz")
        self._profile.export_chrome_trace(str(trace))
        if not self._snapshots:
            return [trace]
        snapshot = self._start.with_name(f"{self._start.name}_memory.pickle")
        torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        return [trace, snapshot]
