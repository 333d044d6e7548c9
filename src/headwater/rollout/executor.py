"""Runs workflows: from prompts to batches of complete groups, none of them too old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from headwater.core.errors import RunError
from headwater.core.protocols import InferenceEngine
from headwater.rollout.admission import Admission
from headwater.rollout.dispatcher import BatchTaskDispatcher
from headwater.rollout.flight import Dispatch, Flight, WatchedEngine
from headwater.rollout.flights import Flights
from headwater.rollout.group import Dropped, PromptDraw, RolloutBatch, too_few
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.held_engine import held_engine
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.selection import Finished, Selection, select
from headwater.rollout.side_by_side import SideBySide
from headwater.rollout.snapshot import Books, RolloutSnapshot
from headwater.rollout.source import PromptSource
from headwater.rollout.staleness import StalenessManager
from headwater.rollout.task_runner import AsyncTaskRunner

_MAX_BARREN_BATCHES = 2
"""So many batches' worth of groups may fail in a row before the run stops instead of looping."""


class WorkflowExecutor:
    """Keeps groups running as far ahead of the learner as it may, and hands it batches.

        executor.prepare_batch(stream)           # waits; rollouts for later batches go on meanwhile
        executor.trained(step, checksum)         # the learner is done with that batch
        executor.set_version(step)               # and has published: there is room for more

    ``rollout_batch`` runs given prompts beside all that, as evaluation does: no admission, no ledger.
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
            max_concurrent=admission.max_concurrent or (admission.max_staleness + 1) * admission.batch_size,
            batch_size=admission.batch_size,
            max_staleness=admission.max_staleness,
            num_batches=admission.num_batches,
        )
        self._engine = engine
        self._groups = groups
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._version = 0
        self._flights = Flights(tasks.loop, episode_timeout_s)
        self._side_by_side = SideBySide(
            engine, groups, tasks, self._starting, timeout_s=timeout_s, episode_timeout_s=episode_timeout_s
        )
        self._untaken: dict[int, int] = {}
        """Groups that have started and were neither taken nor dropped, with the versions they started at."""
        self._buffer: list[Finished] = []
        self._taken: list[Finished] = []
        self._dropped: list[Dropped] = []
        self._is_asked = False
        """Whether the learner waits: in waves nothing starts before."""
        self._num_ended_for_batch = 0
        self._num_barren = 0
        self._dispatcher: BatchTaskDispatcher[Dispatch, Finished | Dropped] = BatchTaskDispatcher(
            tasks, self._begin, capacity=self._capacity, starting=self._starting
        )

    # What the learner calls

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch:
        """The next batch: complete groups, oldest first, no trained token older than ``max_staleness`` versions."""

        def draw(count: int) -> list[Dispatch]:
            return [self._dispatch(each) for each in prompts.take(count)]

        self._dispatcher.open(draw)
        return self.wait(self.admission.batch_size)

    def submit(self, draw: PromptDraw) -> int:
        """Run one prompt when there is room; returns the id of its dispatch."""
        dispatch = self._dispatch(draw)
        self._dispatcher.submit([dispatch])
        return dispatch.id

    def wait(self, num_groups: int) -> RolloutBatch:
        """So many of the groups that were submitted or drawn; fewer only when there are no more to come."""

        began = time.monotonic()

        def progress() -> str:
            lost = f", {len(self._dropped)} were dropped" if self._dropped else ""
            return (
                f"the learner has waited {time.monotonic() - began:.0f} s for batch {self._version + 1}: "
                f"{len(self._buffer)} of {num_groups} groups{lost}; {self._flights.describe()}"
            )

        self._is_asked = True
        self._dispatcher.notify()
        while not (selection := self._select(num_groups)).is_enough:
            left_s = max(0.0, self._timeout_s - (time.monotonic() - began))  # the limit is for the batch
            arrived = self._dispatcher.wait_results(1, progress, hard_limit_s=left_s)
            if not arrived:  # nothing runs and nothing more can start: there are no more prompts, or rounds
                selection = self._select(num_groups, may_be_short=True)
                break
            self._take_in(arrived)
        if not selection.chosen:
            raise too_few(self._buffer, self._dropped)
        return self._take(selection, num_groups)

    def rollout_batch(self, draws: Sequence[PromptDraw]) -> RolloutBatch:
        """Run these prompts side by side and wait for all of them."""
        return self._side_by_side.run(draws, self._version)

    def trained(self, step: int, weights: str) -> None:
        """The batch that was taken last has been trained on in ``step``, which gave weights of that checksum."""
        for each in self._taken:
            self.ledger.train(each.dispatch.id, each.requests)
        self._taken = []

    def set_version(self, version: int) -> None:
        """The engine serves policy ``version`` from now on."""
        self._version = version
        if not self.admission.in_waves:
            self._dispatcher.notify()  # in waves the next ones start when the learner asks for them

    def pause(self) -> None:
        """Start no more groups; those that run go on. Pausing twice is pausing once."""
        self._dispatcher.pause()

    def resume(self) -> None:
        self._dispatcher.resume()

    # What a person or a file is told

    def check_ledger(self) -> LedgerCounts:
        """The ledger's counts, held against what is really there."""

        def check() -> LedgerCounts:
            waiting = [each for each in self._dispatcher.peek_results() if isinstance(each, Finished)]
            return self.ledger.check(
                num_buffered=len(self._buffer) + len(self._taken) + len(waiting),
                num_in_flight=len(self._flights) + self._dispatcher.num_submitted,
            )

        return self._tasks.call(check, "counting the rollouts that run")

    def status(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "capacity": self._capacity(),
            "drop_reasons": self.ledger.drop_reasons(),
            "oldest": self._flights.oldest(3),
        }

    # Checkpoints

    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot:
        """What is not trained on yet, and where its prompts were drawn, as of one moment; ``restore`` takes it."""

        def look() -> RolloutSnapshot:
            arrived = [each for each in self._dispatcher.peek_results() if isinstance(each, Finished)]
            return RolloutSnapshot(
                cursor=cursor(),
                ledger=self.ledger.state_dict(),
                in_flight=(*self._flights.dispatches(), *self._dispatcher.submitted()),
                finished=(*self._buffer, *self._taken, *arrived),
            )

        return self._tasks.call(look, "noting the rollouts that run")

    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books:
        """The end of a step: its snapshot, its counts and what ended in it, all as of one moment."""

        def look() -> Books:
            return Books(self.snapshot(cursor), self.check_ledger(), self.ledger.take_record())

        return self._tasks.call(look, "closing the books of a step")

    def restore(self, snapshot: RolloutSnapshot, version: int) -> None:
        """Go on from a snapshot: what was finished is kept, what was in flight starts again."""
        in_flight = sorted(snapshot.in_flight, key=lambda each: each.id)
        self._buffer = list(snapshot.finished)
        self.ledger.load_state_dict(
            snapshot.ledger, in_flight=in_flight, buffered=[each.dispatch for each in self._buffer]
        )
        self._untaken = {each.dispatch.id: each.version for each in self._buffer}
        self._version = version
        self.staleness.recover(version, num_buffered=len(self._buffer))
        for _ in in_flight:
            self.staleness.enqueue()
        self._dispatcher.submit(in_flight)

    # On the way

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
        return rounds is not None and self._num_ended_for_batch >= rounds * self.admission.batch_size

    def _is_barren(self) -> bool:
        """So many groups have failed in a row that more of them would be pointless."""
        return self._num_barren >= _MAX_BARREN_BATCHES * self.admission.batch_size

    def _starting(self) -> AbstractAsyncContextManager[object]:
        return held_engine(self._engine) if self.admission.in_waves and self.admission.holds_engine else nullcontext()

    def _begin(self, dispatch: Dispatch) -> Awaitable[Finished | Dropped]:
        """Enter a group into the books, and run it."""
        flight = Flight(dispatch, self._version, self._groups.num_episodes)
        self._flights.begin(flight)
        self._untaken[dispatch.id] = flight.version
        self.staleness.start()
        return self._fly(flight)

    async def _fly(self, flight: Flight) -> Finished | Dropped:
        dispatch, flight.task = flight.dispatch, asyncio.current_task()
        outcome = await self._groups.run(flight, WatchedEngine.maker(self._engine, flight))
        self._flights.end(flight)  # one that was broken off has not ended: it starts again when the run is resumed
        self._num_ended_for_batch += 1
        if isinstance(outcome, Dropped):
            del self._untaken[dispatch.id]
            self.staleness.reject()
            self.ledger.drop(dispatch.id, outcome.reason)
            self._num_barren += not outcome.is_filtered
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
            raise too_few(self._buffer, [each for each in self._dropped if not each.is_filtered])

    def _select(self, num_groups: int, *, may_be_short: bool = False) -> Selection:
        """What the learner would take now. Groups that are too old are dropped on the way, where that is the rule."""
        selection = select(
            self._buffer,
            num_groups,
            version=self._version,
            max_staleness=self.admission.max_staleness,
            on_stale=self.admission.on_stale,
            untaken=dict(self._untaken),
            may_be_short=may_be_short,
        )
        for each in selection.too_old:
            self._drop_stale(each)
        return selection

    def _drop_stale(self, finished: Finished) -> None:
        dispatch = finished.dispatch
        if finished.version >= self._version:
            raise RunError(
                f"row {dispatch.draw.prompt.uid} started under policy version {finished.version} and has tokens tagged "
                f"{finished.oldest}; such tags would make every group too old: mend the engine or the workflow"
            )
        self._buffer.remove(finished)
        del self._untaken[dispatch.id]
        self.ledger.drop(dispatch.id, "older than rollout.max_staleness when it was to be trained on")
        self._dropped.append(Dropped(dispatch.draw.prompt.uid, "older than rollout.max_staleness", is_stale=True))
        if dispatch.attempt == 0:  # its prompt gets a second chance, not a third
            self._dispatcher.submit([self._dispatch(dispatch.draw, attempt=1)])
        self.staleness.give_back()  # only now, or another prompt might take its place
        self._dispatcher.notify()

    def _take(self, selection: Selection, num_groups: int) -> RolloutBatch:
        chosen = {each.dispatch.id for each in selection.chosen}
        for id in chosen:
            del self._untaken[id]
        self._buffer = [each for each in self._buffer if each.dispatch.id not in chosen]
        self._taken += selection.chosen
        self.staleness.forfeit(num_groups - len(selection.chosen))
        dropped, self._dropped = self._dropped, []
        self._num_ended_for_batch = 0
        self._is_asked = False
        self._dispatcher.notify()  # rounds that were used up are so no longer
        groups = tuple(each.group for each in selection.chosen)
        return RolloutBatch(groups, tuple(dropped), num_masked_tokens=selection.num_masked_tokens)
