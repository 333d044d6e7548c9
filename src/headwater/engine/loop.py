"""The engine's loop: schedule, run, read the output.

With ``overlap`` the next round of steps is queued on the device before the output of the previous round is read, so the
device does not wait for Python. Without it, every round is read immediately. There is no other difference.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from headwater.core.errors import LogitsBroken, RolloutFailed
from headwater.core.protocols import Tokenizer
from headwater.core.requests import StopReason
from headwater.core.waits import wait_for_future
from headwater.engine.delivery import EngineOrder, Throughput
from headwater.engine.guides import Guidance, alternatives
from headwater.engine.lanes import Round
from headwater.engine.media_reader import MediaFailed
from headwater.engine.plans import NeedsRoom
from headwater.engine.prompts import UnreadRequests
from headwater.engine.runners.plain import Output, Runner
from headwater.engine.scheduler import Scheduler
from headwater.engine.scoring import PromptScoring
from headwater.engine.sequence import EngineSequence
from headwater.engine.stops import StopTables, cut_at_stop
from headwater.observe.spans import Spans

_IDLE_S = 0.5
_GATHER_S = 0.001
_GATHER_LIMIT_S = 0.005
_CLOSE_LIMIT_S = 120.0
MAX_PREFILLS_PER_ROUND = 4
"""Maximum number of prompt batches between two decoding rounds, so that rows fill up within a few rounds."""


class EngineLoop:
    """Owns the scheduler, the runner and the engine's thread. Other threads use ``call``, ``add`` and ``abandon``."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        num_steps: int,
        overlap: bool,
        max_scored_tokens: int,
        spans: Spans,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.throughput = Throughput()
        self.is_paused = False
        self.is_asleep = False
        self.needs_weights = False
        """An update failed midway: nothing is generated until a complete one succeeds."""
        self.num_finished = 0
        self.num_aborted = 0
        self.num_failed = 0
        self.num_ended = 0
        """Sequences that left the loop, for whatever reason."""
        self._tokenizer = tokenizer
        self._stop_tables = StopTables(tokenizer, scheduler.lanes)
        self._scoring = PromptScoring(
            scheduler.pool,
            page_tokens=scheduler.page_tokens,
            max_tokens=max_scored_tokens,
            prefix_cache=scheduler.prefix_cache,
        )
        self._num_steps = num_steps
        self._depth = 1 if overlap else 0
        self._spans = spans
        self._rounds: deque[Round] = deque()
        self._awaiting_drain: deque[EngineOrder] = deque()
        self._inbox: deque[EngineSequence | EngineOrder] = deque()
        self._unread = UnreadRequests(enough_tokens=MAX_PREFILLS_PER_ROUND * max_scored_tokens)
        self._abandoned: set[EngineSequence] = set()
        self._is_called = False
        """Whether a caller waits for the end of this round: the inbox has a command, or a request was abandoned."""
        self._wakeup = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="headwater-engine", daemon=True)
        self._thread.start()

    # Called by other threads.

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._closing

    def add(self, sequences: Iterable[EngineSequence]) -> None:
        self._post(sequences)

    def call(self, action: Callable[[], None], *, after_drain: bool = False, keeps_order: bool = False) -> Future[None]:
        """Run ``action`` on the loop's thread between two rounds, with nothing queued on the device.

        ``after_drain`` waits until every running request has ended, even while the engine is paused; requests that
        have not started keep waiting. ``keeps_order`` waits for drains that were requested earlier.
        """
        command = EngineOrder(action, after_drain, keeps_order)
        self._post([command], calls=True)
        return command.done

    def abandon(self, sequences: Iterable[EngineSequence]) -> None:
        """Abort sequences whose callers no longer wait. All sequences abandoned in one round are aborted together."""
        with self._wakeup:
            if self.is_alive:  # otherwise they end with the engine
                self._abandoned.update(sequences)
                self._is_called = True
                self._wakeup.notify()

    def media_read(self) -> None:
        """An image or video that a request waits for has been read, or cannot be read."""
        with self._wakeup:
            self._unread.has_news = True
            self._wakeup.notify()

    def progress(self) -> object:
        """A value that changes while the engine works; ``None`` while it is paused, asleep or without weights."""
        if self.is_paused or self._cannot_run:
            return None
        ends = self.num_finished, self.num_aborted, self.num_failed
        return self.throughput.total, self.scheduler.num_prefilled_tokens, self._scoring.num_tokens, ends

    @property
    def num_unscored(self) -> int:
        """Requests that wait for the log-probs of their prompts, or for their media to be read."""
        return len(self._scoring.waiting) + len(self._unread)

    def media_counts(self) -> dict[str, float]:
        """What the engine has done with images and videos. Empty if it had none."""
        counts = self.runner.media.counts() if self.runner.media is not None else {}
        return {**counts, "media_wait_s": self._unread.waited_s} if counts else {}

    def close(self) -> None:
        """Abort every request, then end the thread."""
        with self._wakeup:
            # Under one lock: a request that arrived in between would never end.
            self._inbox.append(EngineOrder(self._abort_all))
            self._is_called = True
            self._closing = True
            self._wakeup.notify()
        what = "closing the engine waits for its thread; if it does not end, the device may be hanging: end the process"
        wait_for_future(self._ended, lambda: what, kind="engine_call", hard_limit_s=_CLOSE_LIMIT_S)
        self._thread.join()

    def _post(self, items: Iterable[EngineSequence | EngineOrder], *, calls: bool = False) -> None:
        with self._wakeup:
            if self._failure is not None:
                raise RolloutFailed(f"the engine has stopped: {self._failure}") from self._failure
            if self._closing:
                raise RolloutFailed("the engine is closed")
            self._inbox.extend(items)
            self._is_called |= calls
            self._wakeup.notify()

    # The engine's thread.

    def _run(self) -> None:
        try:
            self.runner.use_device()
            while self._wait_for_work():
                self._take_inbox()
                if self._unread.is_due:
                    self._take_read()
                if not (self._awaiting_drain and self._finish_drain()):
                    self._round()
        except Exception as error:  # noqa: BLE001  every waiting request fails with this error
            self._fail(error)
        finally:
            # The memory of the engine is freed by other threads, which may reuse it on another stream.
            with suppress(RuntimeError):  # a device that has failed runs nothing any more
                self.runner.synchronize()
            self._ended.set_result(None)

    def _wait_for_work(self) -> bool:
        with self._wakeup:
            was_idle = not self._has_work()
            while not self._has_work() and not self._inbox and not self._abandoned and not self._closing:
                self._wakeup.wait(self._unread.until_due(_IDLE_S))
            if self._closing and not self._inbox:
                return False
            if was_idle and not self.is_paused:
                # Related requests arrive one by one. Wait briefly, so that samples of a prompt share its computation.
                deadline = time.monotonic() + _GATHER_LIMIT_S
                seen = -1
                while len(self._inbox) != seen and time.monotonic() < deadline:
                    seen = len(self._inbox)
                    self._wakeup.wait(_GATHER_S)
        return True

    def _has_work(self) -> bool:
        if self._rounds or self._unread.is_due:
            return True
        if self._awaiting_drain:
            return not self._cannot_run or not self.scheduler.num_draining
        runnable = self.scheduler.num_running or self.scheduler.num_waiting or self._scoring.waiting
        return bool(runnable) and not self.is_paused and not self._cannot_run

    @property
    def _cannot_run(self) -> bool:
        return self.is_asleep or self.needs_weights

    def _take_inbox(self) -> None:
        """Process the inbox, then abort all abandoned sequences together."""
        while True:
            with self._wakeup:
                if not self._inbox:
                    # Under the same lock: every sequence abandoned so far has left the inbox, so the scheduler has it.
                    abandoned, self._abandoned = self._abandoned, set()
                    self._is_called = False
                    break
                items = list(self._inbox)
            for item in items:
                self._take(item)
        if abandoned:
            self._read_all()
            self.abort(abandoned.__contains__)

    def _take(self, item: EngineSequence | EngineOrder) -> None:
        """Process the first item of the inbox. It is removed last, so that it fails with the others if this fails."""
        if isinstance(item, EngineSequence):
            if item.reading is None:
                self._enter(item)
            else:
                self._unread.add(item)
            self._inbox.popleft()
            return
        self._read_all()
        self._inbox.popleft()
        if item.after_drain or (item.keeps_order and self._awaiting_drain):
            self.scheduler.hold()
            self._awaiting_drain.append(item)
        else:
            item.carry_out()

    def _take_read(self) -> None:
        """Let requests enter whose media have been read. Requests whose media cannot be read fail."""
        for sequence in self._unread.take_read():
            assert sequence.reading is not None
            error = sequence.reading.error()
            if error is None:
                self._enter(sequence)
            else:
                self._end_with(sequence, error)
        if self.runner.media is not None and not self.is_paused and not self._cannot_run:
            self.runner.media.prepare(self._unread.read_media())

    def _enter(self, sequence: EngineSequence) -> None:
        if sequence.request.sampling.prompt_logprobs:
            self._scoring.waiting.append(sequence)
        elif not sequence.request.given_tokens or not self._ends_as_given(sequence):
            self.scheduler.add(sequence)

    def _ends_as_given(self, sequence: EngineSequence) -> bool:
        """End a request whose given tokens are already a complete response."""
        if cut_at_stop(self._tokenizer, sequence):
            self._end(sequence, "stop")
        elif sequence.num_left <= 0:
            self._end(sequence, "length")
        return sequence.stop_reason is not None

    def _round(self) -> None:
        """Compute prompts, queue some steps of all rows, and read the output of the previous round."""
        # During a drain, running requests continue even while the engine is paused.
        may_run = not self._cannot_run and (not self.is_paused or bool(self._awaiting_drain))
        with self._spans.span("generate"):
            if may_run and self._scoring.waiting and not self._awaiting_drain:
                self._score()
            if may_run:
                self._prefill()
            queued = may_run and self._decode()
            while len(self._rounds) > (self._depth if queued else 0):
                self._read(self._rounds.popleft())

    def _score(self) -> None:
        """Score prompts whose log-probs were requested. Then they generate like others."""
        now = time.perf_counter()
        try:
            scored = self._scoring.score(self.runner, self.scheduler.version)
        except MediaFailed as failed:
            self._refuse_media(failed)
            return
        for sequence in scored:
            sequence.started = now
            if not self._ends_as_given(sequence):
                self.scheduler.add(sequence)

    def _prefill(self) -> None:
        # A streamed response waits for at most one batch of prompts.
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
            started = np.array(plan.started, np.int64)
            guidance = self._guidance(started) if plan.batch.needs.is_guided else None
            try:
                output = self.runner.prefill(plan.batch, guidance)
            except MediaFailed as failed:
                self._refuse_media(failed)
                return
            if output is not None:
                self._expect(output, started, guidance)
            if self._is_called:
                return  # only after a batch: a continuous flow of calls must not keep prompts from being computed

    def _decode(self) -> bool:
        num_steps = 1 if self._is_guided() else self._num_steps
        self._compact()
        try:
            plan, preempted = self.scheduler.plan_decode(num_steps, may_preempt=not self._rounds)
        except NeedsRoom:
            self._read_all()  # a preempted sequence must have all of its tokens
            plan, preempted = self.scheduler.plan_decode(num_steps, may_preempt=True)
        self.runner.rows.kill(preempted)
        if plan is None:
            return False
        self.runner.rows.set_pages(*plan.page_updates)
        num_rows = self.runner.bucket_of(plan.num_rows)
        guidance = self._guidance(plan.lanes) if plan.needs.is_guided else None
        output = self.runner.decode(num_rows, plan.num_steps, plan.needs, plan.cut_rows, guidance)
        self.scheduler.queued(len(output.tokens))
        self._expect(output, plan.lanes, guidance)
        return True

    def _is_guided(self) -> bool:
        """Whether any row is guided. Then all tokens so far are read, because its next token depends on them."""
        scheduler = self.scheduler
        if not scheduler.lanes.needs_of(scheduler.running()).is_guided:
            return False
        self._read_all()
        for lane in scheduler.running().tolist():
            sequence = scheduler.lanes.sequence[lane]
            if sequence is not None and sequence.guide is not None:
                scheduler.lanes.collect(lane)
                sequence.guide.advance(sequence.tokens)
                if sequence.guide.error:
                    self._refuse([lane], RolloutFailed(f"the grammar cannot be applied: {sequence.guide.error}"))
        return True

    def _guidance(self, lanes: NDArray[np.int64]) -> Guidance | None:
        """The guidance of the next step for the guided ones among ``lanes``; -1 is a row without a sequence."""
        guides = []
        for row, lane in enumerate(lanes.tolist()):
            sequence = self.scheduler.lanes.sequence[lane] if lane >= 0 else None
            if sequence is not None and sequence.guide is not None:
                sequence.guide.advance(sequence.tokens)
                guides.append((row, sequence.guide))
        return Guidance.of(guides) if guides else None

    def _compact(self) -> None:
        scheduler = self.scheduler
        if self.runner.bucket_of(scheduler.num_running) < self.runner.bucket_of(scheduler.num_rows):
            moves = scheduler.compact()
            self.runner.rows.move(moves.sources, moves.targets)

    def _expect(self, output: Output, lanes: NDArray[np.int64], guidance: Guidance | None) -> None:
        if guidance is not None and output.top is not None:
            for place, lane in enumerate(lanes[guidance.rows].tolist()):
                sequence = self.scheduler.lanes.sequence[lane]
                assert sequence is not None
                wanted = sequence.request.sampling.num_top_logprobs
                if wanted:
                    sequence.top_logprobs.append(alternatives(output.top[0][place], output.top[1][place], wanted))
        tenancies = self.scheduler.lanes.tenancy[lanes]
        self._rounds.append(Round(output, lanes, tenancies, self.scheduler.version))

    def _read_all(self) -> None:
        while self._rounds:
            self._read(self._rounds.popleft())

    def _read(self, queued: Round) -> None:
        """Read the output of a round: store tokens in their lanes and return ended sequences to their callers."""
        lanes = self.scheduler.lanes
        drawn = queued.take_in(lanes)
        if drawn.broken:
            self._refuse(
                drawn.broken,
                LogitsBroken(
                    f"the weights of version {queued.version} produced NaN or infinite logits; publish valid weights, "
                    "or use a wider dtype"
                ),
            )
        watched = self._stop_tables.worth_a_look(drawn)
        # Count tokens before callers receive them, without those that were sampled after the end of a response.
        read = [*drawn.ended, *watched]
        lanes.collect_all(np.array(read, np.int64))
        dropped = {lane: self._cut(lane) for lane in read}
        self.throughput.add(drawn.num_tokens - sum(dropped.values()))
        for put, new in lanes.take_unsent(dropped):
            put(new)
        if drawn.ended:
            self._finish(drawn.ended)
        for lane in watched:
            self._watch(lane)
        if self._rounds:  # the device is busy with the next round
            lanes.collect_early()

    def _refuse(self, lanes: Iterable[int], error: Exception) -> None:
        """Fail requests whose tokens are not samples of any policy, for example because the logits were NaN."""
        scheduler, rows, refused = self.scheduler, [], []
        for lane in lanes:
            sequence = scheduler.lanes.sequence[lane]
            assert sequence is not None
            rows.append(scheduler.end(lane, may_go_on=False))
            refused.append(sequence)
        try:
            self.runner.rows.kill(rows)
        finally:
            for sequence in refused:  # last: a caller that hears of its end finds its row free
                self._end_with(sequence, error)

    def _free(self, rows: Sequence[int], sequences: Iterable[EngineSequence]) -> None:
        """Stop the rows of sequences that have left the scheduler. If the device fails, only this can tell them."""
        try:
            self.runner.rows.kill(rows)
        except Exception as error:
            for sequence in sequences:
                self._end_with(sequence, error)
            raise

    def _refuse_media(self, failed: MediaFailed) -> None:
        """Fail the requests whose media cannot be computed. All others begin again, because their batch is lost."""
        self._read_all()
        self.interrupt()

        def is_refused(sequence: EngineSequence) -> bool:
            return failed.error_of(sequence.request) is not None

        for sequence in self.scheduler.take_waiting(is_refused) + self._scoring.take_out(is_refused):
            self._end_with(sequence, failed.error_of(sequence.request))

    def _end_with(self, sequence: EngineSequence, error: Exception | None) -> None:
        sequence.error = error
        self.num_failed += 1
        self._tell(sequence)

    def _cut(self, lane: int) -> int:
        """Remove the tokens that were sampled after the end of a response. Returns their number."""
        sequence = self.scheduler.lanes.sequence[lane]
        assert sequence is not None
        num_drawn = len(sequence.tokens)
        cut_at_stop(self._tokenizer, sequence)
        return num_drawn - len(sequence.tokens)

    def _finish(self, lanes: Sequence[int]) -> None:
        """End sequences that the device has stopped: at a stop token, or at their token limit."""
        ended = [sequence for lane in lanes if (sequence := self.scheduler.lanes.sequence[lane]) is not None]
        has_stopped = [sequence.has_stopped for sequence in ended]
        self.scheduler.end_all(lanes, has_stopped)
        for sequence, is_stop in zip(ended, has_stopped, strict=True):
            self._end(sequence, "stop" if is_stop else "length")

    def _watch(self, lane: int) -> None:
        """Stream or end a sequence that still runs on the device and that the host inspects."""
        sequence = self.scheduler.lanes.sequence[lane]
        assert sequence is not None
        if sequence.has_stopped:
            self._free([self.scheduler.end(lane, may_go_on=True)], [sequence])
            self._end(sequence, "stop")
        else:
            sequence.stream()

    def _end(self, sequence: EngineSequence, reason: StopReason) -> None:
        sequence.stop_reason = reason
        self.num_finished += reason != "abort"
        self._tell(sequence)

    def _tell(self, ended: EngineSequence) -> None:
        # Counted first: a caller that hears of the end, by the last tokens of a stream too, may send another request.
        self.num_ended += 1
        if ended.stop_reason is not None:
            ended.stream()
        ended.on_end(ended)

    # Called by commands, on the engine's thread, with nothing queued on the device.

    def abort(self, wanted: Callable[[EngineSequence], bool]) -> int:
        """End the sequences for which ``wanted`` is true. They return the tokens they have."""
        scheduler, rows, ended = self.scheduler, [], []
        for lane in scheduler.running():
            sequence = scheduler.lanes.sequence[lane]
            if sequence is not None and wanted(sequence):
                scheduler.lanes.collect(int(lane))
                rows.append(scheduler.end(int(lane), may_go_on=False))
                ended.append(sequence)
        self._free(rows, ended)
        ended += scheduler.take_waiting(wanted)
        ended += self._scoring.take_out(wanted) if self._scoring.waiting else []
        ended += self._unread.take_out(wanted)
        self.num_aborted += len(ended)
        for sequence in ended:
            self._end(sequence, "abort")
        return len(ended)

    def interrupt(self) -> None:
        """Return every running sequence to the queue. It keeps its tokens and releases its pages."""
        self.runner.rows.kill(self.scheduler.preempt_all())

    def _finish_drain(self) -> bool:
        """Run the waiting commands once the drain is complete or cancelled. Returns whether they ran."""
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
        """The loop cannot continue: fail every request and every later call with this error."""
        with self._wakeup:
            self._failure = error
            left = [item for item in self._inbox if isinstance(item, EngineSequence)]
            commands = [item for item in self._inbox if isinstance(item, EngineOrder)]
            self._inbox.clear()
        commands += self._awaiting_drain
        self._rounds.clear()
        for lane in self.scheduler.running():
            sequence = self.scheduler.lanes.sequence[lane]
            if sequence is not None:
                left.append(sequence)
        left += self.scheduler.take_waiting(lambda _: True)
        left += [*self._scoring.waiting, *self._unread]
        for sequence in dict.fromkeys(left):  # a sequence that failed while it was added may occur twice
            sequence.error = error
            self._tell(sequence)
        for command in commands:
            command.fail(error)
