"""Given prompts, all at once and all waited for: what evaluation needs. No admission, no ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from headwater.core.protocols import InferenceEngine
from headwater.core.waits import wait_for_future
from headwater.rollout.flight import Dispatch, Flight, WatchedEngine
from headwater.rollout.flights import Flights
from headwater.rollout.group import Dropped, Group, PromptDraw, RolloutBatch, too_few
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.task_runner import AsyncTaskRunner


class SideBySide:
    """Runs prompts beside whatever else runs. ``starting`` is entered while they start."""

    def __init__(
        self,
        engine: InferenceEngine,
        groups: GroupRunner,
        tasks: AsyncTaskRunner,
        starting: Callable[[], AbstractAsyncContextManager[object]],
        *,
        timeout_s: float,
        episode_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._tasks = tasks
        self._starting = starting
        self._timeout_s = timeout_s
        self._flights = Flights(tasks.loop, episode_timeout_s)

    def run(self, draws: Sequence[PromptDraw], version: int) -> RolloutBatch:
        """The groups of these prompts, in their order, under policy ``version``."""
        flights = [
            Flight(Dispatch(number, draw), version, self._groups.num_episodes) for number, draw in enumerate(draws)
        ]

        def progress() -> str:
            num_done = sum(each.num_done == each.num_episodes for each in flights)
            return f"waiting for rollouts: {num_done} of {len(flights)} groups are complete; {self._flights.describe()}"

        future = self._tasks.start(self._run_all(flights))
        try:
            outcomes = wait_for_future(future, progress, kind="rollouts", hard_limit_s=self._timeout_s)
        except BaseException:
            future.cancel()
            raise
        groups = tuple(each for each in outcomes if isinstance(each, Group))
        dropped = tuple(each for each in outcomes if isinstance(each, Dropped))
        if not groups:
            raise too_few(groups, dropped)
        return RolloutBatch(groups, dropped)

    async def _run_all(self, flights: Sequence[Flight]) -> list[Group | Dropped]:
        running: list[asyncio.Task[Group | Dropped]] = []
        try:
            async with self._starting():
                running = [asyncio.create_task(self._run_one(each)) for each in flights]
            return await asyncio.gather(*running)
        finally:
            # Also of a Ctrl-C that came while they started: nothing may go on asking the engine.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_one(self, flight: Flight) -> Group | Dropped:
        flight.task = asyncio.current_task()
        self._flights.begin(flight)
        try:
            return await self._groups.run(flight, WatchedEngine.maker(self._engine, flight))
        finally:
            self._flights.end(flight)
