"""Which actor the tools of an episode run in, also while some have ended."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from headwater.cluster import ray_workers
from headwater.cluster.ray_workers import ActorEnded, RayTools, ToolReply


class Method:
    """``actor.method``, with ``remote`` as Ray has it."""

    def __init__(self, work: Any) -> None:
        self.remote = work


class Reference:
    def __init__(self, value: Any) -> None:
        self._future: Future[Any] = Future()
        if isinstance(value, Exception):
            self._future.set_exception(value)
        else:
            self._future.set_result(value)

    def future(self) -> Future[Any]:
        return self._future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()


class Actor:
    """The calls of an actor of Ray."""

    def __init__(self) -> None:
        self.is_up = True
        self.life = "first"
        self.num_calls = 0
        self.call = Method(self._call)
        self.describe = Method(lambda entries: Reference(([], []) if self.is_up else RayActorError()))

    def _call(self, entries: Any, order: Any) -> Reference:
        self.num_calls += 1
        return Reference(ToolReply(order.instance_id, life=self.life) if self.is_up else RayActorError())


def test_new_episodes_leave_out_an_actor_that_has_ended_until_it_is_back(monkeypatch):
    monkeypatch.setattr(ray_workers, "_PROBE_EVERY_S", 0.01)

    async def run() -> None:
        actors = [Actor(), Actor()]
        tools = RayTools(actors)

        async def create(name: str) -> None:
            assert await tools.call(0, "create", name, (), {}) == name

        await create("old")
        assert (actors[0].num_calls, actors[1].num_calls) == (1, 0)
        actors[0].is_up = False
        await create("a")
        assert (actors[0].num_calls, actors[1].num_calls) == (2, 1), "an episode without state tries another actor"
        for name in "bcd":
            await create(name)
        assert (actors[0].num_calls, actors[1].num_calls) == (2, 4), "others do not meet the one that has ended"
        await tools.call(0, "execute", "a", (), {})
        assert actors[1].num_calls == 5, "an episode stays where it began"
        with pytest.raises(ActorEnded, match="tools-0 has ended"):
            await tools.call(0, "execute", "old", (), {})
        actors[0].is_up = True
        await asyncio.wait_for(asyncio.gather(*tools._probes.values()), 60)
        await asyncio.sleep(0)
        await create("e")
        assert actors[0].num_calls == 4, "it has the fewest calls, and is used again"
        for actor in actors:
            actor.is_up = False
        with pytest.raises(ActorEnded):
            await create("f")
        for probe in tools._probes.values():
            probe.cancel()

    asyncio.run(run())
