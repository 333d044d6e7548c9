"""When a run generated, scored, trained and published: bars for a window of time, from its trace or its metrics."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwater.dashboard.runs import Run
from headwater.dashboard.series import STAGES
from headwater.observe.trace import TRACKS

_TEXTS = {
    "generate": "at least one response is generated",
    "reward": "at least one response is scored",
    **STAGES,
}
_ORDER = (*TRACKS, *(name for name in STAGES if name not in TRACKS))
_WINDOW_S = 60.0
_WINDOW_STEPS = 5
_MOST_TRACE_BYTES = 24 << 20
"""Of all traces together. In memory, they are several times as large."""
_STAGES_IN_ORDER = ("wait", "experience", "train", "publish", "record", "evaluate", "checkpoint", "offload")
_CONCURRENT = ("generate", "reward")
"""They run beside the stages. Metrics have their length in each step, but not when it was."""

Bar = tuple[float, float, int, str]


@dataclass(frozen=True)
class Timeline:
    """All bars of a run by the name of their row, in seconds since ``began``."""

    source: str
    began: float
    rows: dict[str, list[Bar]]
    marks: list[tuple[float, int]]
    """When each step was recorded."""
    num_left_out: int
    problems: list[str]
    traces: tuple[str, ...] = ()
    """The files that are drawn."""

    @property
    def total(self) -> tuple[float, float]:
        starts = [bars[0][0] for bars in self.rows.values() if bars]
        ends = [max(bar[1] for bar in bars) for bars in self.rows.values() if bars]
        ends += [at for at, _ in self.marks[-1:] if self.source == "metrics"]
        return (min(starts, default=0.0), max(ends, default=0.0))


class Timelines:
    """Makes timelines, and keeps the last ones: a trace has tens of thousands of bars."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[object, Timeline]] = {}

    def window(self, run: Run, begin: float | None, end: float | None, most: int) -> dict[str, Any]:
        whole = self._whole(run)
        first, last = whole.total
        to = last if end is None else end
        default = max(first, min(to - _WINDOW_S, _some_steps_before(whole.marks, to)))
        since = default if begin is None else begin
        width = max(to - since, 1e-9)
        rows = []
        for name in sorted(whole.rows, key=lambda each: _ORDER.index(each) if each in _ORDER else len(_ORDER)):
            inside = [bar for bar in whole.rows[name] if bar[1] >= since and bar[0] <= to]
            bars = merged(inside, width / most)
            is_known = whole.source == "trace" or name not in _CONCURRENT
            told = {"name": name, "text": _TEXTS.get(name, ""), "is_place_known": is_known}
            rows.append({**told, "bars": [[*bar] for bar in bars]})
        return {
            "source": whole.source,
            "traces": list(whole.traces),
            "began": whole.began,
            "total": [first, last],
            "window": [since, to],
            "rows": rows,
            "marks": [{"at": at, "step": step} for at, step in _thinned(whole.marks, since, to)],
            "num_left_out": whole.num_left_out,
            "problems": whole.problems,
        }

    def _whole(self, run: Run) -> Timeline:
        traces = run.trace_files()
        stamps = [(path.stat().st_mtime_ns, path.stat().st_size) for path in traces if path.exists()]
        with run.records.lock:
            run.records.refresh()
            steps = run.records.tables["train"].steps()
            stamp = (tuple(stamps), len(steps), int(steps[-1]) if len(steps) else 0)
        with self._lock:
            kept = self._kept.get(run.path)
            if kept is not None and kept[0] == stamp:
                return kept[1]
        problems: list[str] = []
        made = (_from_traces(run, traces, problems) if traces else None) or _from_metrics(run, problems)
        with self._lock:
            self._kept = {run.path: (stamp, made)}
        return made


def merged(bars: Iterable[Bar], narrow: float) -> list[Bar]:
    """Bars that would be narrower than ``narrow``, and gaps that would be, are drawn together with their neighbours."""
    found: list[Bar] = []
    for begin, end, count, label in bars:
        if found:
            before = found[-1]
            is_narrow = end - begin < narrow or before[1] - before[0] < narrow
            if begin - before[1] < narrow and is_narrow:
                same = label if label == before[3] else ""
                found[-1] = (before[0], max(before[1], end), before[2] + count, same)
                continue
        found.append((begin, end, count, label))
    return found


def _from_traces(run: Run, traces: list[Path], problems: list[str]) -> Timeline | None:
    """All traces: each part of a run that was resumed has its own. Of very many, the newest."""
    parts: list[_Trace] = []
    num_bytes = 0
    for path in reversed(traces):
        num_bytes += path.stat().st_size if path.exists() else 0
        if num_bytes > _MOST_TRACE_BYTES:
            problems.append(f"{path.name} and earlier traces are too large together; open them in ui.perfetto.dev.")
            break
        if (part := _read_trace(path, problems)) is not None:
            parts.insert(0, part)
    if not parts:
        return None
    began = min(part.began for part in parts)
    rows: dict[str, list[Bar]] = {}
    for part in parts:
        for name, bars in part.rows.items():
            later = part.began - began
            moved = ((first + later, last + later, num, label) for first, last, num, label in bars)
            rows.setdefault(name, []).extend(moved)
    for bars in rows.values():
        bars.sort()
    marks = [(at - began, step) for at, step in _recorded(run)]
    num_left_out = sum(part.num_left_out for part in parts)
    return Timeline("trace", began, rows, marks, num_left_out, problems, tuple(part.name for part in parts))


@dataclass(frozen=True)
class _Trace:
    name: str
    began: float
    rows: dict[str, list[Bar]]
    num_left_out: int


def _read_trace(path: Path, problems: list[str]) -> _Trace | None:
    try:
        content = json.loads(path.read_bytes())
        other = content.get("otherData", {})
        began = float(other["began"])
        if not math.isfinite(began):
            raise ValueError("began is not a time")
        rows: dict[str, list[Bar]] = {}
        for event in content["traceEvents"]:
            if event.get("ph") != "X":
                continue
            begin, length = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
            if not math.isfinite(begin + length):
                raise ValueError("a bar without a time")
            args = event.get("args") or {}
            spans = args.get("spans", 1)
            label = ", ".join(
                f"{name} {value}" for name, value in args.items() if name not in ("spans", "most at once")
            )
            rows.setdefault(str(event["name"]), []).append((begin, begin + length, int(spans), label[:200]))
        return _Trace(path.name, began, rows, int(other.get("dropped_events", 0))) if rows else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        problems.append(f"{path.name} cannot be read ({type(error).__name__}), so it is not shown.")
        return None


def _recorded(run: Run) -> list[tuple[float, int]]:
    with run.records.lock:
        table = run.records.tables["train"]
        times, steps = table.column("time"), table.steps()
    return [(at, step) for at, step in zip(times.tolist(), steps.tolist(), strict=True) if at == at]


def _from_metrics(run: Run, problems: list[str]) -> Timeline:
    """Each step as one bar per stage. A record is written at the end of a step; the order of its stages is known."""
    with run.records.lock:
        table = run.records.tables["train"]
        steps, times, step_s = table.steps(), table.column("time"), table.column("time/step_s")
        stages = {name: np.nan_to_num(table.column(f"time/{name}_s")) for name in _STAGES_IN_ORDER}
        concurrent = {name: np.nan_to_num(table.column(f"time/{name}_s")) for name in _CONCURRENT}
    known = np.isfinite(times) & np.isfinite(step_s)
    if not known.any():
        return Timeline("none", 0.0, {}, [], 0, problems)
    began = float((times - step_s)[known][0])
    rows: dict[str, list[Bar]] = {}
    marks = []
    for place in np.flatnonzero(known).tolist():
        end, label = float(times[place]) - began, f"step {int(steps[place])}"
        start = at = end - float(step_s[place])
        marks.append((end, int(steps[place])))
        for name, seconds in concurrent.items():
            if seconds[place] > 0:
                rows.setdefault(name, []).append((start, min(end, start + float(seconds[place])), 1, label))
        for name in _STAGES_IN_ORDER:
            if stages[name][place] > 0:
                until = at + float(stages[name][place])
                rows.setdefault(name, []).append((at, until, 1, label))
                at = until
    return Timeline("metrics", began, rows, marks, 0, problems)


def _some_steps_before(marks: list[tuple[float, int]], to: float) -> float:
    before = [at for at, _ in marks if at <= to]
    return before[-_WINDOW_STEPS - 1] if len(before) > _WINDOW_STEPS else (0.0 if before else to - _WINDOW_S)


def _thinned(marks: list[tuple[float, int]], since: float, to: float) -> list[tuple[float, int]]:
    inside = [(at, step) for at, step in marks if since <= at <= to]
    return inside[:: max(1, len(inside) // 200)]
