"""Given prompts that are cancelled at any moment leave nothing running."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from rollout.executor_parts import Scripted, draw_of, runner_of
from rollout.held_engine import HeldEngine

from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.flight import Dispatch, Flight
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.joint import JointStart
from headwater.rollout.side_by_side import SideBySide


@pytest.mark.parametrize("is_held", [True, False], ids=["while the engine is held", "later"])
def test_cancelled_prompts_do_not_keep_running(is_held):
    """As after Ctrl-C at the beginning of an evaluation: its groups have started, and the engine may still be held."""
    engine, num_begun, num_ended = HeldEngine(), 0, 0

    async def sleeps(data):
        nonlocal num_begun, num_ended
        num_begun += 1
        try:
            await asyncio.sleep(3600)
        finally:
            num_ended += 1

    async def cancel_all() -> None:
        flights = [Flight(Dispatch(number, draw_of(number)), 0, groups.num_episodes) for number in range(3)]
        work = asyncio.create_task(side_by_side._run_all(flights, lambda: None))
        while num_begun < 6 or engine.calls != ([] if is_held else ["pause", "resume"]):  # noqa: ASYNC110  turn by turn
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    @asynccontextmanager
    async def starting():
        start = JointStart(engine, limit_s=3600 if is_held else 0.01)
        yield start
        await start.open()

    groups = GroupRunner(runner_of(Scripted(sleeps)), num_samples=2, on_failure="stop")
    with AsyncTaskRunner() as tasks:
        side_by_side = SideBySide(engine, groups, tasks, starting, timeout_s=600.0, episode_timeout_s=600.0)
        tasks.start(cancel_all()).result(300)
        assert (num_begun, num_ended) == (6, 6)
        assert side_by_side._flights.describe() == "no group is running"
        assert engine.calls == ([] if is_held else ["pause", "resume"])
