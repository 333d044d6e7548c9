"""Reward workers: processes that call scoring functions, so that neither their work nor their faults reach the engine.

    pool = WorkerPool(num_workers=2)                                        # for plain functions
    pool = WorkerPool(num_workers=1, max_concurrent=256)                    # for async functions
    reply = await pool.call(function, arguments, None, timeout_s=60.0)      # scores, or a ``Failure``
    pool.close()

Workers start when there is enough work for them. Short calls travel in batches of about five milliseconds of work. A
call that takes too long, or ends its worker, fails alone: the worker's process group is killed, and its other calls
are given to another worker.

Nothing tells which of several async calls ended their worker. They are repeated in two halves, each in a separate
worker, and a half whose worker dies is divided again, until the call that does it is alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import pickle
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.core.errors import HeadwaterError
from headwater.rewards.functions import Failure, Scorable
from headwater.rewards.worker import Message
from headwater.rewards.worker_process import Call, Reply, WorkerProcess, read_reply

logger = logging.getLogger(__name__)

_BATCH_S = 0.005
"""Work that is sent to a worker at once. Longer batches would keep calls behind a slow one."""
_MAX_BATCH = 256
_WORTH_STARTING_S = 0.05
"""Another worker starts if calls have waited this long, or if that much work waits. Starting one takes that, too."""
_START_LIMIT_S = 300.0
"""Limit for importing a function in a worker, which may have to start first."""
_CANCEL_LIMIT_S = 5.0
"""How long an async function may take to end after it was cancelled. Then its event loop must be blocked."""
_MAX_RESERVED = 2
"""Additional workers for calls of a worker that died."""
TIMED_OUT = Failure("timed_out", "did not end within its time limit")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CallPool(Protocol):
    """Calls scoring functions in other processes."""

    async def call(
        self, function: Scorable, arguments: Mapping[str, Any], count: int | None, timeout_s: float
    ) -> Reply: ...
    def start(self, function: Scorable) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Pace:
    """How long the calls of one function take: the longest of the recent ones, forgotten by a tenth with every call."""

    seconds: float = _BATCH_S

    def note(self, seconds: float) -> None:
        self.seconds = max(seconds, 0.9 * self.seconds)


class WorkerPool:
    """Starts, supervises and replaces the workers. All calls come from one event loop at a time."""

    def __init__(self, num_workers: int, max_concurrent: int = 0) -> None:
        """``max_concurrent`` is the number of async calls that a worker runs at once; 0 is for plain functions."""
        self.num_replaced = 0
        """Workers that died, or were killed because of a call."""
        self._num_workers = num_workers
        self._max_concurrent = max_concurrent
        self._keys: dict[Scorable, str] = {}
        self._loads: dict[str, Message] = {}
        self._paces: dict[str, _Pace] = {}
        self._waiting: deque[Call] = deque()
        self._suspects: deque[list[Call]] = deque()
        """Calls that ran together in a worker that died. Each list waits for a worker that gets no other calls."""
        self._workers: list[WorkerProcess] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count()
        self._is_flushing = False
        self._patience: asyncio.TimerHandle | None = None
        self._is_closed = False
        weakref.finalize(self, _end_all, self._workers)  # for managers that nothing closes

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._workers]

    async def call(
        self, function: Scorable, arguments: Mapping[str, Any], count: int | None, timeout_s: float
    ) -> Reply:
        """Call ``function`` in a worker. The time limit begins when the call does, not while it waits."""
        loop = self._attach()
        try:
            content = pickle.dumps(dict(arguments), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  pickling calls code of the values
            text = f"takes values that cannot be sent to a worker process ({error}); set reward.where=threads"
            return Failure("bad_arguments", text)
        call = Call(next(self._ids), self._key(function), content, count, timeout_s, loop.create_future())
        self._waiting.append(call)
        self._flush_soon()
        try:
            return await call.reply
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    def start(self, function: Scorable) -> None:
        """Start a worker and load a function there, before there is a call."""
        self._send(self._start_worker(), [], self._key(function))

    def close(self) -> None:
        """Kill all workers. Calls that still wait get no answer: their event loop has ended, or they were cancelled."""
        self._is_closed = True
        for worker in list(self._workers):
            self._end(worker)

    # Sending

    def _key(self, function: Scorable) -> str:
        if function not in self._keys:
            self._keys[function] = key = str(len(self._keys))
            self._loads[key] = ("load", key, function.path, dict(function.settings))
            self._paces[key] = _Pace()
        return self._keys[function]

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Use the running event loop. Workers that still run calls of an earlier one are ended."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise HeadwaterError("the reward workers are closed, because the run has ended")
        if loop is self._loop:
            return loop
        if self._loop is not None and not self._loop.is_closed():
            raise HeadwaterError("a reward manager is used by two event loops at once; make one for each")
        self._loop, self._is_flushing, self._patience = loop, False, None
        self._waiting.clear()
        self._suspects.clear()
        for worker in list(self._workers):
            if worker.calls:
                self._end(worker)
            else:
                worker.attach(loop, self._read)
        return loop

    def _flush_soon(self) -> None:
        """Send once per round of the event loop, so that calls which arrive together travel together."""
        if not self._is_flushing and self._loop is not None:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self, *, have_waited: bool = False) -> None:
        self._is_flushing = False
        self._repeat_suspects()
        while self._waiting:
            try:
                worker = self._free_worker()
            except OSError as error:
                self._waiting.popleft().settle(_cannot_start(error))
                continue
            if worker is None:
                self._start_more(len(self._waiting) if have_waited else int(self._has_much_work()))
                self._flush_if_still_waiting()
                return
            self._send(worker, self._take_batch(worker))

    def _repeat_suspects(self) -> None:
        while self._suspects and len(self._workers) - len(self._open_workers) < _MAX_RESERVED:
            calls = [each for each in self._suspects.popleft() if not each.reply.done()]
            if not calls:
                continue
            try:
                worker = self._start_worker()
            except OSError as error:
                for call in calls:
                    call.settle(_cannot_start(error))
                continue
            worker.is_reserved = True
            self._send(worker, calls)

    @property
    def _open_workers(self) -> list[WorkerProcess]:
        return [each for each in self._workers if not each.is_reserved]

    def _flush_if_still_waiting(self) -> None:
        """Look again later: a call that takes long says nothing about its duration before it ends."""
        if self._patience is None and self._loop is not None and len(self._open_workers) < self._num_workers:
            self._patience = self._loop.call_later(_WORTH_STARTING_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._patience = None
        is_loading = any(not all(each.loaded.values()) for each in self._workers)
        self._flush(have_waited=not is_loading)

    def _has_much_work(self) -> bool:
        known = all(all(each.loaded.values()) for each in self._workers)
        return known and len(self._waiting) * self._paces[self._waiting[0].key].seconds > _WORTH_STARTING_S

    def _free_worker(self) -> WorkerProcess | None:
        """The worker that gets the next calls; None if all are busy. The first worker always starts."""
        workers = self._open_workers
        if not workers:
            return self._start_worker()
        # Starting takes longer than many calls, so calls wait for a worker that starts only if there is no other.
        ready = [each for each in workers if any(each.loaded.values())]
        least = min(ready or workers, key=lambda each: len(each.calls))
        return least if len(least.calls) < max(1, self._max_concurrent) else None

    def _start_more(self, count: int) -> None:
        """Start up to ``count`` more workers. They get calls when they have loaded the function that is needed now."""
        for _ in range(min(count, self._num_workers - len(self._open_workers))):
            try:
                self._send(self._start_worker(), [], self._waiting[0].key)
            except OSError as error:  # the workers that there are do the work
                self._settle_for_fewer(str(error))

    def _settle_for_fewer(self, reason: str) -> None:
        self._num_workers = max(1, len(self._open_workers))
        logger.warning("a reward worker cannot start (%s); there are %d", reason, self._num_workers)

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess.start(is_async=self._max_concurrent > 0)
        self._workers.append(worker)
        if self._loop is not None:
            worker.attach(self._loop, self._read)
        return worker

    def _take_batch(self, worker: WorkerProcess) -> list[Call]:
        """The next calls: a fair share of those that wait, and not more than a few milliseconds of work."""
        if self._max_concurrent:
            limit = self._max_concurrent - len(worker.calls)
        else:
            # A fair share, but as many as fit into a batch if recent calls were that quick: each of many small batches
            # would wait for its turn in an interpreter that generates at the same time.
            pace = self._paces[self._waiting[0].key].seconds
            share = math.ceil(len(self._waiting) / self._num_workers)
            limit = min(_MAX_BATCH, max(share, int(_BATCH_S / max(pace, 1e-9))))
        batch: list[Call] = []
        seconds = 0.0
        while self._waiting and len(batch) < limit and (seconds < _BATCH_S or self._max_concurrent):
            call = self._waiting.popleft()
            if not call.reply.done():
                batch.append(call)
                seconds += self._paces[call.key].seconds
        return batch

    def _send(self, worker: WorkerProcess, calls: Sequence[Call], *keys: str) -> None:
        messages: list[Message] = []
        for key in dict.fromkeys([*keys, *(call.key for call in calls)]):
            if key not in worker.loaded:
                worker.loaded[key] = False
                messages.append(self._loads[key])
        for call in calls:
            worker.calls[call.id] = call
            messages.append(("call", call.id, call.key, call.arguments, call.count))
        if messages:
            worker.post(messages, self._loop)
        self._begin(worker)

    # Receiving

    def _read(self, worker: WorkerProcess) -> None:
        messages = worker.receive()
        if messages is None:
            self._on_death(worker)
            return
        for message in messages:
            self._take(worker, message)
        if worker.is_reserved and not worker.calls:
            self._end(worker)
        else:
            self._begin(worker)
        if self._waiting or self._suspects:
            self._flush()

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        if message[0] == "done":
            _, number, reply, seconds = message
            if (call := worker.calls.pop(number, None)) is not None:
                self._paces[call.key].note(seconds)
                call.settle(read_reply(reply))
            return
        _, key, failure = message
        worker.loaded[key] = True
        if failure is None:
            return
        del worker.loaded[key]  # the next call tries again
        for call in [each for each in worker.calls.values() if each.key == key]:
            del worker.calls[call.id]
            call.settle(failure)

    # Time limits and deaths

    def _begin(self, worker: WorkerProcess) -> None:
        """Give a deadline to functions that are loading and to calls that run now, and look at the deadlines later."""
        if self._loop is None:
            return
        now, limits = self._loop.time(), worker.load_deadlines
        loading = [key for key, is_loaded in worker.loaded.items() if not is_loaded]
        worker.load_deadlines = limits = {key: limits.get(key, now + _START_LIMIT_S) for key in loading}
        if not worker.calls:
            return
        for call in worker.running():
            if math.isinf(call.deadline):
                call.deadline = now + call.timeout_s
        first = min([*(call.deadline for call in worker.running()), *limits.values()])
        if worker.watch is None or worker.watch.when() > first:
            if worker.watch is not None:
                worker.watch.cancel()
            worker.watch = self._loop.call_at(first, self._look, worker)

    def _look(self, worker: WorkerProcess) -> None:
        assert self._loop is not None
        worker.watch, now = None, self._loop.time()
        overdue = [call for call in worker.running() if call.deadline <= now]
        late = [key for key, deadline in worker.load_deadlines.items() if deadline <= now]
        if late and worker.calls:
            failure = Failure("not_loaded", f"was not loaded by a reward worker within {_START_LIMIT_S:g} s")
            self._end(worker)
            self._replace(worker, failure, [call for call in worker.calls.values() if call.key in late])
            return
        if overdue and (not worker.is_async or any(call.is_cancelled for call in overdue)):
            self._end(worker)
            self._replace(worker, TIMED_OUT, overdue if worker.is_async else worker.culprits())
            return
        for call in overdue:
            call.settle(TIMED_OUT)
            self._cancel(call)
        self._begin(worker)

    def _cancel(self, call: Call) -> None:
        """Nothing needs the reply. An async call is cancelled; a plain one ends by itself, or at its deadline."""
        worker = next((each for each in self._workers if call.id in each.calls), None)
        if worker is None or not worker.is_async or call.is_cancelled or self._loop is None:
            return
        call.is_cancelled = True
        call.deadline = self._loop.time() + _CANCEL_LIMIT_S
        worker.post([("cancel", call.id)], self._loop)

    def _on_death(self, worker: WorkerProcess) -> None:
        how = self._end(worker)
        calls = list(worker.calls.values())
        if worker.is_async and len(calls) > 1 and worker.running():
            self._suspect(worker, how)
        elif calls:
            self._replace(worker, Failure("worker_died", f"ended its worker process, which {how}"), worker.culprits())
        elif not any(worker.loaded.values()) and self._open_workers:
            self._settle_for_fewer(f"it {how}")

    def _suspect(self, worker: WorkerProcess, how: str) -> None:
        """One of several calls has ended its worker. Repeat them in two halves, to find out which."""
        self.num_replaced += 1
        calls = [each for each in worker.calls.values() if not each.reply.done()]
        if not worker.is_reserved:
            logger.warning("a reward worker %s; its %d calls are repeated to find the cause", how, len(calls))
        for call in calls:
            call.deadline = math.inf
        middle = len(calls) // 2
        self._suspects.extend(half for half in (calls[:middle], calls[middle:]) if half)
        self._flush_soon()

    def _replace(self, worker: WorkerProcess, failure: Failure, failed: Sequence[Call]) -> None:
        """Let ``failed`` calls fail, and run the other calls of a worker that has ended elsewhere."""
        self.num_replaced += 1
        for call in failed:
            del worker.calls[call.id]
            call.settle(failure)
        others = [each for each in worker.calls.values() if not each.reply.done()]
        for call in others:
            call.deadline = math.inf
        self._waiting.extendleft(reversed(others))
        self._flush_soon()

    def _end(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        if self._loop is not None and not self._loop.is_closed():
            worker.detach(self._loop)
        return worker.end()


def _cannot_start(error: OSError) -> Failure:
    return Failure("worker_died", f"found no worker: it cannot start ({error})")


def _end_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().end()
