"""A trace of a run over time, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.observe.run_directory import write_whole

TRACKS = ("generate", "reward", "wait", "experience", "train", "publish")
"""Tracks from top to bottom, so that generation is visible above training. Other names follow in order of use."""

_JOIN_S = 0.001
"""Spans of the same name closer than this are drawn as one, because an engine runs hundreds of rounds per second."""


@dataclass
class _Interval:
    """A time during which at least one span of a name was open."""

    began: float
    ended: float
    args: Mapping[str, Any]
    num_spans: int = 1
    most_open: int = 1


@dataclass
class _Track:
    number: int
    num_open: int = 0
    latest: _Interval | None = None
    """The open interval, or the last one that ended. The next span may still be joined to it."""


@dataclass
class _Kept:
    """The newest intervals, and the number of older ones that were discarded."""

    most: int
    num_dropped: int = 0
    events: deque[tuple[str, _Interval]] = field(default_factory=deque)

    def add(self, name: str, interval: _Interval) -> None:
        self.events.append((name, interval))
        if len(self.events) > self.most:
            self.events.popleft()
            self.num_dropped += 1


class Trace:
    """One track per name. It shows when at least one span of that name was open.

    A hundred episodes that wait for their rewards at the same time are one bar, labelled with their number. Memory is
    bounded: the trace keeps the newest ``max_events`` bars and reports how many it has discarded.

        trace = Trace()
        spans = Spans(trace)            # every span is drawn
        trace.write(path)              # may be repeated; open bars are drawn up to now
    """

    def __init__(self, max_events: int = 50_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept = _Kept(max_events)
        self._tracks: dict[str, _Track] = {name: _Track(number) for number, name in enumerate(TRACKS, start=1)}
        self._zero = clock()
        self._zero_time = time.time()
        self._written_at = self._zero

    def begin(self, name: str, /, **args: object) -> None:
        now = self._clock()
        with self._lock:
            track = self._tracks.setdefault(name, _Track(len(self._tracks) + 1))
            track.num_open += 1
            bar = track.latest
            if bar is not None and (track.num_open > 1 or (now - bar.ended < _JOIN_S and bar.args == args)):
                bar.num_spans += 1
                bar.most_open = max(bar.most_open, track.num_open)
                return
            if bar is not None:
                self._kept.add(name, bar)
            track.latest = _Interval(now, now, args)

    def end(self, name: str) -> None:
        now = self._clock()
        with self._lock:
            track = self._tracks[name]
            track.num_open -= 1
            if track.num_open == 0 and track.latest is not None:
                track.latest.ended = now

    def write(self, path: Path) -> None:
        """The whole trace so far, in Chrome's format."""
        now = self._clock()
        with self._lock:
            self._written_at = now
            tracks = {name: track.number for name, track in self._tracks.items() if track.latest is not None}
            events = [self._bar(tracks[name], name, each, each.ended) for name, each in self._kept.events]
            for name, track in self._tracks.items():
                if (bar := track.latest) is not None:
                    events.append(self._bar(track.number, name, bar, now if track.num_open else bar.ended))
            num_dropped = self._kept.num_dropped
        events.sort(key=lambda event: event["ts"])
        if num_dropped:
            events.insert(0, _note(f"{num_dropped} older bars were discarded", events[0]["ts"]))
        content = {
            "displayTimeUnit": "ms",
            "otherData": {"began": self._zero_time, "dropped_events": num_dropped},
            "traceEvents": [*_names(tracks), *events],
        }
        write_whole(path, json.dumps(content, default=str))

    def write_if_due(self, path: Path, every_s: float = 60.0) -> None:
        """Write if the last write was ``every_s`` ago, so that a killed run leaves most of its trace."""
        if self._clock() - self._written_at >= every_s:
            self.write(path)

    def _bar(self, track: int, name: str, bar: _Interval, ended: float) -> dict[str, Any]:
        args = dict(bar.args)
        if bar.num_spans > 1:
            args |= {"spans": bar.num_spans, "most at once": bar.most_open}
        return {
            "ph": "X",
            "pid": os.getpid(),
            "tid": track,
            "name": name,
            "ts": _microseconds(bar.began - self._zero),
            "dur": _microseconds(ended - bar.began),
            "args": args,
        }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _names(tracks: Mapping[str, int]) -> list[dict[str, Any]]:
    """The names and the order of the tracks in the viewer."""
    pid = os.getpid()
    told: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "headwater"}}]
    for name, number in tracks.items():
        told.append({"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": name}})
        told.append({"ph": "M", "pid": pid, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    return told


def _note(text: str, at: float) -> dict[str, Any]:
    return {"ph": "i", "s": "g", "pid": os.getpid(), "tid": 0, "name": text, "ts": at}
