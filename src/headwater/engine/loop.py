"""The engine's loop: schedule, run, take in what was drawn.

With ``overlap`` the next steps are queued on the device before the output of the last ones is read, so the device never
waits for Python; without it every round is read at once. That is the only difference: one round deep, or none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import Tokenizer
from headwater.core.records import StopReason
from headwater.engine.metrics import Throughput
from headwater.engine.plans import NeedsRoom
from headwater.engine.runner import Output, Runner
from headwater.engine.scheduler import Scheduler
from headwater.engine.sequence import Sequence
from headwater.engine.stop_strings import find_stop
from headwater.observe.spans import Spans

_IDLE_S = 0.5
_GATHER_S = 0.001
_GATHER_LIMIT_S = 0.005
_MAX_PREFILLS_PER_ROUND = 16
"""Batches of prompt chunks between two rounds of decoding: enough to fill all rows, and streams do not stall."""


@dataclass(frozen=True)
class Command:
    """Something to do on the loop's thread, and the future of whoever asked for it."""

    action: Callable[[], None]
    done: Future[None]
    after_drain: bool
    keeps_order: bool = False
    """Whether it waits behind commands that wait for a drain."""

    def carry_out(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return  # whoever asked for it has changed their mind
        try:
            self.action()
        except Exception as error:  # noqa: BLE001  the error belongs to the caller, who waits on the future
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


@dataclass(frozen=True)
class Round:
    """Steps that are queued on the device, and whom their output belongs to."""

    output: Output
    lanes: NDArray[np.int64]
    tenancies: NDArray[np.int64]
    version: int


class EngineLoop:
    """Owns scheduler, runner and the thread that drives them; all else talks to it through ``call`` and ``add``."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        num_steps: int,
        overlap: bool,
        row_buckets: Callable[[int], int],
        spans: Spans,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.throughput = Throughput()
        self.is_paused = False
        self.is_asleep = False
        self.num_finished = 0
        self.num_aborted = 0
        self._tokenizer = tokenizer
        self._num_steps = num_steps
        self._depth = 1 if overlap else 0
        self._bucket_of = row_buckets
        self._spans = spans
        self._rounds: deque[Round] = deque()
        self._drained: list[Command] = []
        self._inbox: deque[Sequence | Command] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="headwater-engine", daemon=True)
        self._thread.start()

    # What other threads may call.

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._closing

    def add(self, *sequences: Sequence) -> None:
        self._post(*sequences)

    def call(self, action: Callable[[], None], *, after_drain: bool = False, keeps_order: bool = False) -> Future[None]:
        """Run ``action`` on the loop's thread between two rounds, with nothing queued on the device.

        ``after_drain`` waits until every request that is running has ended, even while the engine is paused; requests
        that have not started go on waiting. ``keeps_order`` waits for drains that were asked for before.
        """
        command = Command(action, Future(), after_drain, keeps_order)
        self._post(command)
        return command.done

    def close(self) -> None:
        """End every request with what it has, then the thread."""
        with self._wakeup:
            # In one go: a request that came between the two would never end.
            self._inbox.append(Command(self._abort_all, Future(), after_drain=False))
            self._closing = True
            self._wakeup.notify()
        self._thread.join()

    def _post(self, *items: Sequence | Command) -> None:
        with self._wakeup:
            if self._failure is not None:
                raise RolloutFailed(f"the engine has stopped: {self._failure}") from self._failure
            if self._closing:
                raise RolloutFailed("the engine is closed")
            self._inbox.extend(items)
            self._wakeup.notify()

    # The thread.

    def _run(self) -> None:
        try:
            self.runner.use_device()
            while self._wait_for_work():
                self._take_inbox()
                if not (self._drained and self._finish_drain()):
                    self._round()
        except Exception as error:  # noqa: BLE001  whatever went wrong belongs to the requests that wait
            self._fail(error)

    def _wait_for_work(self) -> bool:
        with self._wakeup:
            was_idle = not self._has_work()
            while not self._has_work() and not self._inbox and not self._closing:
                self._wakeup.wait(_IDLE_S)
            if self._closing and not self._inbox:
                return False
            if was_idle and not self.is_paused:
                # Requests that belong together arrive one by one; a prompt's samples should share its computation.
                deadline = time.monotonic() + _GATHER_LIMIT_S
                seen = -1
                while len(self._inbox) != seen and time.monotonic() < deadline:
                    seen = len(self._inbox)
                    self._wakeup.wait(_GATHER_S)
                    # Woken by one arrival: give the next the same chance.
        return True

    def _has_work(self) -> bool:
        if self._rounds:
            return True
        if self._drained:
            return not self.is_asleep or not self.scheduler.num_started
        runnable = self.scheduler.num_running or self.scheduler.num_waiting
        return bool(runnable) and not self.is_paused and not self.is_asleep

    def _take_inbox(self) -> None:
        while True:
            with self._wakeup:
                if not self._inbox:
                    return
                item = self._inbox[0]
                must_read = bool(self._rounds) and isinstance(item, Command)
                if not must_read:
                    self._inbox.popleft()
            if must_read:
                self._read_all()  # before it is taken out: should this fail, the command fails with all the others
                continue
            if isinstance(item, Sequence):
                self.scheduler.add(item)
                continue
            if item.after_drain or (item.keeps_order and self._drained):
                self.scheduler.hold()
                self._drained.append(item)
            else:
                item.carry_out()

    def _round(self) -> None:
        """Prompts, then some steps of all rows, then the output of the round before."""
        # What must end before a command can be carried out goes on even while the engine is paused.
        may_run = not self.is_asleep and (not self.is_paused or bool(self._drained))
        with self._spans.span("generate"):
            if may_run:
                self._prefill()
            queued = may_run and self._decode()
            while len(self._rounds) > (self._depth if queued else 0):
                self._read(self._rounds.popleft())

    def _prefill(self) -> None:
        for _ in range(_MAX_PREFILLS_PER_ROUND):
            plan = self.scheduler.plan_prefill()
            if plan is None:
                return
            now = time.perf_counter()
            for lane in plan.started:
                sequence = self.scheduler.lanes.sequence[lane]
                if sequence is not None and sequence.started is None:
                    sequence.started = now
            self.runner.rows.set_pages(*plan.page_updates)
            output = self.runner.prefill(plan.batch)
            if output is not None:
                self._expect(output, np.array(plan.started, np.int64))

    def _decode(self) -> bool:
        self._compact()
        try:
            plan, preempted = self.scheduler.plan_decode(self._num_steps, may_preempt=not self._rounds)
        except NeedsRoom:
            self._read_all()  # now it is known what a preempted sequence has
            plan, preempted = self.scheduler.plan_decode(self._num_steps, may_preempt=True)
        self.runner.rows.kill(preempted)
        if plan is None:
            return False
        self.runner.rows.set_pages(*plan.page_updates)
        num_rows = self._bucket_of(plan.num_rows)
        output = self.runner.decode(num_rows, plan.num_steps, plan.needs)
        self.scheduler.queued(len(output.tokens))
        self._expect(output, plan.lanes)
        return True

    def _compact(self) -> None:
        scheduler = self.scheduler
        if self._bucket_of(scheduler.num_running) < self._bucket_of(scheduler.num_rows):
            moves = scheduler.compact()
            self.runner.rows.move(moves.sources, moves.targets)

    def _expect(self, output: Output, lanes: NDArray[np.int64]) -> None:
        tenancies = self.scheduler.lanes.tenancy[lanes]
        self._rounds.append(Round(output, lanes, tenancies, self.scheduler.version))

    def _read_all(self) -> None:
        while self._rounds:
            self._read(self._rounds.popleft())

    def _read(self, queued: Round) -> None:
        """Take in the output of a round: tokens to their lanes, ended sequences to whoever waits for them."""
        lanes = self.scheduler.lanes
        tokens, logprobs, alive = queued.output.wait()
        width = len(queued.lanes)  # rows beyond are padding of the batch
        tokens, logprobs, alive = tokens[:, :width], logprobs[:, :width], alive[:width]
        is_current = (queued.lanes >= 0) & (lanes.tenancy[queued.lanes] == queued.tenancies)
        valid = (tokens >= 0) & is_current
        lanes.append(queued.lanes, tokens, logprobs, valid, queued.version)
        self.throughput.add(int(valid.sum()))
        ended = is_current & ~alive
        for lane in queued.lanes[ended]:
            self._finish(int(lane))
        for lane in queued.lanes[is_current & alive & lanes.watched[queued.lanes]]:
            self._watch(int(lane))

    def _finish(self, lane: int) -> None:
        """The device has seen the end of this sequence: a stop token, or its budget used up."""
        lanes = self.scheduler.lanes
        lanes.collect(lane)
        sequence = lanes.sequence[lane]
        assert sequence is not None
        self._cut_at_stop(sequence)
        self.scheduler.end(lane, may_go_on=sequence.has_stopped)
        self._end(sequence, "stop" if sequence.has_stopped else "length")

    def _watch(self, lane: int) -> None:
        """Streams and stop strings: look at the new tokens of a sequence that goes on."""
        lanes = self.scheduler.lanes
        lanes.collect(lane)
        sequence = lanes.sequence[lane]
        assert sequence is not None
        if self._cut_at_stop(sequence):
            self.runner.rows.kill([self.scheduler.end(lane, may_go_on=True)])
            self._end(sequence, "stop")
        else:
            sequence.stream()

    def _cut_at_stop(self, sequence: Sequence) -> bool:
        """End a sequence at its first stop string or stop token; what was drawn beyond is dropped."""
        stops = sequence.request.sampling.stop_strings
        minimum = sequence.request.sampling.min_new_tokens
        num_tokens = len(sequence.tokens)
        checked = min(max(sequence.num_checked, minimum), num_tokens)
        by_string = find_stop(self._tokenizer, sequence.tokens, checked, stops) if stops else None
        # The device ends a row at a stop token, so only the last one can be one; it watches only so many, though.
        first = checked if sequence.has_many_stop_ids else max(num_tokens - 1, minimum)
        fresh = range(first, num_tokens)
        by_token = next((place + 1 for place in fresh if sequence.tokens[place] in sequence.stop_ids), None)
        ends = [each for each in (by_string, by_token) if each is not None]
        sequence.num_checked = num_tokens
        if not ends:
            return False
        sequence.truncate(min(ends))
        sequence.has_stopped = True
        return True

    def _end(self, sequence: Sequence, reason: StopReason) -> None:
        sequence.stop_reason = reason
        self.num_finished += reason != "abort"
        sequence.stream()
        sequence.on_end(sequence)

    # What commands do; they run on the thread, with nothing queued.

    def abort(self, wanted: Callable[[Sequence], bool]) -> int:
        """End the sequences that ``wanted`` names with what they have."""
        scheduler, rows, ended = self.scheduler, [], []
        for lane in scheduler.running():
            sequence = scheduler.lanes.sequence[lane]
            if sequence is not None and wanted(sequence):
                scheduler.lanes.collect(int(lane))
                rows.append(scheduler.end(int(lane), may_go_on=False))
                ended.append(sequence)
        self.runner.rows.kill(rows)
        ended += scheduler.take_waiting(wanted)
        self.num_aborted += len(ended)
        for sequence in ended:
            self._end(sequence, "abort")
        return len(ended)

    def abandon(self, sequence: Sequence) -> None:
        """End one sequence that nobody waits for."""
        self.abort(lambda each: each is sequence)

    def interrupt(self) -> None:
        """Every running sequence keeps its tokens, gives up its pages and waits to be computed again."""
        self.runner.rows.kill(self.scheduler.preempt_all())

    def _finish_drain(self) -> bool:
        """True when nothing runs any more and the commands that waited for that have been carried out."""
        if self.scheduler.num_started or self._rounds:
            return False
        drained, self._drained = self._drained, []
        for command in drained:
            command.carry_out()
        self.scheduler.release_held()
        return True

    def _abort_all(self) -> None:
        self.abort(lambda _: True)

    def _fail(self, error: Exception) -> None:
        """The loop cannot go on: every request fails with the cause, and so does every later call."""
        with self._wakeup:
            self._failure = error
            left = [item for item in self._inbox if isinstance(item, Sequence)]
            commands = [item for item in self._inbox if isinstance(item, Command)] + self._drained
            self._inbox.clear()
        self._rounds.clear()
        for lane in self.scheduler.running():
            sequence = self.scheduler.lanes.sequence[lane]
            if sequence is not None:
                left.append(sequence)
        left += self.scheduler.take_waiting(lambda _: True)
        for sequence in left:
            sequence.error = error
            sequence.on_end(sequence)
        for command in commands:
            if command.done.set_running_or_notify_cancel():
                command.done.set_exception(error)
