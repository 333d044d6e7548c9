"""Servers in Ray actors. To whoever keeps a server alive, one is a ``ServerProcess``, like a child process.

    start = partial(RayChild.start, slot)         # a ``StartChild`` for ``BackendContext.start_child``
    child = await start(command)                  # an actor on some node has started the server, and it answers
    how = await child.wait()                      # until the server, its actor or its node has ended

Each actor runs the command of one server and ends with it. If it ends, the server's keeper starts another one, which
Ray may place on another node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from headwater.backends.launch.child import ChildServer, Command
from headwater.cluster.ray_actor import ActorPlace, AsyncActor, SentError, death_of
from headwater.core.errors import HeadwaterError, RolloutFailed
from headwater.core.waits import ENGINE_START_LIMIT_S, named_wait

logger = logging.getLogger(__name__)

_STOP_LIMIT_S = 30.0
_DEATH_LIMIT_S = 15.0
"""How long Ray may take to tell how an actor that was killed has ended."""


class RolloutServer(AsyncActor):
    """The actor. It answers while the server runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._child: ChildServer | None = None

    async def place(self) -> ActorPlace:
        return ActorPlace.here()

    async def start(self, command: Command, python: str) -> str | SentError:
        """Start the server and return its URL. ``python`` is the interpreter of the process that asks."""
        if command.arguments[0] == python:
            # The same environment may be at another path on this node.
            command = replace(command, arguments=(sys.executable, *command.arguments[1:]))

        def echo(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        try:
            self._child = await ChildServer.start(command, host=ActorPlace.here().address, echo=echo)
        except Exception as error:  # noqa: BLE001  sent to the training loop, which raises it there
            return SentError.of(error)
        return self._child.url

    async def wait(self) -> tuple[str, str]:
        """How the server has ended, and its last output."""
        assert self._child is not None, "started"
        return await self._child.wait(), self._child.last_lines

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()


@dataclass
class ServerSlot:
    """The place of one server, in which one actor after the other runs."""

    name: str
    reserve: Callable[[], dict[str, Any]]
    """Waits for resources, and returns Ray's options of the actor."""
    release: Callable[[], object]
    """Gives the resources back."""
    tell: Callable[[str], object]
    """Records an event."""
    only_at: str = ""
    """The address of the only node from which it can reach the learner's shared memory; empty if it uses none."""
    log: tuple[Path, str] | None = None
    """The folder for its output and the folder's token, once the run has one."""
    actor: Any = None
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def log_to(self, folder: Path, token: str) -> None:
        self.log = (folder, token)
        if self.actor is not None:
            with suppress(RayError):  # the next actor is told when it starts
                self.tell(
                    f"{self.name} logs to {ray.get(self.actor.log_to.remote(folder, token), timeout=_STOP_LIMIT_S)}"
                )


class RayChild:
    """A server in an actor (``launch.keeper.ServerProcess``)."""

    def __init__(self, slot: ServerSlot, actor: Any, place: ActorPlace, url: str) -> None:
        self.url = url
        self._slot = slot
        self._actor = actor
        self._place = place
        self._last_lines = ""
        self._is_killed = False
        self._end = actor.wait.remote()

    @classmethod
    async def start(cls, slot: ServerSlot, command: Command) -> RayChild:
        """Start an actor on a node with room for it, and the server inside."""
        number = next(slot.numbers)
        name = slot.name if number == 0 else f"{slot.name} (restart {number})"
        options = await asyncio.to_thread(slot.reserve)
        actor = ray.remote(max_restarts=0)(RolloutServer).options(name=name, **options).remote(slot.name)
        slot.actor = actor
        try:
            started = await named_wait(
                cls._started(slot, actor, command),
                lambda: f"{slot.name} starts {command.serves} in an actor of Ray",
                hard_limit_s=ENGINE_START_LIMIT_S,
                kind="engine_start",
            )
        except BaseException as error:
            _kill(actor)
            slot.release()
            if isinstance(error, RayError):
                raise RolloutFailed(f"{slot.name}: its actor has ended: {death_of(error)}") from error
            raise
        return started

    @classmethod
    async def _started(cls, slot: ServerSlot, actor: Any, command: Command) -> RayChild:
        place: ActorPlace = await actor.place.remote()
        if slot.only_at and place.address != slot.only_at:
            raise RolloutFailed(
                f"rollout.weight_transfer = shared_memory: Ray has placed {slot.name} on {place.address}, and the "
                f"training loop is on {slot.only_at}; use rollout.weight_transfer=collective, or file with "
                "rollout.weight_folder"
            )
        if slot.log is not None:
            slot.tell(f"{slot.name} logs to {await actor.log_to.remote(*slot.log)}")
        url = await actor.start.remote(command, sys.executable)
        if isinstance(url, SentError):
            raise url.again() if url.is_ours else RolloutFailed(f"{slot.name} on {place}: {url.told()}")
        slot.tell(f"{slot.name} serves at {url} ({place})")
        return cls(slot, actor, place, url)

    @property
    def name(self) -> str:
        return f"actor {self._slot.name} ({self._place})"

    @property
    def last_lines(self) -> str:
        return self._last_lines or "(no output)"

    async def wait(self) -> str:
        try:
            ended = asyncio.wrap_future(self._end.future())
            # Otherwise asyncio would log the error if nothing waits any more when it comes.
            ended.add_done_callback(lambda future: future.cancelled() or future.exception())
            end = asyncio.shield(ended)  # the keeper gives up waiting and asks again
            server, self._last_lines = await (asyncio.wait_for(end, _DEATH_LIMIT_S) if self._is_killed else end)
            how = f"has ended, because its {server}"
        except RayError as error:
            how = f"has ended: {death_of(error)}"
        except TimeoutError:
            how = "was killed"
        return f"{self.name} {how}"

    def kill(self) -> None:
        self._is_killed = True
        _kill(self._actor)

    async def stop(self) -> None:
        """End the server, its actor and the reservation."""
        if not self._is_killed:
            with suppress(RayError, TimeoutError, HeadwaterError):
                await asyncio.wait_for(asyncio.wrap_future(self._actor.stop.remote().future()), _STOP_LIMIT_S)
            self.kill()
        self._slot.tell(await self.wait())
        self._slot.actor = None
        self._slot.release()


def _kill(actor: Any) -> None:
    with suppress(RayError, ValueError):  # it has ended already
        ray.kill(actor)
