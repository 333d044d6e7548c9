"""An index over all rollouts of a run, built in the background from the newest step to the oldest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.dashboard.errors import Refused
from headwater.dashboard.rollout_files import FACTS, AllNames, OpenFile, RolloutFile, RolloutFiles

_BLOCK_ROWS = 1 << 16
_MOST_PROBLEMS = 20
_YIELD_S = 0.0005
"""The builder pauses this long after each file, so that requests are answered meanwhile."""


class RolloutIndex:
    """``FACTS`` of every rollout. ``start`` builds it in a thread; queries use what is there.

        index.start()
        for block in index.blocks(): ...

    Files of rollouts are written once. ``start`` adds those that came after the last call.
    """

    def __init__(self, files: RolloutFiles) -> None:
        self.names = AllNames()
        self.problems: list[str] = []
        self._files = files
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        """By the key of a file: its number in ``FACTS``."""
        self._read: list[RolloutFile] = []
        self._blocks: list[NDArray[np.void]] = []
        self._open: list[NDArray[np.void]] = []
        self._num_open = 0
        self._rows_of_file: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, wait_s: float = 0.0) -> None:
        """Index the files that are new, and wait for them up to ``wait_s``."""
        with self._lock:
            is_new = any(file.key not in self._numbers for file in self._files.files())
            if is_new and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._build, name="rollout index", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None and wait_s > 0:
            thread.join(wait_s)

    def stop(self) -> None:
        self._stop.set()

    def state(self) -> dict[str, Any]:
        with self._lock:
            files = self._files.files()
            done = sum(file.key in self._numbers for file in files)
            if done >= len(files) and self._thread is not None:
                return {"state": "ready", "done": done, "total": len(files)}
            is_building = self._thread is not None and self._thread.is_alive()
            return {"state": "building" if is_building else "none", "done": done, "total": len(files)}

    def blocks(self) -> list[NDArray[np.void]]:
        """What is indexed now, without files that a newer one replaces."""
        with self._lock:
            if self._open:
                self._open = [np.concatenate(self._open)]
            current = {file.key for file in self._files.files()}
            is_current = np.array([file.key in current for file in self._read], bool)
            blocks = [*self._blocks, *self._open]
        if is_current.all():
            return blocks
        return [block[is_current[block["file"]]] for block in blocks]

    def files(self) -> list[RolloutFile]:
        """By their number in ``FACTS``."""
        with self._lock:
            return list(self._read)

    def rows_of(self, files: Iterable[RolloutFile]) -> dict[int, int]:
        """The number of rollouts of each step, as far as its ``files`` are indexed."""
        found: dict[int, int] = {}
        with self._lock:
            for file in files:
                if file.key in self._rows_of_file:
                    found[file.step] = found.get(file.step, 0) + self._rows_of_file[file.key]
        return found

    def _build(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                missing = [file for file in self._files.files() if file.key not in self._numbers]
            if not missing:
                break
            for file in reversed(missing):
                if self._stop.is_set():
                    return
                self._add(file)
                time.sleep(_YIELD_S)
        pa.default_memory_pool().release_unused()

    def _add(self, file: RolloutFile) -> None:
        number = len(self._read)
        try:
            with OpenFile(file) as opened:
                facts = opened.facts(number, self.names)
        except Refused as refused:
            facts = np.zeros(0, FACTS)
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(refused.message)
        with self._lock:
            self._numbers[file.key] = number
            self._read.append(file)
            self._rows_of_file[file.key] = len(facts)
            if len(facts):
                self._open.append(facts)
                self._num_open += len(facts)
            if self._num_open >= _BLOCK_ROWS:
                self._blocks.append(np.concatenate(self._open))
                self._open, self._num_open = [], 0
