"""What a run does at this moment, in a file that others read: ``headwater doctor``, or you."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from headwater.core.waits import open_waits
from headwater.observe.process import process_start
from headwater.observe.recent_log import RecentLog
from headwater.observe.whole_file import write_whole

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
_MAX_ERROR_CHARACTERS = 4000
_LAST_READ_LIMIT_S = 5.0


class StatusFile:
    """Writes ``status.json`` every two seconds while a run lives, and once more when it ends.

        with StatusFile(run.status_file, trainer.status) as status:
            if not trainer.fit():
                status.state = "interrupted"

    If nobody sets it, the state at the end is "finished", "interrupted" after Ctrl-C or "failed: ..." after an error.
    ``read`` is called from the writing thread and answers what JSON can hold. The doctor knows ``step``,
    ``total_steps``, ``version``, ``ledger`` (counts), ``oldest`` (groups: ``id``, ``uid``, ``seconds``, ``doing``),
    ``capacity``, ``drop_reasons`` (with their counts), ``engine_restarts`` and ``stage`` (what goes on outside the
    steps: ``name``, ``done``, ``total``); each may be missing. A ``read`` that raises costs nothing but news: the
    file keeps what was read last.
    """

    def __init__(self, path: Path, read: Callable[[], Mapping[str, Any]], every_s: float = HEARTBEAT_S) -> None:
        self.state = "running"
        self._path = path
        self._read = read
        self._every_s = every_s
        self._error = ""
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
        # A reading that hangs must not keep the run from ending; then the last one that came through is written.
        self._thread.join(_LAST_READ_LIMIT_S)
        if self.state == "running":
            self.state = _state_after(error)
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
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
        except Exception as error:  # noqa: BLE001  what is read changes meanwhile; the heartbeat matters more
            self._last_read["read_error"] = f"{type(error).__name__}: {error}"

    def _write(self) -> None:
        try:
            write_whole(self._path, json.dumps(self._content(), indent=1, default=str))
            self._write_failed = False
        except OSError as error:
            if not self._write_failed:
                logger.warning("%s cannot be written: %s", self._path, error)
            self._write_failed = True

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
            "waits": [
                asdict(each) | {"hard_limit_s": each.hard_limit_s if math.isfinite(each.hard_limit_s) else None}
                for each in open_waits()
            ],
            "log": [asdict(line) for line in self._log.lines()],
        }


def _state_after(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    first_line = str(error).partition("\n")[0] or type(error).__name__
    return f"failed: {first_line}"
