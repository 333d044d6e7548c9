"""Requests and weight updates over one server, whichever process runs it at the moment.

A response never loses a token: everything that arrived is kept, and the rest is asked for again after an update that
interrupts, after a lost connection and by the process that replaces one that died. Every token has the version of the
weights that produced it:

- ``interrupt`` and ``drain``: every stream ends before the weights change, so all its tokens have one version.
- ``in_flight``: streams continue. The server labels the tokens at the end of a stream. If a stream breaks after the
  weights have changed, tokens that may have been on their way meanwhile are generated again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from headwater.backends.remote.link import (
    Garbage,
    LinkLost,
    OtherWeights,
    Overloaded,
    PauseMode,
    ServerInfo,
    ServerLink,
)
from headwater.backends.remote.model import ServedWeights
from headwater.backends.remote.requests import MAX_STUCK, OpenRequest, ServedModel, fetch_tokens, read_stream
from headwater.core.capabilities import MemoryTag, UpdateMode
from headwater.core.errors import (
    HeadwaterError,
    LogitsBroken,
    QueueFull,
    RequestError,
    RolloutFailed,
    ServerLost,
    TransferLost,
    WaitTimeout,
    WeightsError,
    WeightsIncomplete,
)
from headwater.core.waits import named_wait
from headwater.observe.spans import Spans

logger = logging.getLogger(__name__)

_PAUSE_OF: dict[UpdateMode, PauseMode] = {"interrupt": "abort", "drain": "wait", "in_flight": "keep"}
_LAST_CHUNKS_S = 5.0
"""How long the last chunks of streams may take after a pause. Streams without an end are sent again."""
_HEALTH_EVERY_S = 5.0
_MAX_SILENT = 3
"""Health checks in a row without an answer, after which a server that accepts connections counts as lost."""


class RemoteSession:
    """Belongs to one event loop."""

    def __init__(self, name: str, model: ServedModel, spans: Spans, *, is_one_of_many: bool = False) -> None:
        self.name = name
        self.weights = ServedWeights()
        self.info: ServerInfo | None = None
        self.measured: Mapping[str, float] = {}
        """What the server said about itself at the last health check."""
        self.last_pause_s: float | None = None
        """How long the server generated nothing during the last weight update."""
        self.is_paused = False
        self.asleep: set[MemoryTag] = set()
        self.failure: RolloutFailed | None = None
        self.on_progress: Callable[[], None] = lambda: None
        """Called when a request has ended."""
        self._model = model
        self._spans = spans
        self._is_one_of_many = is_one_of_many
        self._link: ServerLink | None = None
        self.why_lost = "it has not started yet"
        """Why there is no connection, or why the last one ended."""
        self._open: dict[OpenRequest, asyncio.Task[None]] = {}
        self._generating = ExitStack()
        self._is_updating = False
        self._gate = asyncio.Event()
        """Open while requests may be sent."""
        self._attached = asyncio.Event()
        self._detached = asyncio.Event()
        self._control = asyncio.Lock()
        """Held by whatever changes what the server does: one at a time."""

    # Requests

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_started(self) -> int:
        return sum(bool(opened.tokens) for opened in list(self._open))

    @property
    def is_attached(self) -> bool:
        return self._link is not None

    def enter(self, opened: OpenRequest) -> None:
        if self.failure is not None:
            opened.fail(self.failure)
        elif self._is_one_of_many and self._link is None:
            opened.fail(ServerLost(f"{self.name}: cannot be reached: {self.why_lost}"))
        else:
            if not self._open:
                self._generating.enter_context(self._spans.span("generate"))
            self._open[opened] = asyncio.create_task(self._run(opened))
            # A task that is cancelled before its first step does not run at all.
            self._open[opened].add_done_callback(lambda _: self._forget(opened))

    def leave(self, opened: OpenRequest) -> None:
        """The caller no longer waits for this request."""
        if (task := self._open.get(opened)) is not None:
            task.cancel()

    async def abort(self, request_id: str | None) -> int:
        """Answer the requests with this id, or all, with the tokens they have. Return how many there were."""
        wanted = [each for each in self._open if request_id in (None, each.request.request_id)]
        for opened in wanted:
            opened.is_aborted = True
        try:
            if self._link is not None:
                await fetch_tokens(wanted, self._link)
        finally:
            for opened in wanted:
                opened.finish("abort")
                self.leave(opened)
        return len(wanted)

    def fail(self, failure: RolloutFailed) -> None:
        """The server will not come back."""
        self.failure = failure
        for opened in list(self._open):
            opened.fail(failure)
            self.leave(opened)
        self._attached.set()

    async def _run(self, opened: OpenRequest) -> None:
        """Send a request as often as needed, until it has ended."""
        try:
            while not opened.has_ended and not opened.is_aborted:
                await self._gate.wait()
                assert self._link is not None, "the gate is closed without a link"
                await self._send(opened, self._link)
        except HeadwaterError as error:
            opened.fail(error)
        except Exception as error:
            logger.exception("%s: request %s failed", self.name, opened.request.request_id)
            opened.fail(RolloutFailed(f"{self.name}: {type(error).__name__}: {error}"))
        finally:
            self._forget(opened)

    def _forget(self, opened: OpenRequest) -> None:
        if self._open.pop(opened, None) is None:
            return
        self.on_progress()
        if not self._open:
            self._generating.close()

    async def _send(self, opened: OpenRequest, link: ServerLink) -> None:
        opened.begin(self.weights.version)
        name = f"{self.name}: request {opened.request.request_id}"
        if opened.num_stuck >= MAX_STUCK:
            raise RolloutFailed(f"{name}: broke {MAX_STUCK} times without a new token; it may be the cause")
        assert self.info is not None, "attached"
        read = read_stream(opened, link, self._model, self.weights, labels_tokens=self.info.labels_tokens)
        opened.reading = asyncio.create_task(read)
        try:
            await asyncio.wait({opened.reading})
        finally:
            opened.reading.cancel()
        if opened.reading.cancelled():
            return  # an update interrupted it
        try:
            reason = opened.reading.result()
        except LinkLost as error:
            await self._suspect(link, error)
            if isinstance(error, Overloaded) and link is self._link:
                wait_s = opened.refused()
                if wait_s is None or (self._is_one_of_many and not opened.tokens):  # a router tries other servers
                    raise QueueFull(f"{name}: {error}; add servers, or send fewer requests") from error
                await asyncio.sleep(wait_s)
            else:
                opened.num_stuck += 1
            return
        except Garbage as error:
            raise RolloutFailed(f"{name}: the answer cannot be used: {error}") from error
        except (RequestError, LogitsBroken) as error:
            raise type(error)(f"{name}: {error}") from error
        if reason != "abort":
            opened.finish(reason)
        elif not self._is_updating and not self.asleep:
            opened.num_stuck += 1  # someone else ended it

    # The connection

    def is_known(self, info: ServerInfo) -> bool:
        """Whether a server is the process that was attached last, with the weights that it was given."""
        return self.info is not None and self.info.instance == info.instance and self.weights.are_on(info.label)

    async def attach(self, link: ServerLink, info: ServerInfo) -> None:
        """Use ``link`` from now on. A process that has replaced another one is told what that one knew."""
        is_new, before = not self.is_known(info), self.info
        self.info = info
        try:
            if is_new:
                await self._restore(link)
            if self.is_paused:  # the link must know it, also if the server still is
                await link.pause("keep")
            if is_new and self.asleep:
                await link.sleep(sorted(self.asleep))
        except BaseException:
            self.info = before  # so that the next attempt restores it
            raise
        self._link = link
        self._attached.set()
        self._detached.clear()
        self._settle()

    async def _restore(self, link: ServerLink) -> None:
        if self.weights.folder:
            await link.reload(self.weights.folder, self.weights.label)
            if self.weights.adapter_folder:
                await link.load_adapters(self.weights.adapter_folder, self.weights.label)
            self.weights.is_needed = False
        elif self.weights.label:  # sent over the network, and not kept
            self.weights.is_needed = True
        elif self.weights.is_owned:
            await self._label(link)

    def lost(self, link: ServerLink, why: str) -> None:
        """Send nothing more over ``link``."""
        if link is not self._link:
            return
        self._link, self.why_lost = None, why
        self._attached.clear()
        self._detached.set()
        self._settle()
        logger.warning("%s: the connection is lost, and %d requests wait: %s", self.name, self.num_open, why)
        for opened in self._open:
            if opened.reading is not None:
                opened.reading.cancel()  # a stream of a silent server would never end
        if self._is_one_of_many:
            for opened in list(self._open):
                opened.fail(ServerLost(f"{self.name}: {why}", opened.partial()))
                self.leave(opened)

    async def _suspect(self, link: ServerLink, why: LinkLost) -> None:
        """A stream broke. If the server still answers, only this stream is sent again."""
        if isinstance(why, OtherWeights):
            self.lost(link, str(why))
            return
        try:
            await link.check_alive()
        except (LinkLost, WaitTimeout, RolloutFailed):
            self.lost(link, str(why))

    async def until_lost(self, link: ServerLink) -> None:
        """Return when ``link`` is no longer used; raise ``LinkLost`` if health checks are not answered."""
        num_silent = 0
        while link is self._link:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._detached.wait(), _HEALTH_EVERY_S)
                return
            try:
                await link.check_alive()
                num_silent = 0
                self.measured = await link.measure()
            except WaitTimeout as error:
                num_silent += 1
                if num_silent == _MAX_SILENT:
                    self.lost(link, f"{num_silent} health checks in a row had no answer: {error}")
                    raise LinkLost(self.why_lost) from error
            except (LinkLost, RolloutFailed) as error:
                self.lost(link, str(error))
                raise LinkLost(str(error)) from error

    async def link(self) -> ServerLink:
        """The present connection, once there is one."""
        while self._link is None:
            if self.failure is not None:
                raise self.failure
            if self._is_one_of_many:
                raise ServerLost(f"{self.name}: cannot be reached: {self.why_lost}")
            await self._attached.wait()
        return self._link

    def _settle(self) -> None:
        """Open or close the gate."""
        if self._link is not None and not (self.weights.is_needed or self._is_updating or self.asleep):
            self._gate.set()
        else:
            self._gate.clear()

    # Control

    async def set_paused(self, paused: bool) -> None:
        async with self._control:
            self.is_paused = paused
            link = await self.link()
            await (link.pause("keep") if paused else self._resume(link))

    async def set_asleep(self, tags: Sequence[MemoryTag], asleep: bool, limit_s: float) -> None:
        """Release memory or take it back. Nothing is generated meanwhile: requests continue after ``wake``."""
        async with self._control:
            link, before = await self.link(), self.asleep
            try:
                if not asleep:
                    await link.wake(tags)
                    self.asleep = before - set(tags)
                else:
                    self.asleep = before | set(tags)
                    self._settle()
                    if not before:
                        await self._pause_for_update(link, "interrupt", limit_s)
                    await link.sleep(tags)
            except (HeadwaterError, LinkLost):
                self.asleep = before
                raise
            finally:
                try:
                    await self._resume(link)
                finally:
                    self._settle()

    async def _resume(self, link: ServerLink) -> None:
        if not self.is_paused and not self.asleep:
            await link.resume()

    async def set_version(self, version: int) -> None:
        async with self._control:
            self.weights.version = version
            await self._label(await self.link())

    async def update(
        self,
        version: int,
        load: Callable[[ServerLink, str], Awaitable[None]],
        mode: UpdateMode,
        *,
        limit_s: float,
        folder: str = "",
        adapter_folder: str = "",
    ) -> None:
        """Let ``load`` give the server the weights of ``version`` under a label. A process that replaces it loads
        them from ``folder``, and their adapters from ``adapter_folder``. ``TransferLost`` if the server does not
        survive the update."""
        async with self._control:
            link = await self.link()
            self._is_updating = True
            self._settle()
            try:
                paused_at = await self._pause_for_update(link, mode, limit_s)
                await self._load(link, load, version)
                self.weights.folder, self.weights.adapter_folder = folder, adapter_folder
                await self._resume(link)
                self.last_pause_s = time.perf_counter() - paused_at
            except LinkLost as error:
                self.lost(link, str(error))
                raise TransferLost(f"{self.name}: ended during a weight update: {error}") from error
            except BaseException:
                if self.weights.is_needed:  # requests that were kept would continue with parts of two versions
                    await self._interrupt()
                with suppress(LinkLost, HeadwaterError):
                    await self._resume(link)
                raise
            finally:
                self._is_updating = False
                self._settle()

    async def _pause_for_update(self, link: ServerLink, mode: UpdateMode, limit_s: float) -> float:
        """Return when the server stopped generating. While it drains, it still generates."""
        if mode == "in_flight":
            for opened in self._open:
                opened.weights_change()
        await named_wait(
            link.pause(_PAUSE_OF[mode]),
            lambda: f"{self.name} pauses for a weight update; {self.num_open} requests are open",
            kind="weights",
            hard_limit_s=limit_s,
        )
        paused_at = time.perf_counter()
        reading = {each.reading for each in self._open if each.reading is not None and not each.reading.done()}
        if mode != "in_flight" and reading:
            await asyncio.wait(reading, timeout=_LAST_CHUNKS_S)
            await self._interrupt()  # the rest arrived at a paused server, which has not begun them
        return paused_at

    async def _interrupt(self) -> None:
        """Stop reading all streams. What is missing is requested again once the gate is open."""
        reading = {each.reading for each in self._open if each.reading is not None and not each.reading.done()}
        for task in reading:
            task.cancel()
        if reading:
            await asyncio.wait(reading)

    async def _load(self, link: ServerLink, load: Callable[[ServerLink, str], Awaitable[None]], version: int) -> None:
        self.weights.is_needed = True  # also if the connection is lost and the same process answers again
        label = str(version)
        try:
            await load(link, label)
        except (WeightsIncomplete, TransferLost):
            raise
        except (RequestError, RolloutFailed, WeightsError) as error:
            await self._check_survived(link, error)
            raise WeightsIncomplete(
                f"{self.name}: loading version {version} failed, and its weights may be parts of two versions; it "
                f"generates nothing until an update succeeds: {error}"
            ) from error
        self.weights.version, self.weights.label, self.weights.is_needed = version, label, False
        self.weights.labels[label] = version

    async def _check_survived(self, link: ServerLink, error: HeadwaterError) -> None:
        """Raise ``LinkLost`` if an update failed because a process of the server has ended. The server may still answer
        with an error then, but the weights must be sent again to the process that replaces it."""
        try:
            await link.check_alive()
        except (LinkLost, WaitTimeout, RolloutFailed) as silence:
            raise LinkLost(f"{error}; afterwards: {silence}") from error

    async def _label(self, link: ServerLink) -> None:
        assert self.info is not None, "attaching"
        weights, label = self.weights, str(self.weights.version)
        if not await link.set_label(label):
            weights.labels[weights.label or self.info.label] = weights.version
            return
        weights.labels[label] = weights.version
        if weights.label:
            weights.label = label

    async def end(self) -> None:
        """Answer every request with the tokens it has."""
        self.failure = self.failure or RolloutFailed(f"{self.name}: the engine is closed")
        await self.abort(None)
        await asyncio.gather(*self._open.values(), return_exceptions=True)
