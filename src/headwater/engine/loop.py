"""The engine's loop: schedule, run, take in what was drawn.

With ``overlap`` the next steps are queued on the device before the output of the last ones is read, so the device never
waits for Python; without it every round is read at once. That is the only difference: one round deep, or none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import LogitsBroken, RolloutFailed
from headwater.core.protocols import Tokenizer
from headwater.core.records import StopReason
from headwater.core.waits import wait_for_future
from headwater.engine.command import Command
from headwater.engine.metrics import Throughput
from headwater.engine.plans import NeedsRoom
from headwater.engine.response_end import cut_at_stop
from headwater.engine.round import Round
from headwater.engine.runners.plain import Output, Runner
from headwater.engine.scheduler import Scheduler
from headwater.engine.sequence import Sequence
from headwater.engine.stop_tables import StopTables
from headwater.observe.spans import Spans

_IDLE_S = 0.5
_GATHER_S = 0.001
_GATHER_LIMIT_S = 0.005
_CLOSE_LIMIT_S = 120.0
MAX_PREFILLS_PER_ROUND = 4
"""Batches of prompt chunks between two rounds of decoding, so that rows fill up in a few rounds."""


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
        spans: Spans,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.throughput = Throughput()
        self.is_paused = False
        self.is_asleep = False
        self.num_finished = 0
        self.num_aborted = 0
        self.num_failed = 0
        self._tokenizer = tokenizer
        self._stop_tables = StopTables(tokenizer, scheduler.lanes)
        self._num_steps = num_steps
        self._depth = 1 if overlap else 0
        self._spans = spans
        self._rounds: deque[Round] = deque()
        self._awaiting_drain: deque[Command] = deque()
        self._inbox: deque[Sequence | Command] = deque()
        self._abandoned: set[Sequence] = set()
        self._is_called = False
        """Whether somebody waits for the end of this round: the inbox holds a command, or a request was abandoned."""
        self._wakeup = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="headwater-engine", daemon=True)
        self._thread.start()

    # What other threads may call.

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._closing

    def add(self, sequences: Iterable[Sequence]) -> None:
        self._post(sequences)

    def call(self, action: Callable[[], None], *, after_drain: bool = False, keeps_order: bool = False) -> Future[None]:
        """Run ``action`` on the loop's thread between two rounds, with nothing queued on the device.

        ``after_drain`` waits until every request that is running has ended, even while the engine is paused; requests
        that have not started go on waiting. ``keeps_order`` waits for drains that were asked for before.
        """
        command = Command(action, after_drain, keeps_order)
        self._post([command], calls=True)
        return command.done

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Nobody waits for these any more. All that are abandoned during a round are looked for and ended in one go."""
        with self._wakeup:
            if self.is_alive:  # they end with the engine otherwise
                self._abandoned.update(sequences)
                self._is_called = True
                self._wakeup.notify()

    def progress(self) -> object:
        """Changes as long as anything is computed or ends; ``None`` while the engine was told to do nothing."""
        if self.is_paused or self.is_asleep:
            return None
        ends = self.num_finished, self.num_aborted, self.num_failed
        return self.throughput.total, self.scheduler.num_prefilled_tokens, ends

    def close(self) -> None:
        """End every request with what it has, then the thread."""
        with self._wakeup:
            # In one go: a request that came between the two would never end.
            self._inbox.append(Command(self._abort_all))
            self._is_called = True
            self._closing = True
            self._wakeup.notify()
        what = "closing the engine waits for its thread; if that does not end, the device may hang: end the process"
        wait_for_future(self._ended, lambda: what, kind="engine_call", hard_limit_s=_CLOSE_LIMIT_S)
        self._thread.join()

    def _post(self, items: Iterable[Sequence | Command], *, calls: bool = False) -> None:
        with self._wakeup:
            if self._failure is not None:
                raise RolloutFailed(f"the engine has stopped: {self._failure}") from self._failure
            if self._closing:
                raise RolloutFailed("the engine is closed")
            self._inbox.extend(items)
            self._is_called |= calls
            self._wakeup.notify()

    # The thread.

    def _run(self) -> None:
        try:
            self.runner.use_device()
            while self._wait_for_work():
                self._take_inbox()
                if not (self._awaiting_drain and self._finish_drain()):
                    self._round()
        except Exception as error:  # noqa: BLE001  whatever went wrong belongs to the requests that wait
            self._fail(error)
        finally:
            self._ended.set_result(None)

    def _wait_for_work(self) -> bool:
        with self._wakeup:
            was_idle = not self._has_work()
            while not self._has_work() and not self._inbox and not self._abandoned and not self._closing:
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
        if self._awaiting_drain:
            return not self.is_asleep or not self.scheduler.num_draining
        runnable = self.scheduler.num_running or self.scheduler.num_waiting
        return bool(runnable) and not self.is_paused and not self.is_asleep

    def _take_inbox(self) -> None:
        """Take in what has come; then end what has been abandoned, all of it in one go."""
        while True:
            with self._wakeup:
                if not self._inbox:
                    # Under the same lock: all that is abandoned by now has come in, so the scheduler knows it.
                    abandoned, self._abandoned = self._abandoned, set()
                    self._is_called = False
                    break
                item = self._inbox[0]
            self._take(item)
        if abandoned:
            self._read_all()
            self.abort(abandoned.__contains__)

    def _take(self, item: Sequence | Command) -> None:
        """Take in the first item of the inbox. It stays there until nothing can fail: it fails with all the others."""
        if isinstance(item, Sequence):
            if not item.request.given_tokens or not self._ends_as_given(item):
                self.scheduler.add(item)
            self._inbox.popleft()
            return
        self._read_all()
        self._inbox.popleft()
        if item.after_drain or (item.keeps_order and self._awaiting_drain):
            self.scheduler.hold()
            self._awaiting_drain.append(item)
        else:
            item.carry_out()

    def _ends_as_given(self, sequence: Sequence) -> bool:
        """Answer a request at once whose given tokens are a whole response already."""
        if cut_at_stop(self._tokenizer, sequence):
            self._end(sequence, "stop")
        elif sequence.num_left <= 0:
            self._end(sequence, "length")
        return sequence.stop_reason is not None

    def _round(self) -> None:
        """Prompts, then some steps of all rows, then the output of the round before."""
        # What must end before a command can be carried out goes on even while the engine is paused.
        may_run = not self.is_asleep and (not self.is_paused or bool(self._awaiting_drain))
        with self._spans.span("generate"):
            if may_run:
                self._prefill()
            queued = may_run and self._decode()
            while len(self._rounds) > (self._depth if queued else 0):
                self._read(self._rounds.popleft())

    def _prefill(self) -> None:
        # Whoever follows a response as it comes waits for one batch of prompts at most.
        is_followed = self.scheduler.is_followed
        for _ in range(1 if is_followed else MAX_PREFILLS_PER_ROUND):
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
            if self._is_called:
                return  # after a batch, and not before: callers without end must not keep prompts from being computed

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
        num_rows = self.runner.bucket_of(plan.num_rows)
        output = self.runner.decode(num_rows, plan.num_steps, plan.needs)
        self.scheduler.queued(len(output.tokens))
        self._expect(output, plan.lanes)
        return True

    def _compact(self) -> None:
        scheduler = self.scheduler
        if self.runner.bucket_of(scheduler.num_running) < self.runner.bucket_of(scheduler.num_rows):
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
        drawn = queued.take_in(lanes)
        if drawn.broken:
            self._refuse(drawn.broken, queued.version)
        watched = self._stop_tables.worth_a_look(drawn)
        # Counted before anybody hears of them, without what was drawn beyond their end.
        num_dropped = sum(self._cut(lane) for lane in (*drawn.ended, *watched))
        self.throughput.add(drawn.num_tokens - num_dropped)
        for lane in drawn.ended:
            self._finish(lane)
        for lane in watched:
            self._watch(lane)
        if self._rounds:  # the device is busy meanwhile
            lanes.collect_early()

    def _refuse(self, lanes: Iterable[int], version: int) -> None:
        """Fail requests that drew from NaN: whatever they drew is no sample of any policy."""
        scheduler, rows = self.scheduler, []
        for lane in lanes:
            sequence = scheduler.lanes.sequence[lane]
            assert sequence is not None
            rows.append(scheduler.end(lane, may_go_on=False))
            sequence.error = LogitsBroken(
                f"the logits of the weights of version {version} are NaN or infinite; publish weights that are "
                "not, or compute in a wider dtype"
            )
            self.num_failed += 1
            sequence.on_end(sequence)
        self.runner.rows.kill(rows)

    def _cut(self, lane: int) -> int:
        """Hand new tokens to their sequence, up to its end; says how many were drawn beyond it."""
        lanes = self.scheduler.lanes
        lanes.collect(lane)
        sequence = lanes.sequence[lane]
        assert sequence is not None
        num_drawn = len(sequence.tokens)
        cut_at_stop(self._tokenizer, sequence)
        return num_drawn - len(sequence.tokens)

    def _finish(self, lane: int) -> None:
        """The device has seen the end of this sequence: a stop token, or its budget used up."""
        sequence = self.scheduler.lanes.sequence[lane]
        assert sequence is not None
        self.scheduler.end(lane, may_go_on=sequence.has_stopped)
        self._end(sequence, "stop" if sequence.has_stopped else "length")

    def _watch(self, lane: int) -> None:
        """A sequence that the device goes on with, and that somebody follows or that ends by what it says."""
        sequence = self.scheduler.lanes.sequence[lane]
        assert sequence is not None
        if sequence.has_stopped:
            self.runner.rows.kill([self.scheduler.end(lane, may_go_on=True)])
            self._end(sequence, "stop")
        else:
            sequence.stream()

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

    def interrupt(self) -> None:
        """Every running sequence keeps its tokens, gives up its pages and waits to be computed again."""
        self.runner.rows.kill(self.scheduler.preempt_all())

    def _finish_drain(self) -> bool:
        """True when the commands that waited have been carried out: nothing runs any more, or nobody wants that now."""
        self._awaiting_drain = deque(each for each in self._awaiting_drain if not each.is_called_off)
        is_wanted = any(each.after_drain for each in self._awaiting_drain)
        if is_wanted and (self.scheduler.num_draining or self._rounds):
            return False
        self._read_all()
        while self._awaiting_drain:
            self._awaiting_drain.popleft().carry_out()
        self.scheduler.release_held()
        return True

    def _abort_all(self) -> None:
        self.abort(lambda _: True)

    def _fail(self, error: Exception) -> None:
        """The loop cannot go on: every request fails with the cause, and so does every later call."""
        with self._wakeup:
            self._failure = error
            left = [item for item in self._inbox if isinstance(item, Sequence)]
            commands = [item for item in self._inbox if isinstance(item, Command)]
            self._inbox.clear()
        commands += self._awaiting_drain
        self._rounds.clear()
        for lane in self.scheduler.running():
            sequence = self.scheduler.lanes.sequence[lane]
            if sequence is not None:
                left.append(sequence)
        left += self.scheduler.take_waiting(lambda _: True)
        for sequence in dict.fromkeys(left):  # one that failed on its way in may be in two places
            sequence.error = error
            sequence.on_end(sequence)
        for command in commands:
            command.fail(error)
