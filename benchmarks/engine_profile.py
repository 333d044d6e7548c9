"""Where the time of an engine's run goes: by stage of its loop, and by kernel.

    report = profile(engine, lambda: engine.generate(requests), lambda: engine.generate(other_requests))

The first run is timed stage by stage, which costs little. The second runs under torch's profiler, if there is a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headwater.engine.engine import Engine

_NUM_KERNELS = 30
_NUM_GAPS = 12
_GAP_S = 0.002


@dataclass
class Stage:
    """Calls of one function on the engine's thread."""

    host_s: float = 0.0
    calls: list[str] = field(default_factory=list)
    """Of each call: when it began, how long the host was in it, and its size."""
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def device_s(self) -> float:
        """From the first to the last kernel of each call, with gaps between them."""
        return sum(start.elapsed_time(end) for start, end in self.events) / 1e3


class Stages:
    """Times the functions of an engine's loop while it is entered. Stages may contain one another."""

    def __init__(self, engine: Engine) -> None:
        loop, runner = engine._loop, engine._runner
        self.stages: dict[str, Stage] = {}
        self._on_gpu = runner.spec.device.type == "cuda"
        self._undo: list[Callable[[], None]] = []
        self._began = time.perf_counter()
        self._wrap(
            runner, "prefill", "prefill with its tower passes", lambda batch, *_: f"{len(batch.input_ids)} tokens"
        )
        self._wrap(runner, "decode", "decode", lambda rows, steps, *_: f"{rows} rows, {steps} steps")
        self._wrap(loop, "_read", "waiting for output and delivering it", lambda *_: "")
        self._wrap(loop, "_take_inbox", "taking new requests", lambda *_: "")
        self._wrap(loop, "_take_read", "taking requests whose pictures were read", lambda *_: "")
        if hasattr(runner, "_capture"):
            self._wrap(runner, "_capture", "capturing graphs", lambda rows, *_: f"{rows} rows")
        if runner.media is not None:
            self._wrap(runner.media, "_computed", "tower", lambda inputs: f"{len(inputs)} pictures")

    def _wrap(self, owner: Any, name: str, title: str, size: Callable[..., str]) -> None:
        inner = getattr(owner, name)
        stage = self.stages.setdefault(title, Stage())

        def timed(*arguments: Any, **options: Any) -> Any:
            events = None
            if self._on_gpu and title != "capturing graphs":
                events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                events[0].record()
            started = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - started
                stage.host_s += elapsed
                stage.calls.append(f"{1e3 * (started - self._began):9.1f} {1e3 * elapsed:8.1f} {size(*arguments)}")
                if events is not None:
                    events[1].record()
                    stage.events.append(events)

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name))

    def close(self) -> None:
        for undo in self._undo:
            undo()


def profile(engine: Engine, first: Callable[[], object], second: Callable[[], object]) -> str:
    """A report in plain text."""
    stages = Stages(engine)
    started = time.perf_counter()
    try:
        first()
    finally:
        elapsed = time.perf_counter() - started
        stages.close()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    lines = [f"A run of {elapsed:.3f} s by stage (seconds of the host, seconds on the device, calls)"]
    for title, stage in stages.stages.items():
        lines.append(f"{stage.host_s:8.3f} {stage.device_s():8.3f} {len(stage.calls):5} {title}")
    for title, stage in stages.stages.items():
        shown = [each for each in stage.calls if float(each.split()[1]) >= 0.5]
        lines += ["", f"{title}: calls of at least 0.5 ms (ms since the beginning, ms of the host)", *shown[:80]]
    if torch.cuda.is_available():
        lines += ["", *_kernels(second)]
    return "\n".join(lines) + "\n"


def _kernels(run: Callable[[], object]) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
    spans: list[tuple[float, float, str]] = sorted(
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    by_name: dict[str, list[float]] = {}
    busy_s, end, gaps = 0.0, spans[0][0] if spans else 0.0, []
    for start, stop, name in spans:
        by_name.setdefault(name, []).append(stop - start)
        if start - end > _GAP_S:
            gaps.append((start - end, end - spans[0][0], name))
        busy_s += max(0.0, stop - max(start, end))
        end = max(end, stop)
    lines = [f"A run of {elapsed:.3f} s under the profiler: the device was busy for {busy_s:.3f} s"]
    lines += ["Longest gaps on the device (ms, ms since its first kernel, what followed)"]
    lines += [f"{1e3 * gap:8.1f} {1e3 * at:9.1f} {name[:80]}" for gap, at, name in sorted(gaps)[::-1][:_NUM_GAPS]]
    lines += ["Kernels (ms, calls)"]
    for name, times in sorted(by_name.items(), key=lambda each: -sum(each[1]))[:_NUM_KERNELS]:
        lines.append(f"{1e3 * sum(times):9.2f} {len(times):6} {name[:150]}")
    return lines
