"""Runs workflows: from prompts to batches of complete groups, none of them too old.

Which thread owns what:

- The **main thread** trains. It calls the public methods of ``WorkflowExecutor`` and is the only one that changes
  ``_version``, ``_buffer``, ``_taken``, ``_dropped``, ``_is_asked`` and ``_num_ended_before``.
- The **rollout thread** runs the event loop of ``AsyncTaskRunner``: all episodes, the dispatcher's producer, and
  ``_begin`` and ``_fly`` here. It is the only one that changes ``_flights``, ``_num_ended`` and ``_num_barren``, and it
  draws prompts. Finished groups reach the main thread only through the dispatcher's results.
- **Engine threads** compute. They complete the futures that episodes await, on the rollout thread, and never call
  anything here.
- The **status thread** only reads, through ``status()``.

``ledger``, ``staleness`` and the dispatcher's results have locks. ``_untaken`` is changed by both threads, one dict
operation at a time: the rollout thread adds a group when it starts and removes one that is dropped; the main thread
removes groups that it takes or finds too old. To see all of this at one moment, the main thread has a function called
on the rollout thread and waits for it (``AsyncTaskRunner.call``), as ``snapshot`` and ``check_ledger`` do.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from headwater.core.errors import RunError
from headwater.core.interpreter import garbage_put_off
from headwater.core.protocols import InferenceEngine
from headwater.core.records import DropKind
from headwater.rollout.dispatcher import AsyncTaskRunner, BatchTaskDispatcher
from headwater.rollout.flight import Dispatch, Flight, Flights, WatchedEngine
from headwater.rollout.group import Dropped, PromptDraw, RolloutBatch, too_few
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.joint import JointStart, JointTurns
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.side_by_side import SideBySide
from headwater.rollout.snapshot import Books, RolloutSnapshot
from headwater.rollout.source import PromptSource
from headwater.rollout.staleness import Admission, Finished, Selection, StalenessManager, select

_MAX_BARREN_BATCHES = 2
"""The run stops if this many batches' worth of groups fail in a row; otherwise it could loop forever."""
_GARBAGE_PUT_OFF_S = 1.0
"""How long the episodes of a wave run without garbage collection. Long episodes may produce garbage of any size."""


class WorkflowExecutor:
    """Keeps groups running as far ahead of the learner as staleness allows, and provides batches.

        executor.prepare_batch(stream)           # waits; rollouts for later batches continue in the background
        executor.trained(step, checksum)         # the learner has trained on that batch
        executor.set_version(step)               # and has published its weights: more groups may start

    ``rollout_batch`` runs given prompts in addition, without admission and ledger. Evaluation uses it.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        groups: GroupRunner,
        tasks: AsyncTaskRunner,
        admission: Admission,
        *,
        timeout_s: float,
        episode_timeout_s: float,
    ) -> None:
        self.admission = admission
        self.ledger = Ledger()
        self.staleness = StalenessManager(
            max_concurrent=admission.max_concurrent or admission.most_ahead,
            batch_size=admission.batch_size,
            max_staleness=admission.max_staleness,
            num_batches=admission.num_batches,
        )
        self._engine = engine
        self._joint_turns = JointTurns.of(engine, tasks.loop)
        self._groups = groups
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._version = 0
        self._flights = Flights(tasks.loop, episode_timeout_s)
        self._start: JointStart | None = None
        """While groups are admitted: those that start together."""
        self._side_by_side = SideBySide(
            engine, groups, tasks, self._starting, timeout_s=timeout_s, episode_timeout_s=episode_timeout_s
        )
        self._untaken: dict[int, int] = {}
        """Groups that have started and were neither taken nor dropped: id to the version at which they started."""
        self._buffer: list[Finished] = []
        self._taken: list[Finished] = []
        self._dropped: list[Dropped] = []
        self._is_asked = False
        """Whether the learner waits for a batch. In waves, nothing starts before that."""
        self._num_ended = 0
        """Groups that have ended since the executor was created."""
        self._num_ended_before = 0
        """``_num_ended`` when the last batch was taken."""
        self._num_barren = 0
        """Groups that have failed since the last one that did not."""
        self._dispatcher: BatchTaskDispatcher[Dispatch, Finished | Dropped] = BatchTaskDispatcher(
            tasks, self._begin, capacity=self._capacity, starting=self._starting
        )

    # Called by the learner

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch:
        """The next batch: complete groups, oldest first. No trained token is older than ``max_staleness`` versions."""

        def draw(count: int) -> list[Dispatch]:
            return [self._dispatch(each) for each in prompts.take(count)]

        async def read_ahead(count: int) -> int:
            # A wave starts as a whole: nothing else starts while one of its groups runs.
            return await prompts.read_ahead(count, at_least=count if self.admission.in_waves else 1)

        self._dispatcher.open(draw, read_ahead)
        batch = self.wait(self.admission.batch_size)
        if self.admission.in_waves:  # nothing runs until the learner asks again, so there is time
            num_next = self.staleness.capacity(self._version + 1)
            self._tasks.post(lambda: prompts.prepare(max(0, num_next)))
        return batch

    def submit(self, draw: PromptDraw) -> int:
        """Run one prompt as soon as there is capacity. Returns the id of its dispatch."""
        dispatch = self._dispatch(draw)
        self._dispatcher.submit([dispatch])
        return dispatch.id

    def wait(self, num_groups: int) -> RolloutBatch:
        """Wait for ``num_groups`` of the groups that were submitted or drawn. Returns fewer if no more can come."""

        clock = self._tasks.loop.time
        began = clock()

        def progress() -> str:
            lost = f", {len(self._dropped)} dropped" if self._dropped else ""
            lost += ", images or videos of the next prompts are being read" if self._dispatcher.is_reading else ""
            return (
                f"the learner has waited {clock() - began:.0f} s for batch {self._version + 1}: "
                f"{len(self._buffer)} of {num_groups} groups{lost}; {self._flights.describe()}"
            )

        with ExitStack() as no_garbage:
            if self.admission.in_waves:
                # All episodes of a wave exist at once. A collection would look through them and find nothing.
                no_garbage.enter_context(garbage_put_off())

            def look() -> None:
                if clock() - began > _GARBAGE_PUT_OFF_S:
                    no_garbage.close()

            self._is_asked = True
            self._dispatcher.notify()
            while not (selection := self._select(num_groups)).is_enough:
                left_s = max(0.0, self._timeout_s - (clock() - began))  # the limit applies to the whole batch
                # A wave ends as a whole. Otherwise, a group that is too old makes room for another one when it arrives.
                num_missing = max(1, num_groups - len(self._buffer)) if self.admission.in_waves else 1
                arrived = self._dispatcher.wait_results(num_missing, progress, hard_limit_s=left_s, look=look)
                if not arrived:  # nothing runs and nothing can start: the prompts or the rounds are used up
                    selection = self._select(num_groups, may_be_short=True)
                    break
                self._take_in(arrived)
        if not selection.chosen:
            raise too_few(self._buffer, self._dropped)
        return self._take(selection, num_groups)

    def expect_batches(self, num_batches: int) -> None:
        """The number of batches that the learner will take. The default is that of the admission."""
        self.staleness.expect_batches(num_batches)

    def rollout_batch(self, draws: Sequence[PromptDraw], on_group: Callable[[], None] = lambda: None) -> RolloutBatch:
        """Run these prompts concurrently and wait for all of them. ``on_group`` is called when a group has ended."""
        return self._side_by_side.run(draws, self._version, on_group)

    def trained(self, step: int, weights: Callable[[], str]) -> None:
        """The last batch was trained on in ``step``. ``weights`` waits for the checksum of the new weights."""
        for each in self._taken:
            self.ledger.train(each.dispatch.id, each.requests)
        self._taken = []

    def finish_all(self) -> None:
        """Wait until all groups that may start at the present version have ended."""
        what = f"all rollouts of version {self._version} end before the next weights: {self._flights.describe()}"
        self._take_in(self._dispatcher.wait_results(sys.maxsize, lambda: what, hard_limit_s=self._timeout_s))

    def set_version(self, version: int) -> None:
        """The engine now serves policy ``version``."""
        self._version = version
        if not self.admission.in_waves:
            self._dispatcher.notify()  # in waves, groups start when the learner asks for a batch

    def pause(self) -> None:
        """Start no more groups. Running groups continue. A second call has no effect."""
        self._dispatcher.pause()

    def resume(self) -> None:
        self._dispatcher.resume()

    # For status and checks

    def check_ledger(self) -> LedgerCounts:
        """The ledger's counts, compared with the groups that actually exist."""

        def check() -> LedgerCounts:
            waiting = [each for each in self._dispatcher.peek_results() if isinstance(each, Finished)]
            return self.ledger.check(
                num_buffered=len(self._buffer) + len(self._taken) + len(waiting),
                num_in_flight=len(self._flights) + self._dispatcher.num_submitted,
            )

        return self._tasks.call(check, "counting the running rollouts")

    def status(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "capacity": self._capacity(),
            "drops": self.ledger.drops(),
            "oldest": self._flights.oldest(3),
            "episodes": self._flights.stages(),
        }

    # Checkpoints

    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot:
        """Everything that is not trained on yet and the position in the prompts, at one moment. See ``restore``."""

        def look() -> RolloutSnapshot:
            arrived = [each for each in self._dispatcher.peek_results() if isinstance(each, Finished)]
            return RolloutSnapshot(
                cursor=cursor(),
                ledger=self.ledger.state_dict(),
                in_flight=(*self._flights.dispatches(), *self._dispatcher.submitted()),
                finished=(*self._buffer, *self._taken, *arrived),
            )

        return self._tasks.call(look, "taking a snapshot of the running rollouts")

    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books:
        """The end of a step: a snapshot, the counts, and the dispatches that ended, all at one moment."""

        def look() -> Books:
            snapshot, ended = self.snapshot(cursor), self.ledger.take_record()
            return Books(snapshot, self.check_ledger(), ended, self.staleness.counts, snapshot.ledger["drops"])

        return self._tasks.call(look, "closing the books of a step")

    def restore(self, snapshot: RolloutSnapshot, version: int) -> None:
        """Continue from a snapshot. Finished groups are kept; groups that were in flight start again."""
        in_flight = sorted(snapshot.in_flight, key=lambda each: each.id)
        self._buffer = list(snapshot.finished)
        self.ledger.load_state_dict(
            snapshot.ledger, in_flight=in_flight, buffered=[each.dispatch for each in self._buffer]
        )
        self._untaken = {each.dispatch.id: each.version for each in self._buffer}
        self._version = version
        num_rejected = sum(snapshot.ledger["drops"].values())
        self.staleness.recover(version, num_buffered=len(self._buffer), num_rejected=num_rejected)
        for _ in in_flight:
            self.staleness.enqueue()
        self._dispatcher.submit(in_flight)

    # Starting and running groups

    def _dispatch(self, draw: PromptDraw, attempt: int = 0) -> Dispatch:
        self.staleness.enqueue()
        return self.ledger.dispatch(draw, attempt)

    def _capacity(self) -> int:
        if self.admission.in_waves and (self._flights or not self._is_asked):
            return 0
        if self._has_used_its_rounds() or self._is_barren():
            return 0
        return self.staleness.capacity(self._version)

    def _has_used_its_rounds(self) -> bool:
        rounds = self.admission.max_rounds
        num_ended = self._num_ended - self._num_ended_before
        return rounds is not None and num_ended >= rounds * self.admission.batch_size

    def _is_barren(self) -> bool:
        """Whether the run should stop because too many groups failed in a row."""
        return self._num_barren >= _MAX_BARREN_BATCHES * self.admission.batch_size

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[JointStart | None]:
        """Groups that begin inside start together, if they run in waves."""
        start = JointStart(self._engine) if self.admission.in_waves and self.admission.holds_engine else None
        self._start = start
        try:
            yield start
        finally:
            self._start = None
        if start is not None:
            await start.open()

    def _begin(self, dispatch: Dispatch) -> Awaitable[Finished | Dropped]:
        """Count a group as running, and run it."""
        flight = Flight(dispatch, self._version, self._groups.num_episodes, self._tasks.loop.time)
        self._flights.begin(flight)
        if self._start is not None:
            self._start.expect(flight)
        self._untaken[dispatch.id] = flight.version
        self.staleness.start()
        return self._fly(flight)

    async def _fly(self, flight: Flight) -> Finished | Dropped:
        dispatch, flight.task = flight.dispatch, asyncio.current_task()
        outcome = await self._groups.run(flight, WatchedEngine.maker(self._engine, self._joint_turns, flight))
        self._flights.end(flight)  # not for a cancelled group: it starts again when the run is resumed
        self._num_ended += 1
        if isinstance(outcome, Dropped):
            del self._untaken[dispatch.id]
            self.staleness.reject()
            self.ledger.drop(dispatch.id, outcome.kind, outcome.message)
            self._num_barren += outcome.kind.is_failure
            return outcome
        self._num_barren = 0
        self.staleness.accept()
        self.ledger.finish(dispatch.id)
        return Finished.of(dispatch, outcome, flight)

    # Taking a batch

    def _take_in(self, arrived: Sequence[Finished | Dropped]) -> None:
        for each in arrived:
            if isinstance(each, Finished):
                self._buffer.append(each)
            else:
                self._dropped.append(each)
        if self._is_barren():
            raise too_few(self._buffer, [each for each in self._dropped if each.kind.is_failure])

    def _select(self, num_groups: int, *, may_be_short: bool = False) -> Selection:
        """What the learner would take now. This also drops groups that are too old, as ``on_stale`` says."""
        selection = select(
            self._buffer,
            num_groups,
            version=self._version,
            max_staleness=self.admission.max_staleness,
            on_stale=self.admission.on_stale,
            untaken=dict(self._untaken),
            may_be_short=may_be_short,
            in_order=self.admission.in_order,
        )
        for each in selection.too_old:
            self._drop_stale(each)
        return selection

    def _drop_stale(self, finished: Finished) -> None:
        dispatch = finished.dispatch
        if finished.version >= self._version:
            raise RunError(
                f"row {dispatch.draw.uid} started under policy version {finished.version} and has tokens tagged "
                f"{finished.oldest}; such tags would make every group too old: fix the engine or the workflow"
            )
        self._buffer.remove(finished)
        del self._untaken[dispatch.id]
        message = f"version {finished.oldest} is older than rollout.max_staleness allows at version {self._version}"
        self.ledger.drop(dispatch.id, DropKind.STALE, message)
        self._dropped.append(Dropped(dispatch.draw.uid, DropKind.STALE, message))
        if dispatch.attempt == 0:  # the prompt is retried once
            self._dispatcher.submit([self._dispatch(dispatch.draw, attempt=1)])
        self.staleness.give_back()  # after the retry was submitted, or another prompt could take its place
        self._dispatcher.notify()

    def _take(self, selection: Selection, num_groups: int) -> RolloutBatch:
        chosen = {each.dispatch.id for each in selection.chosen}
        for id in chosen:
            del self._untaken[id]
        self._buffer = [each for each in self._buffer if each.dispatch.id not in chosen]
        self._taken += selection.chosen
        self.staleness.forfeit(num_groups - len(selection.chosen))
        dropped, self._dropped = self._dropped, []
        self._num_ended_before = self._num_ended
        self._is_asked = False
        self._dispatcher.notify()  # the rounds of the next batch are available now
        groups = tuple(each.group for each in selection.chosen)
        times = tuple(each.times for each in selection.chosen if each.times is not None)
        return RolloutBatch(groups, tuple(dropped), num_masked_tokens=selection.num_masked_tokens, times=times)
