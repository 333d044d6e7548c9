"""An engine in a separate process, which is replaced if it dies, or a running server.

    engine = NativeEngine(OwnServer("tiny:qwen3", dtype="float32"), transfer="shared_memory", spans=Spans())
    response = await engine.agenerate(request)      # also if the process is killed midway

Every generated token has arrived in this process. A new process is therefore given the newest weights, the prompt and
the tokens so far, and continues after them. Callers only notice the time it takes. Weights that were sent through
shared memory are not kept here: after a restart ``status().needs_weights`` is true, and requests wait until the weights
are published again.

A thread with an event loop owns the process, the connection and the open requests (``server.py``). Callers may be on
any thread or event loop, and a process that dies while no request is open is replaced as well. A second thread sends
weights.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from headwater.backends import BACKENDS, SERVER_KEY, BackendContext, check_length, engine_device, engine_settings
from headwater.backends.launch.child import ChildServer, StartChild
from headwater.backends.native.client import ConnectionLost
from headwater.backends.native.places import ForeignServer, OwnServer, check_running, engine_arguments
from headwater.backends.native.requests import FramedRequest
from headwater.backends.native.server import EngineChannel, NativeServer
from headwater.backends.remote.thread import Deliver, EngineThread
from headwater.config.schema import WeightEncoding, WeightLink, WeightTransfer
from headwater.config.server_checks import chosen_transfer
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus, MemoryTag, UpdateMode, check_features
from headwater.core.errors import HeadwaterError, RequestError, RolloutFailed
from headwater.core.protocols import EngineLimits, WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S, wait_for_future
from headwater.models.checksum import dtype_of_checksum
from headwater.models.device import resolve_dtype
from headwater.observe.spans import Spans
from headwater.weights import TRANSPORTS, Transport

_START_LIMIT_S = ENGINE_START_LIMIT_S + 60.0
"""The process's own limit is reached first, and its message says more."""
_LONGEST_LIMIT_S = 1e9
"""For limits that are sent as JSON, which has no infinity."""
_REQUEST_BYTES = 2**20
"""Room for the tokens and settings of a request beside its images."""
_METRICS_LIMIT_S = 5.0
_SILENT_LIMIT_S = 15.0
"""A process that has not reported for so long counts as unreachable, although its connection is open."""


@BACKENDS.register(BackendTraits(connects=True, needs_servers=True, takes_adapters=True))
class NativeEngine:
    """An ``InferenceEngine`` whose work is done by ``headwater serve`` as a child process."""

    def __init__(
        self,
        place: OwnServer | ForeignServer,
        *,
        transfer: WeightTransfer,
        spans: Spans,
        link: WeightLink = "gloo",
        encoding: WeightEncoding = "plain",
        weight_folder: str = "",
        longest_response_s: float = 0.0,
        mode: UpdateMode | None = None,
        hands_over: bool = False,
    ) -> None:
        """``longest_response_s`` extends the limit of a weight update, in which running responses may have to end.

        ``mode`` is the default of ``update_weights``; None leaves it to the server. ``hands_over`` fails open requests
        with ``ServerLost`` when the process is lost, instead of continuing them when it is back.
        """
        self._update_limit_s = min(max(ENGINE_CALL_LIMIT_S, longest_response_s), _LONGEST_LIMIT_S)
        self._transfer, self._weight_folder, self._mode = transfer, weight_folder, mode
        self._link: WeightLink = link
        self._encoding: WeightEncoding = encoding
        self._place = place
        self._server = NativeServer(place, spans, hands_over=hands_over)
        self._numbers = itertools.count()
        self._silent_since: float | None = None
        """Since when its process has not reported; None if it has reported last time."""
        self._thread = EngineThread("headwater-native-engine")
        atexit.register(self.close)
        try:
            self._thread.do(
                self._server.keeper.start(), f"the engine's {self._server.name} starts", limit_s=_START_LIMIT_S
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def launch(cls, context: BackendContext, devices: Sequence[str]) -> NativeEngine:
        """Start ``headwater serve`` with the engine of ``rollout.backend``."""
        config = context.config
        start_child: StartChild = ChildServer.start
        if context.places:
            (place,) = context.places
            device, is_shared, start_child = devices[0], place.shares_device, place.start_child
        else:
            device, is_shared = engine_device(devices[0], config.model.device)
        backend = "embedded" if config.rollout.backend == "native" else config.rollout.backend
        arguments = ["--backend", backend, "--device", device]
        arguments += ["--seed", str(config.run.seed), "--threads", str(config.trainer.num_threads)]
        arguments += [*config.rollout.launch.args, *engine_arguments(engine_settings(config), shares_device=is_shared)]
        return cls._made(context, OwnServer(context.model_path, arguments, config.model.dtype, start_child=start_child))

    @classmethod
    def connect(cls, url: str, context: BackendContext) -> NativeEngine:
        """Use a running ``headwater serve``."""
        config = context.config
        place = ForeignServer(
            url, os.environ.get(SERVER_KEY, ""), config.rollout.server_timeout_s, owns_weights=context.owns_weights
        )
        mode = None if config.engine.update_mode == "auto" else config.engine.update_mode
        engine = cls._made(context, place, mode)
        try:
            check_running(context, url, engine._info)
        except BaseException:
            engine.close()
            raise
        return engine

    @classmethod
    def _made(
        cls, context: BackendContext, place: OwnServer | ForeignServer, mode: UpdateMode | None = None
    ) -> NativeEngine:
        config = context.config
        engine = cls(
            place,
            transfer=chosen_transfer(config) or "shared_memory",
            link=config.rollout.weight_link,
            encoding=config.rollout.weight_encoding,
            spans=context.spans,
            weight_folder=config.rollout.weight_folder,
            longest_response_s=config.rollout.timeout_s,
            mode=mode,
            hands_over=context.is_one_of_many,
        )
        try:
            check_length(context, engine.limits.max_model_tokens)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def pid(self) -> int:
        """The id of the process that serves now, if this process has started it."""
        child = self._server.keeper.child
        assert isinstance(child, ChildServer), "started here"
        return child.pid

    @property
    def url(self) -> str:
        """The address of the process that serves now, or served last."""
        return self._server.url

    @property
    def instance(self) -> str:
        """Of the process that serves now, or served last."""
        return str(self._server.info.get("instance", ""))

    @cached_property
    def _transport(self) -> Transport:
        place = self._place
        if isinstance(place, OwnServer):
            dtype = resolve_dtype(place.dtype)
        else:
            dtype = dtype_of_checksum(self.capabilities.dtype)
        make = TRANSPORTS.resolve(self._transfer)
        options = {"file": (self._weight_folder,), "collective": (self._encoding, self._link)}
        transport: Transport = make(dtype, *options.get(self._transfer, ()))
        return transport

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self._ask("/get_server_info")

    @cached_property
    def capabilities(self) -> Capabilities:
        """Those of the engine in the process, except for what does not travel between the two processes."""
        told: dict[str, Any] = self._info["capabilities"]
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        # Only tokens, log-probs and versions are sent between the two processes.
        features = tuple(each for each in values["features"] if each not in ("top_logprobs", "prompt_logprobs"))
        return replace(
            Capabilities(**values),
            rounds=False,
            joint_start=False,
            discards_weights=False,
            direct_weights=self._transfer == "collective",
            file_weights=self._transfer == "file",
            features=features,
        )

    @cached_property
    def limits(self) -> EngineLimits:
        info = self._info
        return EngineLimits(
            vocab_size=info["vocab_size"],
            max_model_tokens=info["context_length"],
            max_request_tokens=info["max_request_tokens"],
            max_queue=info["max_queue"],
        )

    def status(self) -> EngineStatus:
        state, requests, keeper = self._server.state, self._server.requests, self._server.keeper
        metrics: Mapping[str, float] = {}
        is_alive = not self._thread.is_closed and keeper.failure is None
        is_reachable = is_alive and keeper.is_settled
        if is_reachable:
            metrics, is_reachable = self._report()
        num_running = int(metrics.get("num_running", requests.num_started))
        return EngineStatus(
            version=state.version,
            num_running=num_running,
            num_waiting=max(0, len(requests) - num_running),
            num_restarts=keeper.num_restarts,
            needs_weights=state.needs_weights,
            is_paused=state.is_paused,
            is_asleep=bool(state.asleep),
            is_alive=is_alive,
            is_reachable=is_reachable,
            metrics=metrics,
        )

    def _report(self) -> tuple[Mapping[str, float], bool]:
        """What the process measures, and whether it has answered lately."""
        asked_at = time.monotonic()
        with suppress(HeadwaterError, CancelledError):
            metrics = self._thread.do(self._metrics(), "the engine's process reports", limit_s=_METRICS_LIMIT_S)
            self._silent_since = None
            return metrics, True
        self._silent_since = self._silent_since or asked_at
        return {}, time.monotonic() - self._silent_since < _SILENT_LIMIT_S

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The response to one request. Cancelling the caller ends the request."""

        def opened(deliver: Deliver) -> AbstractContextManager[None]:
            return self._opened(FramedRequest(next(self._numbers), request, deliver))

        return await self._thread.answer(opened)

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield new tokens as they arrive; with a server that cannot stream, the complete response once."""

        def opened(deliver: Deliver, take: Callable[[Delta], None]) -> AbstractContextManager[None]:
            return self._opened(FramedRequest(next(self._numbers), request, deliver, take))

        return self._thread.follow(opened)

    @contextmanager
    def _opened(self, opened: FramedRequest) -> Iterator[None]:
        """A request that the server works on within the block."""
        self._thread.enter(lambda: self._server.enter(opened))
        try:
            yield
        finally:
            if not opened.has_ended:
                self._thread.post(lambda: self._server.requests.leave(opened))

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that is too long. The engine's process checks the rest."""
        if request.sampling.features or request.media:
            check_features(request, self.capabilities)
        self._check_size(request)
        num_tokens = len(request.input_tokens) + request.sampling.max_new_tokens
        if num_tokens > self.limits.max_request_tokens:
            raise RequestError(
                f"request {request.request_id}: {num_tokens} tokens exceed the engine's limit of "
                f"{self.limits.max_request_tokens}; shorten the prompt or lower max_new_tokens"
            )

    def _check_size(self, request: ModelRequest) -> None:
        """A message that is too large would end the connection, and with it all other requests."""
        num_bytes = sum(len(frame) for item in request.media for frame in item.content.frames)
        limit = self._info.get("max_body_bytes", 0)
        if num_bytes and limit and num_bytes * 4 / 3 + _REQUEST_BYTES > limit:
            raise RequestError(
                f"request {request.request_id}: its images and videos have {num_bytes / 2**20:.1f} MiB, and the server "
                f"takes messages of {limit / 2**20:.1f} MiB; make them smaller, or start it with a larger "
                "--max-body-mib"
            )

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. They return the tokens they have."""
        return self._thread.do(self._abort(request_id), "the engine's process aborts requests")

    # Control

    def pause(self) -> None:
        self._thread.do(self._set_paused(True), "the engine's process pauses")

    def resume(self) -> None:
        self._thread.do(self._set_paused(False), "the engine's process resumes")

    def get_version(self) -> int:
        """The version of the newest weights that were taken."""
        return self._server.state.version

    def set_version(self, version: int) -> None:
        what = "the engine's process sets its version"
        done = self._thread.submit(lambda: self._thread.do(self._set_version(version), what))
        wait_for_future(done, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)

    def weights_checksum(self) -> str:
        """The checksum of the newest weights. ``TransferLost`` if the process that took them has been replaced.

        The weights can then be published again.
        """
        return self._thread.do(self._server.checksum(), "the engine's process computes a checksum")

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Send the weights to the process. They are read on another thread until the future is done.

        ``TransferLost`` means that the process died while they were streamed to it. The update can then be sent again.
        """
        try:
            return self._thread.submit(self._send, update, mode)
        except HeadwaterError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._thread.do(self._set_asleep(tags, True), "the engine's process goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._thread.do(self._set_asleep(tags, False), "the engine's process wakes up")

    def close(self) -> None:
        """End every request with the tokens it has, and the process. Closing twice is allowed."""
        atexit.unregister(self.close)
        try:
            self._thread.close(self._server.end, "the engine's process ends")
        finally:
            if "_transport" in vars(self):
                self._transport.close()

    def _ask(self, path: str) -> dict[str, Any]:
        return self._thread.do(self._server.call(path), f"the engine's process answers {path}")

    # On the sender's thread

    def _send(self, update: WeightUpdate, mode: UpdateMode | None) -> None:
        mode = mode or self._mode
        try:
            self._thread.do(self._server.check_untouched(), "the engine's process tells its version")
            client = None
            if not self._transport.survives_restart:
                client = self._thread.do(self._server.begin_transfer(), "the engine's process serves")
            channel = EngineChannel(self._server, self._thread.start, update.version, client, self._update_limit_s)
            self._transport.send(update, channel, mode)
        except CancelledError as error:
            raise RolloutFailed("the engine is closed") from error
        finally:
            update.close()

    # On the engine's thread

    async def _metrics(self) -> Mapping[str, float]:
        try:
            return await (await self._server.client()).call("/metrics.json")
        except ConnectionLost:
            return {}

    async def _abort(self, request_id: str | None) -> int:
        return self._server.requests.abort(request_id)

    async def _set_paused(self, paused: bool) -> None:
        self._server.state.is_paused = paused  # first, because a child that starts meanwhile must know
        await self._server.call("/control/pause" if paused else "/control/resume", {})

    async def _set_version(self, version: int) -> None:
        await self._server.call("/control/version", {"version": version})
        self._server.state.version = version

    async def _set_asleep(self, tags: Sequence[MemoryTag], asleep: bool) -> None:
        await self._server.call("/control/sleep" if asleep else "/control/wake", {"tags": list(tags)})
        state = self._server.state
        state.asleep = state.asleep.union(tags) if asleep else state.asleep.difference(tags)
