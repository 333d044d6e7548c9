"""Rollouts of a recorded run, generated again token by token under the versions that made them the first time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from headwater.core.errors import RunError
from headwater.core.protocols import InferenceEngine
from headwater.core.records import ModelRequest, ModelResponse
from headwater.core.waits import wait_for_future
from headwater.rollout.flight import Flight
from headwater.rollout.group import Dropped, Group, RolloutBatch
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.schedule import RecordedGroup, Schedule
from headwater.rollout.segments import segments_of
from headwater.rollout.snapshot import Books, RolloutSnapshot
from headwater.rollout.source import PromptSource
from headwater.rollout.stale_tokens import without_older
from headwater.rollout.task_runner import AsyncTaskRunner

T = TypeVar("T")


class ReplayedRollouts:
    """Hands the learner the batches of a recorded run.

    A response may have been made under several policy versions, one part under each. When the learner asks for the
    batch of a version, every part that was made under it is generated, of this batch and of later ones, before the
    learner may go on and publish the next version. With an engine whose bits do not depend on what it computes
    together, the tokens and log-probs are the recorded run's, and so are the weights: they are compared at every step.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        groups: GroupRunner,
        tasks: AsyncTaskRunner,
        schedule: Schedule,
        *,
        max_staleness: int,
        timeout_s: float,
    ) -> None:
        self.ledger = Ledger()
        self._groups = groups
        self._tasks = tasks
        self._schedule = schedule
        self._max_staleness = max_staleness
        self._timeout_s = timeout_s
        self._version = 0
        self._gate = _Gate(engine, schedule.num_parts())
        self._recorded = {group.id: group for step in schedule.steps for group in step.groups}
        self._waiting = deque(sorted(self._recorded.values(), key=lambda group: (group.first_version, group.id)))
        self._running: dict[int, tuple[Flight, asyncio.Task[Group | Dropped]]] = {}
        """By the id of the recorded dispatch."""

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch:
        def describe() -> str:
            return f"the replay waits for batch {self._version + 1}: {len(self._running)} groups run"

        making = self._tasks.start(self._make_batch(prompts))
        try:
            return wait_for_future(making, describe, kind="batch", hard_limit_s=self._timeout_s)
        except BaseException:
            making.cancel()
            raise

    def trained(self, step: int, weights: str) -> None:
        recorded = self._schedule.steps[step - 1]
        if weights != recorded.weights:
            raise RunError(
                f"replay: the weights after step {step} are not those of the recorded run ({weights} instead of "
                f"{recorded.weights}); the code, the libraries, the machine or the number of threads differ"
            )
        for group in recorded.groups:
            flight, _ = self._running.pop(group.id)
            self.ledger.finish(flight.dispatch.id)
            self.ledger.train(flight.dispatch.id, flight.requests)

    def set_version(self, version: int) -> None:
        self._version = version

    def check_ledger(self) -> LedgerCounts:
        return self.ledger.check(num_buffered=0, num_in_flight=len(self._running))

    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot:
        return RolloutSnapshot(cursor(), self.ledger.state_dict())

    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books:
        return Books(self.snapshot(cursor), self.check_ledger(), self.ledger.take_record())

    def restore(self, snapshot: RolloutSnapshot, version: int) -> None:
        raise RunError("a replay starts at the beginning and is not resumed")

    def status(self) -> dict[str, Any]:
        return {"version": self._version}

    async def _make_batch(self, prompts: PromptSource) -> RolloutBatch:
        self._start_groups(prompts)
        await self._unless_one_fails(self._gate.all_made_under(self._version))
        lowest = self._version - self._max_staleness
        groups = []
        for recorded in self._schedule.steps[self._version].groups:
            _, running = self._running[recorded.id]
            outcome = await self._unless_one_fails(running)
            assert isinstance(outcome, Group), "checked"
            groups.append(without_older(outcome, lowest)[0])
        return RolloutBatch(tuple(groups))

    def _start_groups(self, prompts: PromptSource) -> None:
        """Those whose first token was made under the present version."""
        while self._waiting and self._waiting[0].first_version <= self._version:
            recorded = self._waiting.popleft()
            dispatch = self.ledger.dispatch(prompts.again(recorded.index, recorded.epoch))
            flight = Flight(dispatch, self._version, self._groups.num_episodes)
            engine_of = partial(_ReplayingEngine, self._gate, flight, recorded)
            self._running[recorded.id] = flight, asyncio.ensure_future(self._groups.run(flight, engine_of))

    async def _unless_one_fails(self, awaited: Awaitable[T]) -> T:
        """``awaited``, or the error of a group: without it others may wait for ever."""
        task = asyncio.ensure_future(awaited)
        while not task.done():
            running = [each for _, each in self._running.values() if not each.done()]
            await asyncio.wait([task, *running], return_when=asyncio.FIRST_COMPLETED)
            for recorded, (flight, each) in zip(tuple(self._running), tuple(self._running.values()), strict=True):
                if each.done():
                    self._check(recorded, flight, each.result())
        return task.result()

    def _check(self, id: int, flight: Flight, outcome: Group | Dropped) -> None:
        """A group that went another way than it did: others would wait for its requests for ever."""
        uid = flight.dispatch.draw.prompt.uid
        if isinstance(outcome, Dropped):
            raise RunError(f"replay: row {uid} was trained on, and now it is dropped: {outcome.reason}")
        if flight.requests != self._recorded[id].requests:
            raise RunError(
                f"replay: row {uid} makes other requests than when it was recorded; does its workflow change?"
            )


class _Gate:
    """Lets a part of a response be made when the engine has come to its version, and knows when all of one are made."""

    def __init__(self, engine: InferenceEngine, expected: Counter[int]) -> None:
        self._engine = engine
        self._expected = expected
        self._made: Counter[int] = Counter()
        self._version = -1
        self._changed = asyncio.Condition()

    async def all_made_under(self, version: int) -> None:
        """The engine has come to ``version``; wait for its parts."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._made[version] >= self._expected[version])

    async def generate(self, request: ModelRequest, version: int) -> ModelResponse:
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)
        response = await self._engine.agenerate(request)
        async with self._changed:
            self._made[version] += 1
            self._changed.notify_all()
        return response


@dataclass(eq=False)
class _ReplayingEngine:
    """The engine as one episode of a replay sees it."""

    gate: _Gate
    flight: Flight
    recorded: RecordedGroup
    sample: int
    num_requests: int = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        place = (self.sample, self.num_requests)
        self.num_requests += 1
        if place not in self.recorded.requests:
            raise RunError(f"replay: row {self.recorded.uid}, sample {self.sample} asks more often than it did")
        parts = self.recorded.requests[place]
        whole: ModelResponse | None = None
        for number, (version, count) in enumerate(parts):
            is_last = number == len(parts) - 1
            part = await self.gate.generate(_part_of(request, whole, count, is_last), version)
            whole = part if whole is None else _joined(whole, part)
        if whole is None or segments_of(whole.output_versions) != parts:
            raise RunError(
                f"replay: row {self.recorded.uid}, sample {self.sample} has another length than when it was recorded"
            )
        self.flight.requests[place] = parts
        return whole


def _part_of(request: ModelRequest, so_far: ModelResponse | None, count: int, is_last: bool) -> ModelRequest:
    """The request that goes on after ``so_far`` for ``count`` tokens; the last part ends by itself."""
    given = request.given_tokens + (so_far.output_tokens if so_far else ())
    sampling = request.sampling
    if not is_last:
        limit = len(given) + count
        sampling = replace(sampling, max_new_tokens=limit, min_new_tokens=min(sampling.min_new_tokens, limit))
    return replace(request, given_tokens=given, sampling=sampling)


def _joined(first: ModelResponse, second: ModelResponse) -> ModelResponse:
    return replace(
        second,
        output_tokens=first.output_tokens + second.output_tokens,
        output_logprobs=first.output_logprobs + second.output_logprobs,
        output_versions=first.output_versions + second.output_versions,
    )
