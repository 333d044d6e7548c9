"""An SGLang server over HTTP (``python -m sglang.launch_server``), or a ``headwater serve``, which knows its calls.

Responses are streamed if the server was started with ``--incremental-streaming-output``, so that their tokens are here
when the server dies. Without it, SGLang's streams repeat the whole response in every event, so a response is requested
as a whole, unless its caller wants a stream. When generation is paused for an update, the server answers with the
tokens so far, and the rest is requested under the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar

from headwater.backends.remote.http import HttpCalls
from headwater.backends.remote.link import Garbage, LinkLost, PauseMode, Sending, ServerInfo, StreamedTokens
from headwater.backends.sglang.wire import (
    DIALECTS,
    OLDEST,
    dialect_of,
    read_answer,
    read_info,
    request_name,
    write_request,
)
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed

_PAUSE_MODE: dict[PauseMode, str] = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
_ALIVE_LIMIT_S = 20.0
_LEAVE_LIMIT_S = 10.0


class SglangLink(HttpCalls):
    """The calls to one server."""

    program: ClassVar[str] = "SGLang"

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__(url, api_key)
        self.dialect = OLDEST
        self._is_described = False
        self.is_ours = False
        """The server is a ``headwater serve``."""
        self.streams_new_tokens = False
        """Every response is streamed, because each event has only new tokens."""
        self._num_streams = 0
        self._none_left = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        """Wait for the end of streams that nothing reads any more."""
        self._paused: PauseMode | None = None
        """How it was paused, until it continues."""

    async def describe(self) -> ServerInfo:
        try:
            told = await self._call("GET", "/server_info")
        except RequestError:
            told = await self._call("GET", "/get_server_info")
        try:
            self.is_ours = "instance" in told
            self.dialect = DIALECTS[0] if self.is_ours else dialect_of(str(told["version"]))
            self.streams_new_tokens = self.dialect.streams_new_tokens and bool(told.get("incremental_streaming_output"))
            self._is_described = True
            return read_info(told, await self._call("GET", f"{self.dialect.info_prefix}model_info"), self.dialect)
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutFailed(
                f"{self.url}/server_info: {type(error).__name__}: {error}; is this an SGLang server of a known version?"
            ) from error

    async def check_alive(self) -> None:
        # SGLang's /health generates a token, which a server that is paused or asleep does not.
        path = "/health" if self.is_ours else f"{self.dialect.info_prefix}model_info"
        try:
            await self._call("GET", path, limit_s=_ALIVE_LIMIT_S)
        except RequestError:
            if self._is_described:
                raise
            await self._call("GET", "/model_info", limit_s=_ALIVE_LIMIT_S)  # its version is not known yet

    async def stream(self, sending: Sending) -> AsyncGenerator[StreamedTokens, None]:
        """The answer as it is generated, or as one chunk if events would repeat it and the caller wants no stream."""
        body = write_request(sending, self.dialect, streams_new_tokens=self.streams_new_tokens)
        self._count_streams(1)
        try:
            if not body["stream"]:
                yield read_answer(await self._answer("/generate", body))
                return
            async with aclosing(self._chunks(body)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._count_streams(-1)

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncGenerator[StreamedTokens, None]:
        events, num_read = self._events("/generate", body), 0
        is_ended = is_left = False
        reading: asyncio.Future[str | None] | None = None
        try:
            while not is_ended:
                reading = asyncio.ensure_future(_next(events))
                data = await asyncio.shield(reading)  # if the caller leaves, the stream can still be read to its end
                if data is None:
                    return
                chunk = read_answer(data, num_read)
                num_read += len(chunk.tokens)
                is_ended = chunk.stop_reason is not None
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            is_left = not is_ended and self._paused is None  # while it is paused, it ends no request
            raise
        finally:
            assert reading is not None, "set before anything is awaited"
            if is_left:
                self._count_streams(1)
                task = asyncio.create_task(self._end_stream(body["rid"], events, reading))
                self._leaving.add(task)
                task.add_done_callback(self._has_ended)
            else:
                await _close(events, reading)

    async def _end_stream(self, rid: str, events: AsyncGenerator[str, None], reading: asyncio.Future[Any]) -> None:
        """End a request whose caller has left, and wait until the server has.

        If the connection was closed at once, the request could still run when an update empties the cache. The update
        would fail, before SGLang 0.5.22 with an assertion of its scheduler.
        """
        try:
            with suppress(LinkLost, Garbage, HeadwaterError, TimeoutError):
                async with asyncio.timeout(_LEAVE_LIMIT_S):
                    await self._call("POST", "/abort_request", {"rid": rid})
                    await reading
                    async for _ in events:
                        pass
        finally:
            await _close(events, reading)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self._count_streams(-1)

    def _count_streams(self, difference: int) -> None:
        self._num_streams += difference
        if self._num_streams:
            self._none_left.clear()
        else:
            self._none_left.set()

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await super().close()

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_request", {"rid": request_name(request_id)})

    async def pause(self, mode: PauseMode) -> None:
        if mode != "keep" and self._holds_requests(mode):  # it would wait forever for requests that do not run
            await self.resume()
        if mode == "wait" and self._num_streams:  # no new ones are sent meanwhile
            await self._none_left.wait()
        body = {"mode": _PAUSE_MODE[mode]} if self.dialect.has_pause_modes else {}
        await self._call("POST", "/pause_generation", body, is_text=True)
        self._paused = mode if self.dialect.has_pause_modes else "abort"

    def _holds_requests(self, mode: PauseMode) -> bool:
        """Whether it may have requests that neither run nor can be ended. After it has ended all, it keeps new ones
        outside its scheduler, where only those that should finish are in the way."""
        if self._paused == "abort":
            return mode == "wait" and self._num_streams > 0
        return self._paused is not None

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, is_text=True)
        self._paused = None

    async def reload(self, folder: str, label: str, *, keeps_cache: bool = False) -> None:
        body = {"model_path": folder, "weight_version": label, "flush_cache": not keeps_cache}
        await self._succeeds("/update_weights_from_disk", body)

    async def set_label(self, label: str) -> bool:
        return False  # its call for that also ends all requests

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join the process group over which weights are sent; returns when all members have come."""
        await self._succeeds("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name}, limit_s=_LEAVE_LIMIT_S)

    async def begin_update(self) -> None:
        """Before the first tensors of an update."""
        if not self.dialect.has_update_calls or self.is_ours:
            return
        try:
            await self._succeeds("/begin_weight_update", {})
        except RequestError as refusal:
            try:
                await self._succeeds("/end_weight_update", {})  # of an update that broke and has left it open
            except RequestError:
                raise refusal from None  # none was open, so there is another reason
            await self._succeeds("/begin_weight_update", {})

    async def end_update(self) -> None:
        """After the last tensors of an update."""
        if self.dialect.has_update_calls and not self.is_ours:
            await self._succeeds("/end_weight_update", {})

    @property
    def takes_whole(self) -> bool:
        """``headwater serve`` checks the tensors of a model together."""
        return self.is_ours

    async def receive(self, body: Mapping[str, Any]) -> str:
        """Receive tensors over the group; returns when the model has them."""
        await self._succeeds("/update_weights_from_distributed", body)
        return ""  # SGLang tells no checksum

    async def _succeeds(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._call("POST", path, body)
        if not answer.get("success"):
            raise RolloutFailed(f"{self.url}{path}: {answer.get('message', answer)}")

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, is_text=True)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, is_text=True)


async def _next(events: AsyncGenerator[str, None]) -> str | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[str, None], reading: asyncio.Future[Any]) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)  # a generator that runs cannot be closed
    await events.aclose()
