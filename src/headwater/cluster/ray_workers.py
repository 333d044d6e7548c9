"""Reward workers and tools on other nodes.

    pool = RayRewardPool.make(options, num_workers=4, max_concurrent=256)
    reply = await pool.call(function, arguments, None, timeout_s=60.0)      # as ``rewards.pool.WorkerPool``

Each reward actor runs scoring functions in worker processes on its node. It has no state, so Ray restarts one that
has ended, on any node, and repeats its calls once.

    tools = RayTools.start(options, config.tools, config.sandbox, MediaSettings.of(config.data))
    toolbox = Toolbox.from_config(config.tools, config.sandbox, tokenizer, tools)     # instead of a ``ToolMaker``

Each tool actor has its own copy of all tools of a run, and holds the state of some episodes. All calls of an episode go
to the same actor. Limits, counts and truncation stay in the toolbox, in the process of the training loop. Ray restarts
an actor that has ended, on any node. Episodes whose state it held are told that their tools are unavailable; other
episodes use the other actors until its tools are ready again.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from headwater.cluster.ray_actor import ActorPool, AsyncActor, SentError, death_of
from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.errors import HeadwaterError
from headwater.data.media import MediaSettings
from headwater.rewards.functions import Failure, RemoteFunction, Scorable
from headwater.rewards.pool import WorkerPool
from headwater.rewards.worker_process import Reply
from headwater.tools.base import BaseTool, ToolError, ToolUnavailable
from headwater.tools.config import ToolEntry
from headwater.tools.loaded import MadeTool
from headwater.tools.making import ToolMaker
from headwater.tools.results import BadResult, read_result_apart
from headwater.tools.running import call_method
from headwater.tools.schema import ToolSchema
from headwater.tools.session import id_of

_MAX_CONCURRENCY = 10_000
"""Calls of one actor at the same time. The toolbox has lower limits; Ray's default is too low for many tools."""
_MAX_EPISODES = 100_000
"""Episodes whose actor is remembered. Far more than run at the same time; the oldest are forgotten."""
_PROBE_EVERY_S = 2.0
"""How often an actor that has ended is asked whether it is back."""
_LOST = "the actor that held the state of this episode has ended"


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


@dataclass(frozen=True)
class Order:
    """One call of a method of a tool."""

    id: int
    tool: int
    """Its place among the tools of the run."""
    method: str
    instance_id: str
    arguments: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    life: str = ""
    """The life of the actor that has answered earlier calls of this episode; empty before the first one."""


@dataclass(frozen=True)
class ToolReply:
    value: Any = None
    error: SentError | None = None
    """An error of our own classes."""
    raised: tuple[str, str] = ("", "")
    """Another error: the name of its class and its text. The class may not exist on another node."""
    is_cancelled: bool = False
    life: str = ""


class ToolActor(AsyncActor):
    """The actor. Its methods are coroutines on one event loop, on which the tools run as well."""

    def __init__(self, name: str, config: ToolsConfig, sandbox: SandboxConfig, media: MediaSettings) -> None:
        super().__init__(name)
        self._media = media
        self._maker = ToolMaker(config, sandbox)
        self._life = secrets.token_hex(8)
        self._tools: list[MadeTool] | None = None
        self._lock = asyncio.Lock()
        self._running: dict[int, asyncio.Task[Any]] = {}

    async def describe(self, entries: Sequence[ToolEntry]) -> tuple[list[MadeTool], list[int]] | SentError:
        """The tools without their objects, and the most calls of each at the same time (0 for no limit)."""
        try:
            made = await self._made(entries)
        except Exception as error:  # noqa: BLE001  raised again in the process of the training loop
            return SentError.of(error)
        limits = [int(getattr(each.tool, "max_concurrent", 0)) for each in made]
        return [replace(each, tool=None) for each in made], limits

    async def call(self, entries: Sequence[ToolEntry], order: Order) -> ToolReply:
        if order.life not in ("", self._life):
            return ToolReply(error=SentError.of(ToolUnavailable(_LOST)))
        try:
            made = (await self._made(entries))[order.tool]
        except Exception as error:  # noqa: BLE001  an actor that was restarted cannot make its tools
            return ToolReply(error=SentError.of(ToolUnavailable(str(error))))
        given = () if order.method == "check" else (order.instance_id, *order.arguments)
        call = partial(getattr(made.tool, order.method), *given, **(order.kwargs or {}))
        is_interrupted = order.method not in ("create", "release")
        task = self._running[order.id] = asyncio.ensure_future(call_method(call, interrupt=is_interrupted))
        try:
            await asyncio.wait({task})
        finally:
            del self._running[order.id]
        return replace(await _answer(task, order, self._media), life=self._life)

    async def cancel(self, number: int) -> None:
        if number in self._running:
            self._running[number].cancel()

    async def close(self, limit_s: float) -> None:
        await self._maker.close(limit_s)

    async def _made(self, entries: Sequence[ToolEntry]) -> list[MadeTool]:
        async with self._lock:
            if self._tools is None:
                self._tools = await self._maker.make(entries)
            return self._tools


async def _answer(task: asyncio.Task[Any], order: Order, media: MediaSettings) -> ToolReply:
    if task.cancelled():
        return ToolReply(is_cancelled=True)
    try:
        value = task.result()
        if order.method == "execute":
            value = await read_result_apart(value, media)
        elif order.method == "create":
            value = id_of(value, order.instance_id)
        return ToolReply(value)
    except HeadwaterError as error:
        return ToolReply(error=SentError.of(error))
    except Exception as error:  # noqa: BLE001  a tool may raise anything
        return ToolReply(raised=(type(error).__name__, str(error)))


class ActorEnded(ToolUnavailable):
    """The actor of a call has ended, before or during it."""


@dataclass
class _Home:
    """The actor of an episode."""

    actor: int
    life: str = ""


class RemoteTool(BaseTool):
    """A tool in an actor, which all episodes share."""

    def __init__(self, tools: RayTools, number: int, schema: ToolSchema, max_concurrent: int) -> None:
        super().__init__(tool_schema=schema)
        self._tools = tools
        self._number = number
        if max_concurrent:
            self.max_concurrent = max_concurrent

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._tools.call(self._number, "create", instance_id, (), kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await self._tools.call(self._number, "execute", instance_id, (parameters,), kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._tools.call(self._number, "calc_reward", instance_id, (), kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        with suppress(ToolUnavailable):  # what an actor held has ended with it
            await self._tools.call(self._number, "release", instance_id, (), kwargs)

    async def check(self) -> None:
        for actor in range(self._tools.num_actors):
            await self._tools.ask(actor, Order(self._tools.next_id(), self._number, "check", ""))


class RayTools(ActorPool):
    """The actors, seen from the toolbox (``tools.toolbox.MakesTools``)."""

    start_limit_s = 600.0
    """Starting a process and importing torch on a slow disk takes long."""

    def __init__(self, actors: Sequence[Any]) -> None:
        super().__init__("tools", actors)
        self._entries: Any = ()
        self._num_open = [0] * len(actors)
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._ids = itertools.count()
        self._probes: dict[int, asyncio.Task[None]] = {}
        """Of the actors that have ended and are not back yet, by their place."""

    @classmethod
    def start(
        cls, options: Sequence[dict[str, Any]], config: ToolsConfig, sandbox: SandboxConfig, media: MediaSettings
    ) -> RayTools:
        """One actor per entry of ``options``, which are Ray's. ``media`` limits the images and videos of results."""
        remote = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=_MAX_CONCURRENCY)
        actor = remote(ToolActor)
        return cls([actor.options(**each).remote(each["name"], config, sandbox, media) for each in options])

    @property
    def num_actors(self) -> int:
        return len(self._actors)

    def next_id(self) -> int:
        return next(self._ids)

    async def make(self, entries: Sequence[ToolEntry]) -> list[MadeTool]:
        self._entries = ray.put(list(entries))
        try:
            described = await asyncio.gather(*(actor.describe.remote(self._entries) for actor in self._actors))
        except RayError as error:
            raise HeadwaterError(f"cluster.tools.num_actors: an actor has ended: {death_of(error)}") from error
        for each in described:
            if isinstance(each, SentError):
                raise each.again() if each.is_ours else HeadwaterError(f"tools in actors of Ray: {each.told()}")
        made, limits = described[0]
        return [
            replace(each, tool=RemoteTool(self, number, each.schema, self.num_actors * limit))
            for number, (each, limit) in enumerate(zip(made, limits, strict=True))
        ]

    async def close(self, limit_s: float) -> None:
        """End the services of the tools, then the actors."""
        for probe in list(self._probes.values()):
            probe.cancel()
        asked = [actor.close.remote(limit_s) for actor in self._actors]
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), limit_s)
        self.kill()

    async def call(
        self, tool: int, method: str, instance_id: str, arguments: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a method of a tool in the actor of an episode."""
        home = self._homes.get(instance_id)
        if home is None:
            home = self._homes[instance_id] = _Home(self._next_place())
            while len(self._homes) > _MAX_EPISODES:
                self._homes.popitem(last=False)
        order = Order(self.next_id(), tool, method, instance_id, arguments, kwargs, home.life)
        place = home.actor
        try:
            answer = await self.ask(place, order)
        except ActorEnded:
            if home.life or method == "release":
                raise
            if home.actor == place:  # the episode has no state yet
                home.actor = self._next_place()
            answer = await self.ask(home.actor, replace(order, id=self.next_id()))
        home.life = answer.life
        if method == "create":
            self._homes[answer.value] = home  # a tool may choose its own id
        return answer.value

    def _next_place(self) -> int:
        """The actor with the fewest calls, of those that have not ended if there are any."""
        places = [place for place in range(self.num_actors) if place not in self._probes]
        return min(places or range(self.num_actors), key=self._num_open.__getitem__)

    async def _probe(self, place: int) -> None:
        """Return when an actor has made its tools again."""
        while True:
            with suppress(RayError):
                if not isinstance(await self._actors[place].describe.remote(self._entries), SentError):
                    return
            await asyncio.sleep(_PROBE_EVERY_S)

    async def ask(self, place: int, order: Order) -> ToolReply:
        """The answer of an actor. A cancellation is passed on, and waits until the call there has ended."""
        actor = self._actors[place]
        self._num_open[place] += 1
        try:
            try:
                future = asyncio.wrap_future(actor.call.remote(self._entries, order).future())
            except TypeError as error:  # Ray's error for values that cannot be pickled
                raise ToolError(f"takes values that cannot be sent to another node ({error})") from error
            try:
                answer: ToolReply = await asyncio.shield(future)
            except asyncio.CancelledError:
                actor.cancel.remote(order.id)
                answer = await future
        except RayError as error:
            if place not in self._probes:
                self._probes[place] = asyncio.create_task(self._probe(place))
                self._probes[place].add_done_callback(lambda _: self._probes.pop(place, None))
            raise ActorEnded(f"its actor tools-{place} has ended: {death_of(error)}") from error
        finally:
            self._num_open[place] -= 1
        _raise(answer)
        return answer


def _raise(answer: ToolReply) -> None:
    """Raise the error of an answer, so that messages are those of a tool in this process."""
    if answer.is_cancelled:
        raise asyncio.CancelledError
    if answer.error is not None:
        raise answer.error.again()
    name, text = answer.raised
    if name == BadResult.__name__:
        raise BadResult(text)
    if name:
        raise type(name, (Exception,), {})(text)
