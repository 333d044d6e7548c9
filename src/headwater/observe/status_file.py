"""``status.json``: what a run is doing at this moment. The run writes it, ``headwater doctor`` reads it."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from headwater.core.capabilities import ServerStatus
from headwater.core.errors import DiskFull, HeadwaterError, RunError
from headwater.core.learner import RankStatus
from headwater.core.processes import process_start
from headwater.core.records import DropKind
from headwater.core.waits import OpenWait, open_waits
from headwater.observe.run_directory import write_whole

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
_MAX_ERROR_CHARACTERS = 4000
_MAX_LOG_CHARACTERS = 500
_LAST_READ_LIMIT_S = 5.0

RunState = Literal["running", "finished", "interrupted", "failed"]
FailureKind = Literal["", "disk_full", "other"]
"""Why a run failed, as far as that decides what to do next; empty if it did not fail."""
ENGINE_FIELDS = ("num_running", "num_waiting", "is_paused", "is_asleep", "metrics")
"""What ``engine`` has in the file, of ``EngineStatus``."""
COUNTS = ("dispatched", "trained", "dropped", "buffered", "in_flight")


@dataclass(frozen=True)
class LogLine:
    time: float
    level: str
    message: str


@dataclass(frozen=True)
class StageProgress:
    """The progress of a stage outside the training steps, such as the supervised warm start."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class RunningGroup:
    id: int
    uid: str
    seconds: float
    stages: Mapping[str, int]
    """How many of its episodes are in each stage (``EpisodeStage``)."""
    doing: str
    """The same in words, for people."""


@dataclass(frozen=True)
class Drops:
    """Groups that were dropped for one kind of reason, or scoring calls that failed for one cause."""

    count: int
    message: str
    """The message of one of them."""


@dataclass(frozen=True)
class RunStatus:
    """The content of ``status.json``: the state of a run at ``time``."""

    pid: int
    host: str
    process_start: str | None
    started: float
    time: float
    state: RunState
    error: str
    waits: tuple[OpenWait, ...]
    log: tuple[LogLine, ...]
    failure: FailureKind = ""
    read_error: str = ""
    """Why the fields below could not be updated at ``time``. They are then older."""
    step: int | None = None
    total_steps: int | None = None
    version: int | None = None
    counts: Mapping[str, int] | None = None
    oldest_groups: tuple[RunningGroup, ...] = ()
    episodes: Mapping[str, int] = field(default_factory=dict)
    """How many episodes of all running groups are in each stage."""
    capacity: int | None = None
    drops: Mapping[DropKind, Drops] = field(default_factory=dict)
    reward_failures: Mapping[str, Drops] = field(default_factory=dict)
    """Failed scoring calls by cause."""
    engine_restarts: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    """``ENGINE_FIELDS`` of what generates; empty in files of earlier versions."""
    servers: tuple[ServerStatus, ...] = ()
    """The servers that generate, if there are several."""
    num_ranks: int = 1
    ranks: tuple[RankStatus, ...] = ()
    """The processes that train together."""
    learner_failure: str = ""
    """Why the learner cannot be used any more, such as a rank that has ended."""
    stage: StageProgress | None = None
    notices: tuple[str, ...] = ()
    """What has no effect in this run although someone asked for it."""


class RecentLog(logging.Handler):
    """Keeps the newest log records of level warning and above."""

    def __init__(self, count: int = 20) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[LogLine] = deque(maxlen=count)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the caller's arguments do not fit its message
            message = str(record.msg)
        self._lines.append(LogLine(record.created, record.levelname, message[:_MAX_LOG_CHARACTERS]))

    def lines(self) -> list[LogLine]:
        """Oldest first."""
        return list(self._lines)


class StatusFile:
    """Writes ``status.json`` every two seconds while a run is alive, and a last time when it ends.

        with StatusFile(run.status_file, trainer.status) as status:
            if not trainer.fit():
                status.state = "interrupted"

    Unless it was set, the final state is "finished", "interrupted" after Ctrl-C, or "failed" after an error.
    ``read`` is called on the writing thread and returns values that JSON can hold. The doctor uses ``step``,
    ``total_steps``, ``version``, ``ledger`` (counts), ``oldest`` (see ``RunningGroup``), ``episodes`` (counts by
    stage), ``capacity``, ``drops`` (kind to count and message), ``reward_failures`` (cause to count and message),
    ``engine`` (see ``ENGINE_FIELDS``), ``engine_restarts``, ``servers`` (see ``ServerStatus``), ``learner`` (see
    ``LearnerStatus``), ``notices`` (texts) and ``stage`` (see ``StageProgress``). All of them are optional. If ``read``
    raises, the file keeps the values of the last successful call.
    """

    def __init__(self, path: Path, read: Callable[[], Mapping[str, Any]], every_s: float = HEARTBEAT_S) -> None:
        self.state: RunState = "running"
        self._path = path
        self._read = read
        self._every_s = every_s
        self._error = ""
        self._failure: FailureKind = ""
        self._last_read: dict[str, Any] = {}
        self._log = RecentLog()
        self._started = time.time()
        self._process_start = process_start(os.getpid())
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-status", daemon=True)
        self._write_failed = False

    def __enter__(self) -> StatusFile:
        logging.getLogger("headwater").addHandler(self._log)
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger("headwater").removeHandler(self._log)
        self._ending.set()
        # If ``read`` hangs, the run must still end. Then the values of the last successful call are written.
        self._thread.join(_LAST_READ_LIMIT_S)
        if self.state == "running":
            self.state = _state_after(error)
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
        if self.state == "failed":
            self._failure = "disk_full" if isinstance(error, DiskFull) else "other"
        if not self._thread.is_alive():
            self._take_reading()
        self._write()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._take_reading()
            if not self._ending.is_set():
                self._write()

    def _take_reading(self) -> None:
        try:
            self._last_read = {**self._read(), "read_error": ""}
        except Exception as error:  # noqa: BLE001  the state may change while it is read; the heartbeat matters more
            self._last_read["read_error"] = f"{type(error).__name__}: {error}"

    def _write(self) -> None:
        try:
            try:
                write_whole(self._path, json.dumps(self._content(), indent=1, default=str))
            except DiskFull:
                self._write_in_place()
            self._write_failed = False
        except (OSError, HeadwaterError) as error:
            if not self._write_failed:
                logger.warning("%s cannot be written: %s", self._path, error)
            self._write_failed = True

    def _write_in_place(self) -> None:
        """On a full disk: replace the content of the file, whose space is already allocated, by the most important."""
        content = {**self._content(), "waits": [], "oldest": [], "log": []}
        short = json.dumps(content, default=str).encode()
        with self._path.open("r+b") as file:
            present = os.fstat(file.fileno())
            if len(short) > max(present.st_size, 512 * present.st_blocks):
                raise OSError(f"{len(short)} bytes do not fit into the present file, and the disk is full")
            file.write(short)
            file.truncate()

    def _content(self) -> dict[str, Any]:
        return {
            **self._last_read,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "process_start": self._process_start,
            "started": self._started,
            "time": time.time(),
            "state": self.state,
            "error": self._error,
            "failure": self._failure,
            "waits": [
                asdict(each) | {"hard_limit_s": each.hard_limit_s if math.isfinite(each.hard_limit_s) else None}
                for each in open_waits()
            ],
            "log": [asdict(line) for line in self._log.lines()],
        }


def _state_after(error: BaseException | None) -> RunState:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def read_status(path: Path) -> RunStatus | None:
    """None if there is no such file, because the run has not begun."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error})") from error
    try:
        return _parse(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _parse(content: dict[str, Any]) -> RunStatus:
    if content["state"] not in get_args(RunState):
        raise ValueError(f"state = {content['state']!r}")
    failure = content.get("failure", "")
    if failure not in get_args(FailureKind):
        raise ValueError(f"failure = {failure!r}")
    return RunStatus(
        pid=int(content["pid"]),
        host=str(content["host"]),
        process_start=None if content["process_start"] is None else str(content["process_start"]),
        started=float(content["started"]),
        time=float(content["time"]),
        state=content["state"],
        error=str(content["error"]),
        failure=failure,
        waits=tuple(_wait(**each) for each in content["waits"]),
        log=tuple(LogLine(float(each["time"]), str(each["level"]), str(each["message"])) for each in content["log"]),
        read_error=str(content.get("read_error", "")),
        step=_whole(content.get("step")),
        total_steps=_whole(content.get("total_steps")),
        version=_whole(content.get("version")),
        counts=read_counts(content["ledger"]) if content.get("ledger") else None,
        oldest_groups=tuple(_group(each) for each in content.get("oldest", ())),
        episodes=_stages(content.get("episodes", {})),
        capacity=_whole(content.get("capacity")),
        drops={
            DropKind(kind): Drops(int(each["count"]), str(each["message"]))
            for kind, each in content.get("drops", {}).items()
        },
        reward_failures={
            str(cause): Drops(int(each["count"]), str(each["message"]))
            for cause, each in content.get("reward_failures", {}).items()
        },
        engine_restarts=int(content.get("engine_restarts", 0)),
        engine=dict(content.get("engine", {})),
        servers=tuple(_server(each) for each in content.get("servers", ())),
        num_ranks=int(content.get("learner", {}).get("num_ranks", 1)),
        ranks=tuple(_rank(each) for each in content.get("learner", {}).get("ranks", ())),
        learner_failure=str(content.get("learner", {}).get("failure", "")),
        stage=_stage(**content["stage"]) if content.get("stage") else None,
        notices=tuple(map(str, content.get("notices", ()))),
    )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _group(content: Mapping[str, Any]) -> RunningGroup:
    return RunningGroup(
        id=int(content["id"]),
        uid=str(content["uid"]),
        seconds=float(content["seconds"]),
        stages=_stages(content.get("stages", {})),
        doing=str(content["doing"]),
    )


def _server(content: Mapping[str, Any]) -> ServerStatus:
    return ServerStatus(
        name=str(content["name"]),
        url=str(content["url"]),
        version=int(content["version"]),
        num_running=int(content["num_running"]),
        num_waiting=int(content["num_waiting"]),
        is_alive=bool(content["is_alive"]),
        num_restarts=int(content["num_restarts"]),
        state=str(content["state"]),
        needs_weights=bool(content.get("needs_weights", False)),
    )


def _rank(content: Mapping[str, Any]) -> RankStatus:
    return RankStatus(
        rank=int(content["rank"]),
        host=str(content["host"]),
        pid=int(content["pid"]),
        device=str(content["device"]),
        peak_memory_bytes=int(content["peak_memory_bytes"]),
        state=str(content["state"]),
        last_call=str(content["last_call"]),
        is_alive=bool(content["is_alive"]),
        alive_at=None if content.get("alive_at") is None else float(content["alive_at"]),
    )


def _stages(counts: Mapping[str, Any]) -> dict[str, int]:
    return {str(stage): int(count) for stage, count in counts.items()}


def _stage(name: Any, done: Any, total: Any) -> StageProgress:
    return StageProgress(str(name), int(done), int(total))


def _wait(kind: Any, description: Any, seconds: Any, hard_limit_s: Any, thread_name: Any) -> OpenWait:
    # JSON has no infinity.
    limit_s = math.inf if hard_limit_s is None else float(hard_limit_s)
    return OpenWait(str(kind), str(description), float(seconds), limit_s, str(thread_name))


def read_counts(content: Mapping[str, Any]) -> dict[str, int]:
    """The five counts of the ledger. Other keys are ignored."""
    return {name: int(content[name]) for name in COUNTS}
