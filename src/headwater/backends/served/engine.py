"""The embedded engine in a process of its own, watched over: should it die, another takes its place and goes on.

    engine = ServedEngine("tiny:qwen3", (), dtype="float32", transfer="shared_memory", spans=Spans())
    response = await engine.agenerate(request)      # also if the process is killed half-way

Every token that was made has arrived here, so a new process is given the newest weights, the prompt and the tokens so
far, and generation goes on after them. Callers notice nothing but the time it takes.

A thread with an event loop owns the child, the connection and the open requests; everything else is handed to it. So it
does not matter on which threads and loops callers live, and a child that dies while nobody waits is replaced as well.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar

import torch

from headwater.backends import BackendContext, check_length
from headwater.backends.served.child_keeper import ChildKeeper
from headwater.backends.served.open_request import OpenRequest
from headwater.config.schema import Dtype, EngineConfig, UpdateMode, WeightTransfer
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed
from headwater.core.protocols import (
    ALL_TAGS,
    Capabilities,
    EngineLimits,
    EngineStatus,
    MemoryTag,
    WeightUpdate,
    whole_response,
)
from headwater.core.records import Delta, ModelRequest, ModelResponse
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, wait_for_future
from headwater.engine.delivery import Mailbox, Mailboxes
from headwater.engine.kv_cache import SHARED_FRACTION
from headwater.observe.spans import Spans
from headwater.weights.file import FileWeights, remove_leftovers
from headwater.weights.image import WrittenWeights
from headwater.weights.shared_memory import SharedWeights

logger = logging.getLogger(__name__)
T = TypeVar("T")

_START_LIMIT_S = ENGINE_START_LIMIT_S + 60.0
"""The process's own limit is reached first, and says more."""
_THREAD_END_S = 5.0


class ServedEngine:
    """An ``InferenceEngine`` whose work is done by ``headwater serve`` as a child process."""

    def __init__(
        self, model: str, arguments: Sequence[str], *, dtype: Dtype, transfer: WeightTransfer, spans: Spans
    ) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._transfer = transfer
        if transfer == "file":
            for folder in remove_leftovers():
                logger.info("removed %s, which a process that was killed had left", folder)
        self._keeper = ChildKeeper(model, ("--dtype", dtype, *arguments), secrets.token_urlsafe(32), spans)
        self._numbers = itertools.count()
        self._mailboxes = Mailboxes()
        self._is_closed = False
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self._loop)
        self._updates = asyncio.Lock()
        """One update of the weights at a time, in the order they were asked for."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="headwater-served-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._do(self._keeper.start(), f"the engine's process starts with {model}", limit_s=_START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_context(cls, context: BackendContext) -> ServedEngine:
        config = context.config
        arguments = ["--device", config.model.device, "--seed", str(config.run.seed), *engine_arguments(config.engine)]
        engine = cls(
            context.model_path,
            arguments,
            dtype=config.model.dtype,
            transfer=config.rollout.weight_transfer,
            spans=context.spans,
        )
        try:
            check_length(context, engine.limits.max_model_tokens)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(streaming=False)

    @cached_property
    def limits(self) -> EngineLimits:
        info = self._ask("/get_server_info")
        return EngineLimits(
            vocab_size=info["vocab_size"],
            max_model_tokens=info["context_length"],
            max_request_tokens=info["max_request_tokens"],
            max_queue=info["max_queue"],
        )

    def status(self) -> EngineStatus:
        state = self._keeper.state
        return EngineStatus(
            version=state.version,
            num_running=len(self._keeper.requests),
            num_restarts=self.num_restarts,
            is_paused=state.is_paused,
            is_asleep=bool(state.asleep),
            is_alive=not self._is_closed,
        )

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._keeper.pid

    @property
    def num_restarts(self) -> int:
        """How often another process took the place of one that had died, or was to."""
        return self._keeper.num_restarts

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The response to one request; a caller that is cancelled ends it."""
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        mailbox = self._mailboxes.of_running_loop()

        def deliver(result: ModelResponse | HeadwaterError) -> None:
            mailbox.post(lambda: _settle(answer, result))

        opened = OpenRequest(next(self._numbers), request, deliver)
        with self._closing:
            self._check_open()
            self._inbox.post(lambda: self._keeper.enter(opened))
        try:
            return await answer
        finally:
            if not opened.has_ended:
                self._inbox.post(lambda: self._keeper.requests.leave(opened))

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that is too long. The engine's process checks the rest."""
        num_tokens = len(request.input_tokens) + request.sampling.max_new_tokens
        if num_tokens > self.limits.max_request_tokens:
            raise RequestError(
                f"request {request.request_id}: {num_tokens} tokens exceed the engine's limit of "
                f"{self.limits.max_request_tokens}; shorten the prompt or lower max_new_tokens"
            )

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield the complete response once."""
        return whole_response(self, request)

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. They return the tokens they have."""
        return self._do(self._abort(request_id), "the engine's process aborts requests")

    # Control

    def pause(self) -> None:
        self._do(self._set_paused(True), "the engine's process pauses")

    def resume(self) -> None:
        self._do(self._set_paused(False), "the engine's process resumes")

    def get_version(self) -> int:
        """Of the newest weights that are known to serve."""
        return self._keeper.state.version

    def set_version(self, version: int) -> None:
        self._do(self._set_version(version), "the engine's process takes a version")

    def weights_checksum(self) -> str:
        answer: str = self._ask("/control/checksum")["checksum"]
        return answer

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Write the weights where the process can read them, and have it take them.

        When this returns they are written, and the caller's tensors may change. What was written is kept until the next
        version has been taken: a process that takes the place of this one needs it.
        """
        written: WrittenWeights | None = None
        try:
            written = self._write(update)
            with self._closing:
                self._check_open()
                return asyncio.run_coroutine_threadsafe(self._update(written, update.version, mode), self._loop)
        except Exception as error:  # noqa: BLE001  also what reading the caller's tensors raised
            if written is not None:
                written.discard()
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._set_asleep(tags, True), "the engine's process goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._set_asleep(tags, False), "the engine's process wakes up")

    def close(self) -> None:
        """End every request with what it has, and the process. Closing twice is fine."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self.close)
        try:
            what = "the engine's process ends"
            wait_for_future(ended, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_THREAD_END_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _ask(self, path: str) -> dict[str, Any]:
        return self._do(self._keeper.call(path), f"the engine's process answers {path}")

    def _do(self, work: Coroutine[Any, Any, T], what: str, limit_s: float = ENGINE_CALL_LIMIT_S) -> T:
        """Have the thread do something, and wait for it."""
        with self._closing:
            if self._is_closed:
                work.close()
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return wait_for_future(future, lambda: what, kind="engine_call", hard_limit_s=limit_s)
        finally:
            future.cancel()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutFailed("the engine is closed")

    def _write(self, update: WeightUpdate) -> WrittenWeights:
        tensors = list(update.tensors)
        if self._transfer == "file":
            return FileWeights(tensors, self._dtype)
        return SharedWeights(tensors, self._dtype)

    # On the thread

    async def _abort(self, request_id: str | None) -> int:
        return self._keeper.requests.abort(request_id)

    async def _set_paused(self, paused: bool) -> None:
        self._keeper.state.is_paused = paused  # first: a child that starts meanwhile must know
        await self._keeper.call("/control/pause" if paused else "/control/resume", {})

    async def _set_version(self, version: int) -> None:
        async with self._updates:
            await self._keeper.call("/control/version", {"version": version})
            self._keeper.state.version = version

    async def _set_asleep(self, tags: Sequence[MemoryTag], asleep: bool) -> None:
        await self._keeper.call("/control/sleep" if asleep else "/control/wake", {"tags": list(tags)})
        state = self._keeper.state
        state.asleep = state.asleep.union(tags) if asleep else state.asleep.difference(tags)

    async def _update(self, written: WrittenWeights, version: int, mode: UpdateMode | None) -> None:
        state = self._keeper.state
        try:
            async with self._updates:
                body = {"version": version, "source": written.source, "mode": mode}
                await self._keeper.call("/control/update_weights", body)
                before, state.written, state.version = state.written, written, version
        except BaseException:
            written.discard()
            raise
        if before is not None:
            before.discard()

    async def _end(self) -> None:
        await self._keeper.end()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        if self._keeper.state.written is not None:
            self._keeper.state.written.discard()


def engine_arguments(config: EngineConfig) -> list[str]:
    """All settings of the engine, as ``headwater serve`` takes them."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    # The learner is on the same device, and a server would take most of what is free now.
    values["memory_fraction"] = config.memory_fraction or SHARED_FRACTION
    return [f"engine.{name}={json.dumps(value)}" for name, value in values.items()]


def _settle(answer: asyncio.Future[ModelResponse], result: ModelResponse | HeadwaterError) -> None:
    """Answer a caller, unless it has gone."""
    if answer.done():
        return
    if isinstance(result, HeadwaterError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
