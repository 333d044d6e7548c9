"""vLLM as an ``InferenceEngine``.

    engine = VllmEngine.launch(context, ["cuda:1"])                     # start a server and keep it alive
    engine = VllmEngine.connect("http://10.0.0.7:8000", context)        # use one that runs
    engine = VllmEngine.from_context(context)                           # vLLM in this process

A thread with an event loop owns the connection and the open requests (``session.py``). Callers may be on any thread or
event loop. A second thread writes weights.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from headwater.backends import BACKENDS, BackendContext, check_length, engine_device
from headwater.backends.launch.child import ChildServer, StartChild
from headwater.backends.vllm.checks import check_logprobs, check_model, check_reload, check_request
from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.link import LinkLost, VllmInfo
from headwater.backends.vllm.model import RunModel, model_folder
from headwater.backends.vllm.requests import OpenRequest, given_whole
from headwater.backends.vllm.session import ServedModel, Session
from headwater.config.traits import BackendTraits
from headwater.core.errors import HeadwaterError, RolloutFailed, WeightsError
from headwater.core.protocols import (
    ALL_TAGS,
    Capabilities,
    EngineLimits,
    EngineStatus,
    MemoryTag,
    UpdateMode,
    WeightFile,
    WeightUpdate,
    check_features,
    whole_response,
)
from headwater.core.records import Delta, ModelRequest, ModelResponse, SamplingParams
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, wait_for_future
from headwater.engine.delivery import Mailbox, Mailboxes
from headwater.models.device import DTYPES
from headwater.weights.file import written_file
from headwater.weights.memory import Receiver

T = TypeVar("T")

KEY_VARIABLE = "HEADWATER_SERVER_KEY"
_THREAD_END_S = 5.0


class Server(Protocol):
    """What brings a session its connection, and replaces it. Belongs to the session's event loop."""

    @property
    def url(self) -> str: ...
    @property
    def num_restarts(self) -> int: ...
    async def start(self) -> None:
        """Return when the session is attached."""
        ...

    async def end(self) -> None: ...


@BACKENDS.register(
    BackendTraits(
        engine_settings=(
            "max_sequences",
            "max_queue",
            "max_prefill_tokens",
            "page_tokens",
            "kv_cache_gib",
            "memory_fraction",
            "prefix_cache",
            "update_mode",
            "deterministic",
        ),
        connects=True,
        is_foreign=True,
        transfers=("file",),
    )
)
class VllmEngine:
    """An ``InferenceEngine`` whose work is done by vLLM."""

    program: ClassVar[str] = "vLLM"

    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        seeded_sampling=False,  # the same seed gives the same tokens only in the same batch
        checksums=False,  # its workers store weights in their own layout
        streaming=False,
        features=("logit_bias",),
    )

    def __init__(
        self, name: str, context: BackendContext, model: RunModel, make_server: Callable[[Session], Server]
    ) -> None:
        config = context.config
        self._config = config
        self._model = model
        self._name = name
        self._numbers = itertools.count()
        self._mailboxes = Mailboxes()
        self._is_closed = False
        self._closing = threading.Lock()
        self._newest: WeightFile | None = None
        """Kept until the next version, because a process that replaces this one reads it."""
        self._resources = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self._loop)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="headwater-weights")
        """Sends one update at a time, in the order in which they were requested."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="headwater-vllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        served = ServedModel(context.tokenizer, model.end_tokens)
        self._session = Session(name, served, context.spans, is_one_of_many=context.is_one_of_many)
        self._server = make_server(self._session)
        try:
            self._do(self._server.start(), f"{name} starts", limit_s=ENGINE_START_LIMIT_S + 60.0)
            assert self._session.info is not None, "started"
            self._check(context, self._session.info)
        except BaseException:
            self.close()
            raise

    @classmethod
    def launch(cls, context: BackendContext, devices: Sequence[str]) -> VllmEngine:
        """Start a server on ``devices``, and keep it alive."""
        from headwater.backends.vllm.launch import LaunchedServer, command

        model = RunModel.of(context)
        check_length(context, model.max_tokens)
        with ExitStack() as stack:
            # A process that replaces the first one loads the folder again.
            folder = stack.enter_context(model_folder(context))
            start: StartChild = ChildServer.start
            if context.places:
                is_shared, start = context.places[0].shares_device, context.places[0].start_child
            else:
                _, is_shared = engine_device(devices[0], context.config.model.device)
            how = command(context, folder, devices, shares_device=is_shared)
            engine = cls("the vLLM server", context, model, lambda session: LaunchedServer(session, how, start))
            engine._resources = stack.pop_all()
        return engine

    @classmethod
    def connect(cls, url: str, context: BackendContext) -> VllmEngine:
        """Use a running server. Unless it serves the weights of another owner, it waits for those of this run."""
        from headwater.backends.vllm.connect import ConnectedServer

        model, where = RunModel.of(context), f"the vLLM server at {url}"

        async def check(link: HttpLink, info: VllmInfo) -> None:
            if context.owns_weights:
                await link.resume()  # an earlier run may have left it paused
                check_reload(info, model, where)
            await check_model(link, info, model, where)

        def make(session: Session) -> Server:
            session.weights.is_needed = context.owns_weights
            key, limit_s = os.environ.get(KEY_VARIABLE, ""), context.config.rollout.server_timeout_s
            is_one_of_many = context.is_one_of_many
            return ConnectedServer(
                session, url, api_key=key, check=check, limit_s=limit_s, is_one_of_many=is_one_of_many
            )

        return cls(where, context, model, make)

    @classmethod
    def from_context(cls, context: BackendContext) -> VllmEngine:
        """vLLM in this process, on the learner's device."""
        from headwater.backends.vllm.inprocess import InProcessServer

        model = RunModel.of(context)
        with ExitStack() as stack:
            folder = stack.enter_context(model_folder(context))
            engine = cls("vLLM", context, model, lambda session: InProcessServer(session, context, folder))
            engine._resources = stack.pop_all()
        return engine

    def _check(self, context: BackendContext, info: VllmInfo) -> None:
        rollout = context.config.rollout
        sampling = SamplingParams(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            rollout.min_p,
            rollout.min_new_tokens,
        )
        check_logprobs(info, sampling, self._name)
        check_length(context, info.max_model_tokens)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def _info(self) -> VllmInfo:
        assert self._session.info is not None, "started"
        return self._session.info

    @property
    def capabilities(self) -> Capabilities:
        modes: tuple[UpdateMode, ...] = ("interrupt", "drain")
        return replace(
            self.declared_capabilities,
            file_weights=True,
            dtype=self._info.dtype,
            memory_tags=ALL_TAGS if self._info.can_sleep else (),
            update_modes=(*modes, "in_flight") if self._info.dialect.labels_tokens else modes,
        )

    @property
    def limits(self) -> EngineLimits:
        longest = self._info.max_model_tokens
        return EngineLimits(self._model.vocab_size, longest, longest, self._config.engine.max_queue)

    def status(self) -> EngineStatus:
        session = self._session
        return EngineStatus(
            version=session.weights.version,
            num_running=session.num_started,
            num_waiting=session.num_open - session.num_started,
            num_restarts=self._server.num_restarts,
            needs_weights=session.weights.is_needed and session.is_attached,
            is_paused=session.is_paused,
            is_asleep=bool(session.asleep),
            is_alive=not self._is_closed and session.failure is None,
            is_reachable=session.is_attached,
            settings={
                self.program.lower(): self._info.version,
                "max_sequences": self._info.max_sequences,
                "url": self.url,
            },
            metrics=session.measured,
        )

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The response to one request. Cancelling the caller ends the request."""
        self.check(request)
        if (whole := given_whole(request, self._model.end_tokens)) is not None:
            return whole
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        mailbox = self._mailboxes.of_running_loop()

        def deliver(result: ModelResponse | HeadwaterError) -> None:
            mailbox.post(lambda: _settle(answer, result))

        opened = OpenRequest(next(self._numbers), request, deliver)
        with self._closing:
            self._check_open()
            self._inbox.post(lambda: self._session.enter(opened))
        try:
            return await answer
        finally:
            if not opened.has_ended:
                self._inbox.post(lambda: self._session.leave(opened))

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        check_features(request, self.declared_capabilities)
        check_request(request, self._info, self._model)

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield the complete response once: its versions are certain only at its end."""
        return whole_response(self, request)

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. They return the tokens they have."""
        return self._do(self._abort(request_id), f"{self._name} aborts requests")

    async def _abort(self, request_id: str | None) -> int:
        return self._session.abort(request_id)

    # Control

    def pause(self) -> None:
        self._do(self._session.set_paused(True), f"{self._name} pauses")

    def resume(self) -> None:
        self._do(self._session.set_paused(False), f"{self._name} resumes")

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._session.set_asleep(tags, True), f"{self._name} goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._do(self._session.set_asleep(tags, False), f"{self._name} wakes up")

    def get_version(self) -> int:
        return self._session.weights.version

    def set_version(self, version: int) -> None:
        self._do(self._session.set_version(version), f"{self._name} sets its version")

    def weights_checksum(self) -> str:
        raise WeightsError(f"{self.program} stores weights in its own layout, so they have no checksum")

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Write the weights to a file, which vLLM loads. ``TransferLost`` if its process died; send them again then."""
        try:
            chosen = self._mode(mode)
            Receiver(self._model.skeleton, update.shapes)  # names and shapes
            with self._closing:
                self._check_open()
                return self._sender.submit(self._send, update, chosen)
        except HeadwaterError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def _mode(self, mode: UpdateMode | None) -> UpdateMode:
        can = self.capabilities.update_modes
        wanted = mode or self._config.engine.chosen_update_mode
        if wanted in can:
            return wanted
        if mode is None and self._config.engine.update_mode == "auto":
            return "interrupt"
        raise WeightsError(f"mode = {wanted}: {self.program} {self._info.version} only has {', '.join(can)}")

    def _send(self, update: WeightUpdate, mode: UpdateMode) -> None:
        folder = self._config.rollout.weight_folder
        written = written_file(update, DTYPES[self._info.dtype], folder)  # type: ignore[index]
        limit_s = max(ENGINE_CALL_LIMIT_S, self._config.rollout.timeout_s)
        try:
            work = self._session.update(str(written.path.parent), update.version, mode, limit_s)
            self._do(work, f"{self._name} takes the weights of version {update.version}", limit_s=limit_s)
        except CancelledError as error:
            written.discard()
            raise RolloutFailed("the engine is closed") from error
        except BaseException:
            if self._session.weights.folder == str(written.path.parent):
                self._keep(written)  # it was loaded before the error, so a server that restarts loads it again
            else:
                written.discard()
            raise
        finally:
            update.close()
        self._keep(written)

    def _keep(self, written: WeightFile) -> None:
        """Until the next version: a server that restarts loads the newest file."""
        if self._newest is not None:
            self._newest.discard()
        self._newest = written

    # The thread

    def close(self) -> None:
        """End every request with the tokens it has, and a server that was started here. Closing twice is allowed."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self.close)
        try:
            what = f"{self._name} ends"
            wait_for_future(ended, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
            self._sender.shutdown(wait=True, cancel_futures=True)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_THREAD_END_S)
            if not self._thread.is_alive():
                self._loop.close()
            if self._newest is not None:
                self._newest.discard()
            self._resources.close()

    async def _end(self) -> None:
        await self._session.end()
        await self._server.end()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def _do(self, work: Coroutine[Any, Any, T], what: str, limit_s: float = ENGINE_CALL_LIMIT_S) -> T:
        """Run a coroutine on the engine's thread, and wait for it."""
        with self._closing:
            if self._is_closed:
                work.close()
            self._check_open()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return wait_for_future(future, lambda: what, kind="engine_call", hard_limit_s=limit_s)
        except LinkLost as error:
            raise RolloutFailed(f"{what}: {error}") from error
        finally:
            future.cancel()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutFailed("the engine is closed")


def _settle(answer: asyncio.Future[ModelResponse], result: ModelResponse | HeadwaterError) -> None:
    """Answer a caller, unless it has left."""
    if answer.done():
        return
    if isinstance(result, HeadwaterError):
        answer.set_exception(result)
    else:
        answer.set_result(result)
