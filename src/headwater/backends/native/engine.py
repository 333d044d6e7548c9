"""The embedded engine in a separate process, which is replaced if it dies.

    engine = NativeEngine("tiny:qwen3", (), dtype="float32", transfer="shared_memory", spans=Spans())
    response = await engine.agenerate(request)      # also if the process is killed midway

Every generated token has arrived in this process. A new process is therefore given the newest weights, the prompt and
the tokens so far, and continues after them. Callers only notice the time it takes. Weights that were sent through
shared memory are not kept here: after a restart ``status().needs_weights`` is true, and requests wait until the weights
are published again.

A thread with an event loop owns the child, the connection and the open requests. Callers may be on any thread or event
loop, and a child that dies while no request is open is replaced as well. A second thread sends weights.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from typing import Any, TypeVar

import torch

from headwater.backends import BackendContext, check_length, engine_device
from headwater.backends.launch.keeper import ChildKeeper
from headwater.backends.native.client import ConnectionLost, ServerClient
from headwater.backends.native.requests import OpenRequest
from headwater.config.schema import Dtype, EngineConfig, WeightTransfer
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed, WeightsIncomplete
from headwater.core.protocols import (
    ALL_TAGS,
    Capabilities,
    EngineLimits,
    EngineStatus,
    MemoryTag,
    UpdateMode,
    WeightUpdate,
    whole_response,
)
from headwater.core.records import Delta, ModelRequest, ModelResponse
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, wait_for_future
from headwater.engine.delivery import Mailbox, Mailboxes
from headwater.engine.kv_cache import SHARED_FRACTION
from headwater.observe.spans import Spans
from headwater.weights.file import FileWeights, remove_leftovers
from headwater.weights.shared_memory import NUM_SLOTS, SlotSender, slot_size

logger = logging.getLogger(__name__)
T = TypeVar("T")

_START_LIMIT_S = ENGINE_START_LIMIT_S + 60.0
"""The process's own limit is reached first, and its message says more."""
_THREAD_END_S = 5.0
_METRICS_LIMIT_S = 5.0


class NativeEngine:
    """An ``InferenceEngine`` whose work is done by ``headwater serve`` as a child process."""

    def __init__(
        self, model: str, arguments: Sequence[str], *, dtype: Dtype, transfer: WeightTransfer, spans: Spans
    ) -> None:
        self._dtype_name = dtype
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._transfer = transfer
        if transfer == "file":
            for folder in remove_leftovers():
                logger.info("removed %s, which a killed process had left behind", folder)
        self._keeper = ChildKeeper(model, ("--dtype", dtype, *arguments), secrets.token_urlsafe(32), spans)
        self._numbers = itertools.count()
        self._mailboxes = Mailboxes()
        self._is_closed = False
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self._loop)
        self._slots: SlotSender | None = None
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="headwater-weights")
        """Sends one update at a time, in the order in which they were requested."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="headwater-native-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._do(self._keeper.start(), f"the engine's process starts with {model}", limit_s=_START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_context(cls, context: BackendContext) -> NativeEngine:
        config = context.config
        device, is_shared = engine_device(config.rollout.device, config.model.device)
        arguments = ["--device", device, "--seed", str(config.run.seed)]
        engine = cls(
            context.model_path,
            [*arguments, *engine_arguments(config.engine, shares_device=is_shared)],
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
    def pid(self) -> int:
        """The id of the process that serves now."""
        return self._keeper.pid

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(streaming=False, dtype=self._dtype_name)

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
        state, requests = self._keeper.state, self._keeper.requests
        metrics: Mapping[str, float] = {}
        if self._keeper.is_settled and not self._is_closed:
            with suppress(HeadwaterError, CancelledError):
                metrics = self._do(self._metrics(), "the engine's process reports", limit_s=_METRICS_LIMIT_S)
        num_running = int(metrics.get("num_running", requests.num_started))
        return EngineStatus(
            version=state.version,
            num_running=num_running,
            num_waiting=max(0, len(requests) - num_running),
            num_restarts=self._keeper.num_restarts,
            needs_weights=state.needs_weights,
            is_paused=state.is_paused,
            is_asleep=bool(state.asleep),
            is_alive=not self._is_closed,
            metrics=metrics,
        )

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The response to one request. Cancelling the caller ends the request."""
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
        """The version of the newest weights that were taken."""
        return self._keeper.state.version

    def set_version(self, version: int) -> None:
        what = "the engine's process sets its version"
        self._check_open()
        done = self._sender.submit(self._do, self._set_version(version), what)
        wait_for_future(done, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)

    def weights_checksum(self) -> str:
        if self._keeper.state.needs_weights:
            raise WeightsIncomplete("the engine's process holds no complete version; publish one first")
        answer: str = self._ask("/control/checksum")["checksum"]
        return answer

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Send the weights to the process. They are read on another thread until the future is done.

        ``TransferLost`` means that the process died while they were streamed to it. The update can then be sent again.
        """
        try:
            with self._closing:
                self._check_open()
                return self._sender.submit(self._send, update, mode)
        except HeadwaterError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._set_asleep(tags, True), "the engine's process goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._set_asleep(tags, False), "the engine's process wakes up")

    def close(self) -> None:
        """End every request with the tokens it has, and the process. Closing twice is allowed."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self.close)
        try:
            what = "the engine's process ends"
            wait_for_future(ended, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
            self._sender.shutdown(wait=True, cancel_futures=True)  # its calls have failed by now
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_THREAD_END_S)
            if not self._thread.is_alive():
                self._loop.close()
            if self._slots is not None:
                self._slots.close()
            if self._keeper.state.weights_file is not None:
                self._keeper.state.weights_file.discard()

    def _ask(self, path: str) -> dict[str, Any]:
        return self._do(self._keeper.call(path), f"the engine's process answers {path}")

    def _do(self, work: Coroutine[Any, Any, T], what: str, limit_s: float = ENGINE_CALL_LIMIT_S) -> T:
        """Run a coroutine on the engine's thread, and wait for it."""
        future = self._start(work)
        try:
            return wait_for_future(future, lambda: what, kind="engine_call", hard_limit_s=limit_s)
        finally:
            future.cancel()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._closing:
            if self._is_closed:
                work.close()
            self._check_open()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutFailed("the engine is closed")

    # On the sender's thread

    def _send(self, update: WeightUpdate, mode: UpdateMode | None) -> None:
        try:
            if self._transfer == "file":
                self._send_file(update, mode)
            else:
                self._stream(update, mode)
        except CancelledError as error:
            raise RolloutFailed("the engine is closed") from error
        finally:
            update.close()

    def _send_file(self, update: WeightUpdate, mode: UpdateMode | None) -> None:
        """Write a file and have the process read it. It is kept until the next version: a new process needs it."""
        state, written = self._keeper.state, FileWeights(update.shapes, self._dtype)
        try:
            written.write(update.buckets)
            body = {"version": update.version, "source": {"file": str(written.path)}, "mode": mode}
            self._do(self._keeper.call("/control/update_weights", body), "the engine's process reads a weights file")
            before, state.weights_file, state.version = state.weights_file, written, update.version
        except BaseException:
            written.discard()
            raise
        if before is not None:
            before.discard()

    def _stream(self, update: WeightUpdate, mode: UpdateMode | None) -> None:
        """Send the update slot by slot to the process that serves now."""
        slots = self._slots_for(update)
        client = self._do(self._keeper.client(), "the engine's process serves")
        start = {
            "version": update.version,
            "mode": mode,
            "shapes": {name: list(shape) for name, shape in update.shapes.items()},
            "dtype": self._dtype_name,
            "shared_memory": slots.name,
            "slot_bytes": slots.slot_bytes,
        }
        self._tell(client, "/control/start_weight_update", start)  # refused here if names or shapes do not fit
        sending: list[Future[dict[str, Any]] | None] = [None] * NUM_SLOTS

        def until_free(slot: int) -> None:
            if (sent := sending[slot]) is not None:
                what = f"the engine's process copies weights of version {update.version}"
                wait_for_future(sent, lambda: what, kind="weights", hard_limit_s=ENGINE_CALL_LIMIT_S)

        try:
            for slot, entries in slots.fill(update.buckets, until_free):
                body = {"slot": slot, "tensors": entries}
                sending[slot] = self._start(self._keeper.call_same(client, "/control/update_weight_slot", body))
            for slot in range(NUM_SLOTS):
                until_free(slot)
            self._keeper.state.were_streamed = True
            self._tell(client, "/control/finish_weight_update", {})
        except BaseException as error:
            self._abandon(client, error)
            raise
        self._do(self._weights_arrived(client, update.version), "the engine's process has new weights")

    def _abandon(self, client: ServerClient, error: BaseException) -> None:
        """End a stream that failed. A process that cannot be told has ended, and the next one needs weights anyway."""
        with suppress(HeadwaterError, CancelledError):
            body = {"error": f"{type(error).__name__}: {error}"}
            answer = self._tell(client, "/control/finish_weight_update", body)
            self._keeper.state.needs_weights = bool(answer["needs_weights"])

    def _tell(self, client: ServerClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._do(self._keeper.call_same(client, path, body), f"the engine's process answers {path}")

    def _slots_for(self, update: WeightUpdate) -> SlotSender:
        """The slots of the first update are used again by the others, unless a tensor is larger."""
        if self._slots is None or slot_size(update.shapes, self._dtype) > self._slots.slot_bytes:
            if self._slots is not None:
                self._slots.close()
            self._slots = SlotSender(update.shapes, self._dtype)
        return self._slots

    # On the engine's thread

    async def _metrics(self) -> Mapping[str, float]:
        try:
            return await (await self._keeper.client()).call("/metrics.json")
        except ConnectionLost:
            return {}

    async def _abort(self, request_id: str | None) -> int:
        return self._keeper.requests.abort(request_id)

    async def _set_paused(self, paused: bool) -> None:
        self._keeper.state.is_paused = paused  # first, because a child that starts meanwhile must know
        await self._keeper.call("/control/pause" if paused else "/control/resume", {})

    async def _set_version(self, version: int) -> None:
        await self._keeper.call("/control/version", {"version": version})
        self._keeper.state.version = version

    async def _set_asleep(self, tags: Sequence[MemoryTag], asleep: bool) -> None:
        await self._keeper.call("/control/sleep" if asleep else "/control/wake", {"tags": list(tags)})
        state = self._keeper.state
        state.asleep = state.asleep.union(tags) if asleep else state.asleep.difference(tags)

    async def _weights_arrived(self, client: ServerClient, version: int) -> None:
        self._keeper.weights_arrived(client, version)

    async def _end(self) -> None:
        await self._keeper.end()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


def engine_arguments(config: EngineConfig, *, shares_device: bool) -> list[str]:
    """All settings of the engine, as ``headwater serve`` takes them."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    if shares_device:
        # A server alone on a device takes most of the free memory, which the learner needs here.
        values["memory_fraction"] = config.memory_fraction or SHARED_FRACTION
    return [f"engine.{name}={json.dumps(value)}" for name, value in values.items()]


def _settle(answer: asyncio.Future[ModelResponse], result: ModelResponse | HeadwaterError) -> None:
    """Answer a caller, unless it has left."""
    if answer.done():
        return
    if isinstance(result, HeadwaterError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
