"""The watch of ranks: signs of life and errors in the launcher's store, read by a thread of every rank."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from headwater.cluster.turns import EndedRank
from headwater.core.errors import HeadwaterError, OtherRankFailed
from headwater.core.processes import process_start

logger = logging.getLogger(__name__)

_SILENCE_S = 45.0
"""A rank on another machine that gives no sign of life for this long has ended."""
_QUIET_S = 10.0
"""A rank that gives no sign of life for this long is named if a call does not end."""
_LOOK_S = 1.0
_STOP_S = 10.0


class RankWatch:
    """Signs of life in the launcher's store: rank 0 watches all other ranks, and they watch rank 0."""

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._watched = range(1, num_ranks) if rank == 0 else range(1)
        self._lock = threading.Lock()
        self._gone: dict[int, EndedRank] = {}
        self._alive_at = dict.fromkeys(self._watched, time.time())
        self._last_sign: dict[int, tuple[bytes, float]] = {}
        self._silent_s: dict[int, float] = {}
        """How old the last sign of life of each rank was when it was last looked for."""
        self._stop = threading.Event()
        self.on_gone: Callable[[], None] = lambda: None
        machine = _machine()
        store.set(f"process/{rank}", f"{machine}|{os.getpid()}|{process_start(os.getpid())}")
        self._processes: dict[int, tuple[int, str] | None] = {}
        for each in self._watched:
            where, pid, start = store.get(f"process/{each}").decode().split("|")
            self._processes[each] = (int(pid), start) if where == machine else None
        self._thread = threading.Thread(target=self._run, name="watch of ranks", daemon=True)
        self._thread.start()

    def report(self, call: int, error: BaseException) -> None:
        """Tell rank 0 why this rank failed in its call number ``call``."""
        with suppress(RuntimeError):  # the launcher has ended, and rank 0 with it
            self._store.set(f"error/{self._rank}/{call}", error_text(error))

    def reported(self, call: int) -> tuple[int, str] | None:
        """The first rank that has failed in this call, and its error."""
        for rank in self._watched:
            key = f"error/{rank}/{call}"
            try:
                if self._store.check([key]):
                    return rank, self._store.get(key).decode()
            except RuntimeError:
                return None  # the launcher has ended; the thread of this watch reports it
        return None

    def gone(self) -> str:
        """Which rank has ended, and what is known about it; empty while all of them live."""
        return "; ".join(f"rank {rank}: {each.cause}" for rank, each in self.ended().items())

    def ended(self) -> dict[int, EndedRank]:
        """The ranks that have ended, and what is known about it."""
        with self._lock:
            for rank in self._watched:
                process = self._processes[rank]
                if rank in self._gone or process is None:
                    continue
                if str(process_start(process[0])) == process[1]:
                    self._alive_at[rank] = time.time()
                else:
                    cause = "its process has ended (killed, out of memory or crashed; see its output)"
                    self._gone[rank] = EndedRank.noticed(cause, self._alive_at[rank])
            return dict(self._gone)

    def quiet(self) -> str:
        """Which ranks give no sign of life, and for how long; empty if all of them do."""
        why = "its process is stopped, or its machine does not answer"
        quiet = ((rank, seconds) for rank, seconds in self._silent_s.items() if seconds > _QUIET_S)
        return "; ".join(f"rank {rank}: no sign of life for {seconds:.0f} s ({why})" for rank, seconds in quiet)

    def stop(self) -> bool:
        """Whether the thread has ended. If the interpreter ended first, a call of the store would abort the process."""
        self._stop.set()
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(_LOOK_S):
            beat += 1
            try:
                self._store.set(f"alive/{self._rank}", str(beat))
                self._listen()
            except RuntimeError:
                if not self._stop.is_set():
                    logger.warning("rank %d: the launcher has ended", self._rank)
                    self.on_gone()
                return
            if self.gone():
                self.on_gone()
                return

    def _listen(self) -> None:
        """Look for signs of life. The process of a rank on another machine cannot be seen from here, so its silence
        means that it has ended."""
        for rank in self._watched:
            if not self._store.check([f"alive/{rank}"]):
                continue
            is_elsewhere, sign, now = self._processes[rank] is None, self._store.get(f"alive/{rank}"), time.monotonic()
            last, since = self._last_sign.get(rank, (b"", now))
            if sign != last:
                self._last_sign[rank], since = (sign, now), now
                if is_elsewhere:
                    self._alive_at[rank] = time.time()
            self._silent_s[rank] = now - since
            if is_elsewhere and now - since > _SILENCE_S:
                cause = f"no sign of life for {_SILENCE_S:.0f} s (its process or its machine has ended)"
                with self._lock:
                    self._gone[rank] = EndedRank.noticed(cause, self._alive_at[rank])


def error_text(error: BaseException) -> str:
    """What rank 0 shows of an error; empty if it only says that another rank has failed."""
    if isinstance(error, OtherRankFailed):
        return ""
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {text}"


def _machine() -> str:
    """The same text for processes that can see each other, which those of different containers cannot."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
