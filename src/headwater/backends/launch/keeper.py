"""Supervises an engine's child process: starts it, watches it, replaces it when it dies, and gives up in the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headwater.backends.launch.child import ChildServer
from headwater.backends.native.client import ConnectionLost, EngineFailed, RequestLink, ServerClient
from headwater.backends.native.requests import OpenRequest, OpenRequests
from headwater.core.errors import RolloutFailed, TransferLost
from headwater.core.protocols import MemoryTag
from headwater.observe.spans import Spans
from headwater.weights.file import FileWeights

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Deaths in a row, without a finished request in between, after which a restart is no longer worth trying."""
_LOST_S = 0.1
"""Time to wait after a lost connection, in which the end of the process is noticed."""
_DEATH_S = 5.0
"""How long a process that has closed a connection may take to end by itself."""


@dataclass(frozen=True)
class _Death:
    how: str
    last_lines: str = ""
    """The last output of the child; empty if no process started."""

    def in_short(self) -> str:
        return f"{self.how}; its last output: {self.last_lines.splitlines()[-1]}" if self.last_lines else self.how

    def in_full(self) -> str:
        return f"{self.how}; its output:\n{self.last_lines}" if self.last_lines else self.how


@dataclass
class ChildState:
    """What the child was told, so that the next one can be told the same."""

    version: int = 0
    weights_file: FileWeights | None = None
    """The newest weights, if they were sent through a file. A new child reads it."""
    were_streamed: bool = False
    """Weights were sent through shared memory, so a new child must be sent them again."""
    needs_weights: bool = False
    """The child does not hold a complete version. Requests wait until it does."""
    is_paused: bool = False
    asleep: set[MemoryTag] = field(default_factory=set)

    async def restore(self, client: ServerClient) -> None:
        """Tell a child that has just started, before it is asked for anything."""
        if self.is_paused:
            await client.call("/control/pause", {})
        if self.weights_file is not None:
            body = {"version": self.version, "source": {"file": str(self.weights_file.path)}, "mode": "in_flight"}
            await client.call("/control/update_weights", body)
        elif self.version:
            await client.call("/control/version", {"version": self.version})
        self.needs_weights = self.were_streamed
        if self.asleep:
            await client.call("/control/sleep", {"tags": sorted(self.asleep)})


class ChildKeeper:
    """Keeps a child serving, and restores the state of the last one in the next. Belongs to one event loop.

        keeper = ChildKeeper("tiny:qwen3", ("--dtype", "float32"), api_key, spans)
        await keeper.start()
        keeper.enter(opened)                        # answered even if children die meanwhile
        await keeper.call("/control/pause", {})     # answered by whichever child serves
        await keeper.end()

    When it gives up, every open request and every call fails with the cause, and so does everything that comes later.
    """

    def __init__(self, model: str, arguments: Sequence[str], api_key: str, spans: Spans) -> None:
        self.state = ChildState()
        self.requests = OpenRequests(spans, on_finish=self._a_request_finished, on_failed_engine=self._kill_child)
        self.num_restarts = 0
        """In total."""
        self._model = model
        self._arguments = arguments
        self._api_key = api_key
        self._num_deaths = 0
        """In a row, without a finished request in between."""
        self._failure: RolloutFailed | None = None
        self._child: ChildServer | None = None
        self._client: ServerClient | None = None
        self._link: RequestLink | None = None
        self._why_killed = ""
        """Why this process killed the current or last child; empty if it did not."""
        self._watch: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while a child serves, and once no child will serve again."""

    @property
    def pid(self) -> int:
        """The process id of the child that serves now."""
        assert self._child is not None, "started"
        return self._child.pid

    @property
    def is_settled(self) -> bool:
        """Whether a child serves, or no child will serve again."""
        return self._settled.is_set()

    async def start(self) -> None:
        """Return when the first child serves. It raises if that fails: only later children are retried."""
        try:
            await self._begin()
        except ConnectionLost as error:
            death = await self._end_of_start(error)
            raise RolloutFailed(f"the engine's {death.in_full()}") from error
        self._watch = asyncio.create_task(self._keep_watch())

    async def end(self) -> None:
        """Stop the child, and start no other. Open requests end with the tokens they have."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._failure = self._failure or RolloutFailed("the engine is closed")
        self._settled.set()
        self.requests.abort_all()
        await self._end_child()

    def enter(self, opened: OpenRequest) -> None:
        if self._failure is not None:
            opened.fail(self._failure)
        else:
            self.requests.enter(opened)

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call whichever child serves. Every such call may be repeated: if the child dies, the next one is called."""
        num_lost, lost_by = 0, None
        while True:
            client = await self.client()
            try:
                return await client.call(path, body)
            except ConnectionLost as error:
                num_lost, lost_by = (num_lost + 1 if client is lost_by else 1), client
                await asyncio.sleep(_LOST_S)
                # Attempts are counted instead of time, because one of them may have been a call that took long.
                if num_lost * _LOST_S > _DEATH_S and self.is_settled and client is self._client:
                    raise RolloutFailed(
                        f"the engine's process {self.pid} is alive but cannot be reached: {error}; {num_lost} attempts"
                    ) from error
            except EngineFailed as error:  # the process is alive but useless
                self._kill_child(f"{path}: {error}")
                await asyncio.sleep(_LOST_S)

    async def client(self) -> ServerClient:
        """The client of the child that serves, once one does."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self._client is not None, "it serves"
        return self._client

    async def call_same(self, client: ServerClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One step of a transfer to the child of ``client``. ``TransferLost`` if that child does not survive it."""
        try:
            return await client.call(path, body)
        except ConnectionLost as error:
            raise TransferLost(f"the engine's process ended during a weight update: {error}") from error
        except EngineFailed as error:
            if client is self._client:
                self._kill_child(f"{path}: {error}")
            raise TransferLost(f"the engine failed during a weight update: {error}") from error

    def weights_arrived(self, client: ServerClient, version: int) -> None:
        """The child of ``client`` holds a complete ``version``: requests that waited for it are sent."""
        if client is not self._client:
            raise TransferLost("the engine's process ended after a weight update")
        self.state.version = version
        self.state.needs_weights = False
        if self._link is not None and self.requests.link is None:
            self.requests.continue_on(self._link)

    def _a_request_finished(self) -> None:
        self._num_deaths = 0

    def _kill_child(self, why: str) -> None:
        if self._child is not None:
            self._why_killed = why
            self._child.kill()

    async def _begin(self) -> None:
        """Start a child that knows what the last one knew, and continue the open requests."""
        self._child = await ChildServer.start(self._model, self._arguments, self._api_key)
        self._client = ServerClient(self._child.url, self._api_key)
        self._why_killed = ""
        await self.state.restore(self._client)
        self._link = await self._client.connect(self.requests.take)
        if self.state.needs_weights:
            logger.warning(
                "the engine's new process needs the weights of version %d; %d requests wait until they are published",
                *(self.state.version, len(self.requests)),
            )
        else:
            self.requests.continue_on(self._link)
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
        while self._failure is None:
            death = await self._until_lost()
            while self._failure is None:
                self._num_deaths += 1
                if self._num_deaths > MAX_RESTARTS:
                    self._give_up(
                        f"the engine's process died {self._num_deaths} times in a row without finishing a request; try "
                        f"it alone with `headwater serve`, or use rollout.placement=colocated. The last time, "
                        f"{death.in_full()}"
                    )
                    break
                self.num_restarts += 1
                logger.warning(
                    "the engine's %s; it is restarted (%d of at most %d times in a row) and %d requests continue",
                    *(death.in_short(), self._num_deaths, MAX_RESTARTS, len(self.requests)),
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
        if isinstance(error, ConnectionLost):  # most likely it is about to end and to print why
            with suppress(TimeoutError):
                how += f"; {await asyncio.wait_for(child.wait(), _DEATH_S)}"
        death = _Death(how, child.last_lines)  # read before the child is told to stop, which it would print too
        await self._end_child()
        return death

    async def _until_lost(self) -> _Death:
        """Wait for the end of the child or of its connection, and describe what happened."""
        assert self._child is not None, "started"
        assert self._link is not None, "connected"
        child, link = self._child, self._link
        reading = asyncio.create_task(link.run())
        tasks: set[asyncio.Task[Any]] = {reading, asyncio.create_task(child.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._settled.clear()
            self.requests.link = None
            unread = reading.exception() if reading.done() else None
            if unread is not None:
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
            how += f", after it had sent an unreadable message ({type(unread).__name__}: {unread})"
        if self._why_killed:
            how += f", because its engine had failed ({self._why_killed})"
        return _Death(how, child.last_lines)

    async def _end_child(self) -> None:
        client, self._client = self._client, None
        child, self._child = self._child, None
        self._link = self.requests.link = None
        if client is not None:
            await client.close()
        if child is not None:
            await child.stop()

    def _give_up(self, cause: str) -> None:
        self._failure = RolloutFailed(cause)
        self._settled.set()
        self.requests.fail_all(self._failure)
