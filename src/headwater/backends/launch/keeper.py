"""Supervises a server's child process: starts it, watches it, replaces it when it dies, and gives up in the end.

A server that someone else started (``native/places.py``) is supervised alike, but waited for instead of restarted. How
to talk to the server is not known here: a ``Service`` connects to each child and takes over from the last one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.core.errors import RolloutFailed

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Deaths in a row, without a finished request in between, after which a restart is no longer worth trying."""
_DEATH_S = 5.0
"""How long a process that has closed a connection may take to end by itself."""


class ServerProcess(Protocol):
    """A process that serves: a ``ChildServer`` or a ``RunningServer``."""

    @property
    def url(self) -> str: ...
    @property
    def name(self) -> str:
        """For messages, for example ``process 4711``."""
        ...

    @property
    def last_lines(self) -> str:
        """The end of its output; empty if it is not known."""
        ...

    async def wait(self) -> str:
        """Wait until it has ended, and return a description of how."""
        ...

    def kill(self) -> None: ...
    async def stop(self) -> None: ...


class Service(Protocol):
    """What the children serve. The keeper makes all calls on its event loop."""

    @property
    def num_open(self) -> int:
        """How many requests wait for an answer."""
        ...

    async def start_child(self) -> ServerProcess:
        """Start a process and return when it answers."""
        ...

    async def on_up(self, child: ServerProcess) -> None:
        """Connect to a child that has just started, and tell it what the last one knew.

        The child serves when this returns. After an error it is replaced. A ``ConnectionError`` means that it no
        longer answers, so it is given time to end by itself and to print why.
        """
        ...

    async def until_lost(self) -> None:
        """Return when the connection to the child has ended. An error means that the child sent something invalid."""
        ...

    def on_lost(self) -> None:
        """Send nothing more to the child: it has ended, or is about to."""
        ...

    async def on_down(self) -> None:
        """Close the connection. Also called for a child that did not get to serve."""
        ...

    def on_failure(self, failure: RolloutFailed) -> None:
        """No child will serve again."""
        ...


@dataclass(frozen=True)
class _Death:
    how: str
    last_lines: str = ""
    """The last output of the child; empty if no process started."""

    def in_short(self) -> str:
        return f"{self.how}; its last output: {self.last_lines.splitlines()[-1]}" if self.last_lines else self.how

    def in_full(self) -> str:
        return f"{self.how}; its output:\n{self.last_lines}" if self.last_lines else self.how


class ChildKeeper:
    """Keeps a child serving. Belongs to one event loop.

    keeper = ChildKeeper(service, "try it alone")
    await keeper.start()
    await keeper.until_serving()    # raises the cause once no child will serve again
    await keeper.end()
    """

    def __init__(self, service: Service, remedy: str, *, is_foreign: bool = False) -> None:
        """``remedy`` tells the user what to do when the keeper has given up. A foreign server cannot be restarted."""
        self.num_restarts = 0
        """In total."""
        self.failure: RolloutFailed | None = None
        """Why no child will serve again."""
        self._service = service
        self._remedy = remedy
        self._noun, self._next_step = (
            ("server", "its return is awaited") if is_foreign else ("process", "it is restarted")
        )
        self._num_deaths = 0
        """In a row, without a finished request in between."""
        self._child: ServerProcess | None = None
        self._why_killed = ""
        """Why this process killed the current or last child; empty if it did not."""
        self._watch: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while a child serves, and once no child will serve again."""

    @property
    def child(self) -> ServerProcess:
        """The child that serves now."""
        assert self._child is not None, "started"
        return self._child

    @property
    def is_settled(self) -> bool:
        """Whether a child serves, or no child will serve again."""
        return self._settled.is_set()

    async def until_serving(self) -> None:
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def start(self) -> None:
        """Return when the first child serves. It raises if that fails: only later children are retried."""
        try:
            await self._begin()
        except ConnectionError as error:
            death = await self._end_of_start(error)
            raise RolloutFailed(f"the engine's {death.in_full()}") from error
        self._watch = asyncio.create_task(self._keep_watch())

    async def end(self) -> None:
        """Stop the child, and start no other."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self.failure = self.failure or RolloutFailed("the engine is closed")
        self._settled.set()
        await self._end_child()

    def note_progress(self) -> None:
        """A request has finished: the next death is the first in a row."""
        self._num_deaths = 0

    def kill(self, why: str) -> None:
        """Kill a child that is alive but useless. Another one takes its place."""
        if self._child is not None:
            self._why_killed = why
            self._child.kill()

    async def _begin(self) -> None:
        self._child = await self._service.start_child()
        self._why_killed = ""
        await self._service.on_up(self._child)
        self._settled.set()

    async def _keep_watch(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:
            # Nothing awaits this task. Without this, callers would wait for a child that never comes.
            logger.exception("the engine's process is no longer supervised")
            self._give_up(f"supervising the engine's process failed: {type(error).__name__}: {error}")

    async def _keep_alive(self) -> None:
        """Wait for the end of the child and start another one, as long as that makes sense."""
        while self.failure is None:
            death = await self._until_lost()
            while self.failure is None:
                self._num_deaths += 1
                if self._num_deaths > MAX_RESTARTS:
                    self._give_up(
                        f"the engine's {self._noun} died {self._num_deaths} times in a row without finishing a "
                        f"request; {self._remedy}. The last time, {death.in_full()}"
                    )
                    break
                self.num_restarts += 1
                logger.warning(
                    "the engine's %s; %s (%d of at most %d times in a row) and %d requests continue",
                    *(death.in_short(), self._next_step, self._num_deaths, MAX_RESTARTS, self._service.num_open),
                )
                try:
                    await self._begin()
                    break
                except Exception as error:  # noqa: BLE001  also when the system cannot start a process
                    death = await self._end_of_start(error)

    async def _end_of_start(self, error: Exception) -> _Death:
        """End a child that did not get to serve, and describe why."""
        how = f"new process could not take over: {type(error).__name__}: {error}"
        if (child := self._child) is None:
            return _Death(how)  # the error contains its last output, if there was a process
        if isinstance(error, ConnectionError):  # most likely it is about to end and to print why
            with suppress(TimeoutError):
                how += f"; {await asyncio.wait_for(child.wait(), _DEATH_S)}"
        death = _Death(how, child.last_lines)  # read before the child is told to stop, which it would print too
        await self._end_child()
        return death

    async def _until_lost(self) -> _Death:
        """Wait for the end of the child or of its connection, and describe what happened."""
        assert self._child is not None, "started"
        child = self._child
        reading = asyncio.create_task(self._service.until_lost())
        tasks: set[asyncio.Task[Any]] = {reading, asyncio.create_task(child.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._settled.clear()
            self._service.on_lost()
            unread = reading.exception() if reading.done() else None
            if unread is not None:
                if not isinstance(unread, ConnectionError):
                    logger.error("a message of the engine's process could not be read", exc_info=unread)
                child.kill()  # the connection is closed on this side, so it would not end by itself
            try:
                how = await asyncio.wait_for(child.wait(), _DEATH_S)
            except TimeoutError:
                child.kill()
                how = f"{await child.wait()}, because it had closed its connection and did not end"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_child()
        if unread is not None:
            is_gone = isinstance(unread, ConnectionError)
            what = "it could not be reached" if is_gone else "it had sent an unreadable message"
            how += f", after {what} ({type(unread).__name__}: {unread})"
        if self._why_killed:
            how += f", because its engine had failed ({self._why_killed})"
        return _Death(how, child.last_lines)

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        await self._service.on_down()
        if child is not None:
            await child.stop()

    def _give_up(self, cause: str) -> None:
        self.failure = RolloutFailed(cause)
        self._settled.set()
        self._service.on_failure(self.failure)
