"""Reward workers on other nodes: each actor runs scoring functions in worker processes of its own node.

    pool = RayRewardPool.make(options, num_workers=4, max_concurrent=256)
    reply = await pool.call(function, arguments, None, timeout_s=60.0)      # as ``rewards.pool.WorkerPool``

An actor has no state, so Ray restarts one that has ended, on any node, and repeats its calls once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from headwater.cluster.ray_actor import ActorPool, AsyncActor, death_of
from headwater.rewards.functions import Failure, RemoteFunction, Scorable
from headwater.rewards.pool import WorkerPool
from headwater.rewards.worker_process import Reply


class RewardWorkers(AsyncActor):
    """The actor. Calls run concurrently, each in a worker process."""

    def __init__(self, name: str, num_workers: int, max_concurrent: int) -> None:
        super().__init__(name)
        self._pools = {False: WorkerPool(num_workers), True: WorkerPool(1, max_concurrent)}
        self._functions: dict[str, RemoteFunction] = {}

    async def call(
        self,
        key: str,
        function: RemoteFunction,
        arguments: Mapping[str, Any],
        count: int | None,
        timeout_s: float,
    ) -> Reply:
        known = self._functions.setdefault(key, function)  # a pool knows functions by their identity
        return await self._pools[known.is_async].call(known, arguments, count, timeout_s)

    async def pids(self) -> list[int]:
        """Of the worker processes."""
        return [pid for pool in self._pools.values() for pid in pool.pids]


class RayRewardPool(ActorPool):
    """The actors, seen from the training loop (``rewards.pool.CallPool``)."""

    def __init__(self, actors: Sequence[Any]) -> None:
        super().__init__("reward", actors)
        self._num_open = [0] * len(actors)
        self._keys: dict[Scorable, str] = {}

    @classmethod
    def make(cls, options: Sequence[dict[str, Any]], *, num_workers: int, max_concurrent: int) -> RayRewardPool:
        """One actor per entry of ``options``, which are Ray's."""
        remote = ray.remote(max_restarts=-1, max_task_retries=1, max_concurrency=num_workers + max_concurrent)
        actor = remote(RewardWorkers)
        return cls([actor.options(**each).remote(each["name"], num_workers, max_concurrent) for each in options])

    async def call(
        self, function: Scorable, arguments: Mapping[str, Any], count: int | None, timeout_s: float
    ) -> Reply:
        key = self._keys.setdefault(function, str(len(self._keys)))
        place = min(range(len(self._actors)), key=self._num_open.__getitem__)
        self._num_open[place] += 1
        sent = RemoteFunction(function.path, dict(function.settings), function.is_async)
        try:
            ref = self._actors[place].call.remote(key, sent, dict(arguments), count, timeout_s)
        except TypeError as error:  # Ray's error for values that cannot be pickled
            self._num_open[place] -= 1
            text = f"takes values that cannot be sent to another node ({error}); use cluster.reward.num_actors=0"
            return Failure("bad_arguments", text)
        try:
            reply: Reply = await ref
            return reply
        except RayError as error:
            return Failure("worker_died", f"ended its actor reward-{place}: {death_of(error)}")
        finally:
            self._num_open[place] -= 1
            with suppress(RayError, ValueError):
                ray.cancel(ref)  # does nothing to a call that has ended

    def start(self, function: Scorable) -> None:
        """Nothing: workers load a function with its first call."""

    def close(self) -> None:
        self.kill()
