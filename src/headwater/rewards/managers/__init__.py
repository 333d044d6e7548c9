"""Reward managers, one file each: they pass finished episodes to scoring functions."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future
from dataclasses import replace

from headwater.core.errors import RewardFailed, RolloutFailed
from headwater.core.records import RewardManager, ScorableEpisode, Score, Trajectory
from headwater.core.registry import Registry
from headwater.core.waits import wait_for_future

REWARD_MANAGERS = Registry("reward manager", "headwater.rewards.managers")


_NUMBER = "late"
"""Until a score is joined, the number of the scoring call in ``Trajectory.reward_info``."""


class LateScores:
    """A reward manager whose ``score`` starts the scoring and returns at once. ``joined`` waits for the real score.

    The number in place of a score is 0.0 and must not be used, so only a workflow that does not look at it can have
    late scores.
    """

    def __init__(self, manager: RewardManager, *, timeout_s: float) -> None:
        """``timeout_s`` limits the wait for one score."""
        self._manager = manager
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Score]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, episode: ScorableEpisode) -> Score:
        number = next(self._numbers)
        self._pending[number] = Future()
        task = asyncio.ensure_future(self._score(number, episode))
        self._tasks.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)
        return Score(0.0, {_NUMBER: number})

    async def _score(self, number: int, episode: ScorableEpisode) -> None:
        pending = self._pending[number]
        try:
            pending.set_result(await self._manager.score(episode))
        except BaseException as error:  # raised again where the score is joined
            pending.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def joined(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its score. Called by the learner's thread."""
        pending = self._pending.pop(trajectory.reward_info[_NUMBER])
        what = f"the score of row {trajectory.uid}, sample {trajectory.sample}"
        try:
            score = wait_for_future(pending, lambda: what, kind="reward", hard_limit_s=self._timeout_s)
        except RewardFailed as error:
            raise RolloutFailed(f"row {trajectory.uid}, sample {trajectory.sample}: {error}") from error
        info = {name: value for name, value in trajectory.info.items() if name != _NUMBER}
        return replace(trajectory, reward=score.value, info={**score.info, **info}, reward_info=score.info)
