"""Trackers: where else the metrics of a run go. One file each, several at once, each in its own thread.

``trainer.trackers`` names them. A tracker that fails or hangs never stops training: it is warned about once, its lost
records are counted, and the end of the run names it.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headwater.config.arguments import with_arguments
from headwater.core.errors import ConfigError, WaitTimeout
from headwater.core.registry import Registry, is_path
from headwater.core.waits import wait_until

if TYPE_CHECKING:
    from headwater.observe.progress import Display

logger = logging.getLogger(__name__)

TRACKERS = Registry("tracker", "headwater.observe.trackers")

_MOST_WAITING = 1000
"""Records that wait for a slow tracker. Later ones are lost and counted."""
FINISH_LIMIT_S = 60.0
"""How long the end of a run waits for a tracker to send what is left."""

TableRecords = Sequence[Mapping[str, Any]]


class Tracker(Protocol):
    """Receives the metrics of a run. All calls are made by one thread, which is not that of training.

    It is built with the arguments in ``trainer.tracker_args``, which are keyword-only. Any method may raise.
    """

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        """``config`` has all settings by section. ``folder`` belongs to this tracker and this run, also after a resume;
        it may not exist."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a training step, or with names such as ``eval/reward/mean`` those of an evaluation after it.

        A resumed run repeats the steps after its checkpoint, so ``step`` may become smaller.
        """
        ...

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        """Texts for people, such as validation samples. All rows have the same keys."""
        ...

    def finish(self) -> None:
        """Send what is left. Not called if ``start`` has raised."""
        ...


@runtime_checkable
class UsesDisplay(Protocol):
    """A tracker that prints."""

    display: Display | None


def require(package: str, tracker: str) -> None:
    """Refuse a tracker whose package is not installed, before the run starts."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            [
                f"trainer.trackers: {tracker} needs the package {package}, which is not installed; "
                f"pip install 'headwater[{tracker}]', or remove {tracker}"
            ]
        )


@dataclass
class _Lost:
    """What a tracker did not take."""

    num_records: int = 0
    first: str = ""
    """Why, in words."""


class _Worker:
    """One tracker, its thread and the calls that wait for it."""

    def __init__(self, name: str, tracker: Tracker, start: Callable[[Tracker], None]) -> None:
        self.name = name
        self._tracker = tracker
        self._start = start
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_WAITING)
        self._lost = _Lost()
        self._is_done = False
        self._ended = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        """Make a call later. It never waits: if the tracker is too slow, the call is lost and counted."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lose(f"is too slow: {_MOST_WAITING} records wait for it")

    def finish(self, limit_s: float) -> str:
        """Wait for the calls that are left. Returns what was lost, in words; empty if nothing was."""

        def closed() -> bool:
            try:
                self._calls.put_nowait(None)
            except queue.Full:
                return False
            return True

        def describe() -> str:
            return f"the tracker {self.name} has {self._calls.qsize()} records left to take"

        wait = partial(wait_until, self._ended, describe=describe, kind="tracker", hard_limit_s=limit_s)
        try:
            with self._ended:
                wait(lambda: self._is_done or closed())
                wait(lambda: self._is_done)
        except WaitTimeout:
            self._lost.num_records += self._calls.qsize()
            return f"tracker {self.name}: did not end within {limit_s:.0f} s{self._described()}"
        return f"tracker {self.name}{self._described()}" if self._lost.num_records else ""

    def _described(self) -> str:
        lost = self._lost
        return f": {lost.num_records} records were lost; the first cause: {lost.first}" if lost.num_records else ""

    def _run(self) -> None:
        try:
            is_started = self._called(self._start)
            while (call := self._calls.get()) is not None:
                if not is_started:
                    self._lost.num_records += 1
                else:
                    self._called(call)
            if is_started:
                self._called(lambda tracker: tracker.finish())
        finally:
            with self._ended:
                self._is_done = True
                self._ended.notify_all()

    def _called(self, call: Callable[[Tracker], None]) -> bool:
        try:
            call(self._tracker)
        except BaseException as error:  # noqa: BLE001  foreign code, which must not end the run, also not by SystemExit
            self._lose(f"{type(error).__name__}: {error}")
            return False
        return True

    def _lose(self, reason: str) -> None:
        self._lost.num_records += 1
        if not self._lost.first:
            self._lost.first = reason[:500]
            logger.warning("tracker %s: %s; training continues, and metrics.jsonl has everything", self.name, reason)


@dataclass
class Trackers:
    """All trackers of a run. Its calls return at once.

    trackers = Trackers.of(config.trainer.trackers, config.trainer.tracker_args)
    trackers.start(asdict(config), "my-run", project="headwater", folder=run.path / "trackers")
    trackers.log(1, {"reward/mean": 0.5})
    problems = trackers.finish()
    """

    made: Mapping[str, Tracker] = field(default_factory=dict)
    """By the name in ``trainer.trackers``."""
    _workers: list[_Worker] = field(default_factory=list)

    @classmethod
    def of(cls, names: Sequence[str], arguments: Mapping[str, Any], display: Display | None = None) -> Trackers:
        """Build the trackers of a config. Raises for wrong arguments and packages that are not installed.

        A tracker with the attribute ``display`` gets that of the run, so that its lines do not break the progress bar.
        """
        made: dict[str, Tracker] = {}
        for name in names:
            given = arguments.get(name, {})
            if not isinstance(given, Mapping):
                raise ConfigError([f"trainer.tracker_args.{name} = {given!r}: must be a mapping of arguments"])
            key = f"trainer.tracker_args.{name}"
            tracker = made[name] = with_arguments(TRACKERS, name, given, key)()
            if isinstance(tracker, UsesDisplay):
                tracker.display = display
        return cls(made)

    def start(self, config: Mapping[str, Any], name: str, *, project: str, folder: Path) -> None:
        config = _plain(config)
        for own, tracker in self.made.items():
            place = folder / (own.rpartition(":")[2] if is_path(own) else own)

            def start(tracker: Tracker, place: Path = place) -> None:
                tracker.start(config, name, project=project, folder=place)

            self._workers.append(_Worker(own, tracker, start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for worker in self._workers:
            worker.put(lambda tracker: tracker.log(step, metrics))

    def table(self, step: int, name: str, rows: TableRecords) -> None:
        for worker in self._workers:
            worker.put(lambda tracker: tracker.table(step, name, rows))

    def finish(self, limit_s: float = FINISH_LIMIT_S) -> list[str]:
        """Wait until all trackers have ended. Returns a sentence for each one that lost something."""
        workers, self._workers = self._workers, []
        return [problem for worker in workers if (problem := worker.finish(limit_s))]


def _plain(value: Any) -> Any:
    """Settings as lists, texts and numbers, which every tracker can store."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
