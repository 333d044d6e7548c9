"""Requests and weight updates over one vLLM, whichever process runs it at the moment.

A response never loses a token: everything that arrived is kept, and the rest is asked for again after an update that
interrupts, after a lost connection and by the process that replaces one that died. Every token has the version of the
weights that produced it:

- ``interrupt`` and ``drain``: every stream ends before the weights change, so all its tokens have one version.
- ``in_flight``: streams continue. vLLM labels the tokens at the end of a stream. If a stream breaks after the weights
  have changed, tokens that may have been on their way meanwhile are generated again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field

from headwater.backends.vllm.link import Link, LinkLost, PauseMode, VllmInfo
from headwater.backends.vllm.requests import MAX_STUCK, OpenRequest
from headwater.backends.vllm.wire import Garbage, Span, write_request
from headwater.core.errors import (
    HeadwaterError,
    LogitsBroken,
    RequestError,
    RolloutFailed,
    ServerLost,
    TransferLost,
    WaitTimeout,
    WeightsIncomplete,
)
from headwater.core.protocols import MemoryTag, Tokenizer, UpdateMode
from headwater.core.records import StopReason
from headwater.core.waits import named_wait
from headwater.engine.stops import find_stop
from headwater.observe.spans import Spans

logger = logging.getLogger(__name__)

_PAUSE_OF: dict[UpdateMode, PauseMode] = {"interrupt": "abort", "drain": "wait", "in_flight": "keep"}
_LAST_CHUNKS_S = 5.0
"""How long the last chunks of streams may take after vLLM has paused. Streams without an end are sent again."""
_HEALTH_EVERY_S = 5.0
_MAX_SILENT = 3
"""Health checks in a row without an answer, after which a server that accepts connections counts as lost."""


@dataclass(frozen=True)
class ServedModel:
    """What a session must know about the model."""

    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]


@dataclass
class ServedWeights:
    """What vLLM was told, so that the process that replaces it can be told the same."""

    version: int = 0
    folder: str = ""
    """Where the newest weights are; empty before the first update."""
    is_needed: bool = False
    """vLLM does not hold a complete version of this run. Requests wait until it does."""
    labels: dict[str, int] = field(default_factory=dict)
    """The version behind every label of weights."""


class Session:
    """Belongs to one event loop.

    session = Session("server 0", model, spans)
    await session.attach(link, info)
    session.enter(opened)
    await session.update(folder, version=3, mode="interrupt", limit_s=600)
    """

    def __init__(self, name: str, model: ServedModel, spans: Spans, *, is_one_of_many: bool = False) -> None:
        self.name = name
        self.weights = ServedWeights()
        self.info: VllmInfo | None = None
        self.is_paused = False
        self.asleep: set[MemoryTag] = set()
        self.failure: RolloutFailed | None = None
        self.on_progress: Callable[[], None] = lambda: None
        """Called when a request has ended."""
        self._model = model
        self._spans = spans
        self._is_one_of_many = is_one_of_many
        self._link: Link | None = None
        self._lost_by = "it has not started yet"
        self._open: dict[OpenRequest, asyncio.Task[None]] = {}
        self._generating = ExitStack()
        self._is_updating = False
        self._gate = asyncio.Event()
        """Open while requests may be sent."""
        self._attached = asyncio.Event()
        self._control = asyncio.Lock()
        """Held by whatever changes what vLLM does: one at a time."""

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

    @property
    def measured(self) -> Mapping[str, float]:
        link = self._link
        return link.measured if link is not None else {}

    def enter(self, opened: OpenRequest) -> None:
        if self.failure is not None:
            opened.fail(self.failure)
        elif self._is_one_of_many and self._link is None:
            opened.fail(ServerLost(f"{self.name}: cannot be reached: {self._lost_by}"))
        else:
            if not self._open:
                self._generating.enter_context(self._spans.span("generate"))
            self._open[opened] = asyncio.create_task(self._run(opened))

    def leave(self, opened: OpenRequest) -> None:
        """The caller no longer waits for this request."""
        if (task := self._open.get(opened)) is not None:
            task.cancel()

    def abort(self, request_id: str | None) -> int:
        """Answer the requests with this id, or all, with the tokens they have. Return how many there were."""
        wanted = [each for each in self._open if request_id in (None, each.request.request_id)]
        for opened in wanted:
            opened.finish("abort")
            self.leave(opened)
        return len(wanted)

    def fail(self, failure: RolloutFailed) -> None:
        """vLLM will not come back."""
        self.failure = failure
        for opened in list(self._open):
            opened.fail(failure)
            self.leave(opened)
        self._attached.set()

    async def _run(self, opened: OpenRequest) -> None:
        """Send a request as often as needed, until it has ended."""
        try:
            while not opened.has_ended:
                await self._gate.wait()
                assert self._link is not None, "the gate is closed without a link"
                await self._send(opened, self._link)
        except HeadwaterError as error:
            opened.fail(error)
        except Exception as error:
            logger.exception("%s: request %s failed", self.name, opened.request.request_id)
            opened.fail(RolloutFailed(f"{self.name}: {type(error).__name__}: {error}"))
        finally:
            del self._open[opened]
            self.on_progress()
            if not self._open:
                self._generating.close()

    async def _send(self, opened: OpenRequest, link: Link) -> None:
        opened.begin(self.weights.version)
        name = f"{self.name}: request {opened.request.request_id}"
        if opened.num_stuck >= MAX_STUCK:
            raise RolloutFailed(f"{name}: broke {MAX_STUCK} times without a new token; it may be the cause")
        opened.reading = asyncio.create_task(self._read(opened, link))
        try:
            await asyncio.wait({opened.reading})
        finally:
            opened.reading.cancel()
        if opened.reading.cancelled():
            return  # an update interrupted it
        try:
            reason = opened.reading.result()
        except LinkLost as error:
            opened.num_stuck += 1
            await self._suspect(link, error)
            return
        except Garbage as error:
            raise RolloutFailed(f"{name}: the answer cannot be used: {error}") from error
        except (RequestError, LogitsBroken) as error:
            raise type(error)(f"{name}: {error}") from error
        if reason != "abort":
            opened.finish(reason)
        elif not self._is_updating:
            opened.num_stuck += 1  # someone else ended it

    async def _read(self, opened: OpenRequest, link: Link) -> StopReason:
        """Read one stream to its end. ``abort`` means that the rest of the response is missing."""
        assert self.info is not None, "attached"
        dialect, has_stopped = self.info.dialect, False
        body = write_request(opened.rest(), dialect, self._model.end_tokens, opened.sent_version)
        num_checked = len(opened.tokens)
        spans: tuple[Span, ...] | None = None
        reason: StopReason = "abort"  # older versions send no last chunk for a request that was aborted
        async with aclosing(link.stream(body)) as chunks:
            async for chunk in chunks:
                opened.extend(chunk)
                if chunk.stop_reason is not None:
                    spans, reason = chunk.spans, chunk.stop_reason
                    break
                if not has_stopped and (end := self._end_of(opened, num_checked)) is not None:
                    has_stopped = True
                    if opened.num_certain is None:
                        opened.cut(end)
                        return "stop"
                    # Only the last chunk tells the versions.
                    await link.abort(body["request_id"])
                num_checked = len(opened.tokens)
        if spans is not None and dialect.labels_tokens:
            opened.end_stream(spans, self.weights.labels)
        end = self._end_of(opened, opened.num_before)
        if end is None:
            return reason
        opened.cut(end)
        return "stop"

    def _end_of(self, opened: OpenRequest, num_checked: int) -> int | None:
        """The number of new tokens up to the one that completes a stop string; None if none does."""
        sampling, given = opened.request.sampling, opened.request.given_tokens
        if not sampling.stop_strings:
            return None
        first = max(len(given) + num_checked, sampling.min_new_tokens)
        tokens = [*given, *opened.tokens]
        if first >= len(tokens):
            return None
        found = find_stop(self._model.tokenizer, tokens, first, sampling.stop_strings)
        return None if found is None else found - len(given)

    # The connection

    async def attach(self, link: Link, info: VllmInfo) -> None:
        """Use ``link`` from now on. A process that has replaced another one is told what that one knew."""
        is_new = self.info is None or self.info.instance != info.instance
        self.info = info
        if is_new:
            await self._restore(link)
        self._link = link
        self._attached.set()
        self._settle()

    async def _restore(self, link: Link) -> None:
        assert self.info is not None, "attaching"
        if self.weights.folder:
            await link.reload(self.weights.folder)
            self.weights.is_needed = False
        await self._label(link)
        if self.is_paused:
            await link.pause("keep")
        if self.asleep:
            await link.sleep(sorted(self.asleep))

    def lost(self, link: Link, why: str) -> None:
        """Send nothing more over ``link``."""
        if link is not self._link:
            return
        self._link, self._lost_by = None, why
        self._attached.clear()
        self._settle()
        logger.warning("%s: the connection is lost, and %d requests wait: %s", self.name, self.num_open, why)
        for opened in self._open:
            if opened.reading is not None:
                opened.reading.cancel()  # a stream of a silent server would never end
        if self._is_one_of_many:
            for opened in list(self._open):
                opened.fail(ServerLost(f"{self.name}: {why}", opened.partial()))
                self.leave(opened)

    async def _suspect(self, link: Link, why: LinkLost) -> None:
        """A stream broke. If vLLM still answers, only this stream is sent again."""
        try:
            await link.check_alive()
        except (LinkLost, WaitTimeout, RolloutFailed):
            self.lost(link, str(why))

    async def until_lost(self, link: Link) -> None:
        """Return when ``link`` is no longer used; raise ``LinkLost`` if vLLM does not answer health checks."""
        num_silent = 0
        while link is self._link:
            await asyncio.sleep(_HEALTH_EVERY_S)
            try:
                await link.check_alive()
                num_silent = 0
            except WaitTimeout as error:
                num_silent += 1
                if num_silent == _MAX_SILENT:
                    self.lost(link, f"{num_silent} health checks in a row had no answer: {error}")
                    raise LinkLost(self._lost_by) from error
            except (LinkLost, RolloutFailed) as error:
                self.lost(link, str(error))
                raise LinkLost(str(error)) from error

    async def link(self) -> Link:
        """The present connection, once there is one."""
        while self._link is None:
            if self.failure is not None:
                raise self.failure
            if self._is_one_of_many:
                raise ServerLost(f"{self.name}: cannot be reached: {self._lost_by}")
            await self._attached.wait()
        return self._link

    def _settle(self) -> None:
        """Open or close the gate."""
        if self._link is not None and not self.weights.is_needed and not self._is_updating:
            self._gate.set()
        else:
            self._gate.clear()

    # Control

    async def set_paused(self, paused: bool) -> None:
        async with self._control:
            self.is_paused = paused
            link = await self.link()
            await (link.pause("keep") if paused else link.resume())

    async def set_asleep(self, tags: Sequence[MemoryTag], asleep: bool) -> None:
        async with self._control:
            link = await self.link()
            await (link.sleep(tags) if asleep else link.wake(tags))
            self.asleep = self.asleep.union(tags) if asleep else self.asleep.difference(tags)

    async def set_version(self, version: int) -> None:
        async with self._control:
            self.weights.version = version
            await self._label(await self.link())

    async def update(self, folder: str, version: int, mode: UpdateMode, limit_s: float) -> None:
        """Load the weights of ``folder`` as ``version``. ``TransferLost`` if vLLM does not survive it."""
        async with self._control:
            link = await self.link()
            self._is_updating = True
            self._settle()
            try:
                await self._pause_for_update(link, mode, limit_s)
                await self._load(link, folder, version)
                if not self.is_paused:
                    await link.resume()
            except LinkLost as error:
                self.lost(link, str(error))
                raise TransferLost(f"{self.name}: ended during a weight update: {error}") from error
            except BaseException:
                with suppress(LinkLost, HeadwaterError):
                    await link.resume()
                raise
            finally:
                self._is_updating = False
                self._settle()

    async def _pause_for_update(self, link: Link, mode: UpdateMode, limit_s: float) -> None:
        if mode == "in_flight":
            for opened in self._open:
                opened.weights_change()
        await named_wait(
            link.pause(_PAUSE_OF[mode]),
            lambda: f"{self.name} pauses for a weight update; {self.num_open} requests are open",
            kind="weights",
            hard_limit_s=limit_s,
        )
        reading = {each.reading for each in self._open if each.reading is not None and not each.reading.done()}
        if mode == "in_flight" or not reading:
            return
        _, late = await asyncio.wait(reading, timeout=_LAST_CHUNKS_S)
        for task in late:  # they arrived at a paused vLLM, which has not begun them
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _load(self, link: Link, folder: str, version: int) -> None:
        self.weights.is_needed = True  # also if the connection is lost and the same process answers again
        try:
            await link.reload(folder)
        except (RequestError, RolloutFailed) as error:
            raise WeightsIncomplete(
                f"{self.name}: loading version {version} failed, and its weights may be parts of two versions; it "
                f"generates nothing until an update succeeds: {error}"
            ) from error
        self.weights.version, self.weights.folder, self.weights.is_needed = version, folder, False
        await self._label(link)

    async def _label(self, link: Link) -> None:
        assert self.info is not None, "attached"
        label = str(self.weights.version)
        self.weights.labels[label] = self.weights.version
        if self.info.dialect.labels_tokens:
            await link.set_label(label)

    async def end(self) -> None:
        """Answer every request with the tokens it has."""
        self.abort(None)
        self.failure = self.failure or RolloutFailed(f"{self.name}: the engine is closed")
        await asyncio.gather(*self._open.values(), return_exceptions=True)
