"""The life of the child process: started, watched, started again when it dies, and given up when that is pointless."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headwater.backends.served.child_server import ChildServer
from headwater.backends.served.child_state import ChildState
from headwater.backends.served.open_request import OpenRequest
from headwater.backends.served.open_requests import OpenRequests
from headwater.backends.served.server_client import ConnectionLost, EngineFailed, ServerClient
from headwater.core.errors import RolloutFailed
from headwater.observe.spans import Spans

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Deaths in a row, without a finished request in between, after which something is wrong that a restart cannot mend."""
_LOST_S = 0.1
"""Until the end of a process is noticed, after its connections broke."""
_DEATH_S = 5.0
"""How long a process that has closed a connection may take to end by itself."""


@dataclass(frozen=True)
class _Death:
    how: str
    last_lines: str = ""
    """The child's last words; empty where none came to life."""

    def in_short(self) -> str:
        return f"{self.how}; its last line: {self.last_lines.splitlines()[-1]}" if self.last_lines else self.how

    def in_full(self) -> str:
        return f"{self.how}; it said:\n{self.last_lines}" if self.last_lines else self.how


class ChildKeeper:
    """Sees to it that a child serves, and knows what the next one must be told. Belongs to one event loop.

        keeper = ChildKeeper("tiny:qwen3", ("--dtype", "float32"), api_key, spans)
        await keeper.start()
        keeper.enter(opened)                        # answered also if children die meanwhile
        await keeper.call("/control/pause", {})     # by whichever child serves
        await keeper.end()

    When it gives up, every open request and every call fails with the cause, and so does all that comes later.
    """

    def __init__(self, model: str, arguments: Sequence[str], api_key: str, spans: Spans) -> None:
        self.state = ChildState()
        self.requests = OpenRequests(spans, on_finish=self._a_request_finished, on_failed_engine=self._kill_child)
        self.num_restarts = 0
        """In all."""
        self._model = model
        self._arguments = arguments
        self._api_key = api_key
        self._num_deaths = 0
        """In a row, without a finished request in between."""
        self._failure: RolloutFailed | None = None
        self._child: ChildServer | None = None
        self._client: ServerClient | None = None
        self._why_killed = ""
        """Why we killed the child that serves, or served last; empty where we did not."""
        self._watch: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while a child serves, and once none will any more."""

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        assert self._child is not None, "started"
        return self._child.pid

    @property
    def is_settled(self) -> bool:
        """Whether a child serves, or none will any more."""
        return self._settled.is_set()

    async def start(self) -> None:
        """Answers when the first child serves, and raises if it does not come to that: only later ones are retried."""
        try:
            await self._begin()
        except ConnectionLost as error:
            death = await self._end_of_start(error)
            raise RolloutFailed(f"the engine's {death.in_full()}") from error
        self._watch = asyncio.create_task(self._keep_watch())

    async def end(self) -> None:
        """Nothing is restarted any more; what runs ends as it stands."""
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
        """A call to whichever child serves. Any of them may be repeated: one that a death cut short is made again."""
        num_lost, lost_by = 0, None
        while True:
            await self._settled.wait()
            if self._failure is not None:
                raise self._failure
            client = self._client
            assert client is not None, "it serves"
            try:
                return await client.call(path, body)
            except ConnectionLost as error:
                num_lost, lost_by = (num_lost + 1 if client is lost_by else 1), client
                await asyncio.sleep(_LOST_S)
                # Attempts are counted, and not the time: one of them may have been a call that took long.
                if num_lost * _LOST_S > _DEATH_S and self.is_settled and client is self._client:
                    raise RolloutFailed(
                        f"the engine's process {self.pid} lives, but cannot be reached: {error}; {num_lost} attempts"
                    ) from error
            except EngineFailed as error:  # the process lives, and cannot do anything any more
                self._kill_child(f"{path}: {error}")
                await asyncio.sleep(_LOST_S)

    def _a_request_finished(self) -> None:
        self._num_deaths = 0

    def _kill_child(self, why: str) -> None:
        if self._child is not None:
            self._why_killed = why
            self._child.kill()

    async def _begin(self) -> None:
        """A child that knows all that the last one knew, and goes on with what it left."""
        self._child = await ChildServer.start(self._model, self._arguments, self._api_key)
        self._client = ServerClient(self._child.url, self._api_key)
        self._why_killed = ""
        await self.state.restore(self._client)
        self.requests.go_on(await self._client.connect(self.requests.take))
        self._settled.set()

    async def _keep_watch(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:
            # Nobody awaits this task: without a word from it, callers would wait for a child that never comes.
            logger.exception("the engine's process is watched no more")
            self._give_up(f"watching over the engine's process failed: {type(error).__name__}: {error}")

    async def _keep_alive(self) -> None:
        """Wait for the child's end; start another; so often as that makes sense."""
        while self._failure is None:
            death = await self._until_lost()
            while self._failure is None:
                self._num_deaths += 1
                if self._num_deaths > MAX_RESTARTS:
                    self._give_up(
                        f"the engine's process died {self._num_deaths} times in a row without finishing a request; try "
                        f"it by itself with `headwater serve`, or with rollout.placement=colocated. The last time, "
                        f"{death.in_full()}"
                    )
                    break
                self.num_restarts += 1
                logger.warning(
                    "the engine's %s; it is started again (%d of at most %d times in a row) and %d requests go on",
                    *(death.in_short(), self._num_deaths, MAX_RESTARTS, len(self.requests)),
                )
                try:
                    await self._begin()
                    break
                except Exception as error:  # noqa: BLE001  also what the system says when it has no process to give
                    death = await self._end_of_start(error)

    async def _end_of_start(self, error: Exception) -> _Death:
        """End a child that did not come to serve; says why, in its own words too."""
        how = f"new process could not take over: {type(error).__name__}: {error}"
        if (child := self._child) is None:
            return _Death(how)  # the error has its last words, if there was one
        if isinstance(error, ConnectionLost):  # most likely it is about to end, and to say why
            with suppress(TimeoutError):
                how += f"; {await asyncio.wait_for(child.wait(), _DEATH_S)}"
        death = _Death(how, child.last_lines)  # before we end it: what it says of that is beside the point
        await self._end_child()
        return death

    async def _until_lost(self) -> _Death:
        """Wait for the end of the child or of its connection; says what happened."""
        assert self._child is not None, "started"
        assert self.requests.link is not None, "connected"
        child, link = self._child, self.requests.link
        reading = asyncio.create_task(link.run())
        tasks: set[asyncio.Task[Any]] = {reading, asyncio.create_task(child.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._settled.clear()
            self.requests.link = None
            unread = reading.exception() if reading.done() else None
            if unread is not None:
                logger.error("what the engine's process sent could not be taken", exc_info=unread)
                child.kill()  # we have closed the connection, and it would not end by itself
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
            how += f", after it had sent what could not be taken ({type(unread).__name__}: {unread})"
        if self._why_killed:
            how += f", because its engine had failed ({self._why_killed})"
        return _Death(how, child.last_lines)

    async def _end_child(self) -> None:
        client, self._client = self._client, None
        child, self._child = self._child, None
        self.requests.link = None
        if client is not None:
            await client.close()
        if child is not None:
            await child.stop()

    def _give_up(self, cause: str) -> None:
        self._failure = RolloutFailed(cause)
        self._settled.set()
        self.requests.fail_all(self._failure)
