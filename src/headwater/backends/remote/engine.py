"""An ``InferenceEngine`` whose work is done by a server of another program.

A thread with an event loop owns the connection and the open requests (``session.py``). A second thread sends weights.
``VllmEngine`` and ``SglangEngine`` add how to start a server, how to talk to it, and what it can do.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch

from headwater.backends import SERVER_KEY, BackendContext, check_length, engine_device
from headwater.backends.launch.child import ChildServer, Command, StartChild
from headwater.backends.remote.link import LinkLost, ServerInfo, ServerLink, WeightStream
from headwater.backends.remote.media import MediaPrompts
from headwater.backends.remote.model import RunModel, model_folder
from headwater.backends.remote.requests import OpenRequest, ServedModel, given_whole
from headwater.backends.remote.servers import ConnectedServer, HttpLink, LaunchedServer, RemoteServer
from headwater.backends.remote.session import RemoteSession
from headwater.backends.remote.thread import Deliver, EngineThread
from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus, MemoryTag, UpdateMode, check_features
from headwater.core.errors import (
    ConfigError,
    HeadwaterError,
    RequestError,
    RolloutFailed,
    ServerLost,
    TransferLost,
    WeightsError,
)
from headwater.core.protocols import EngineLimits, WeightFile, WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams, wrong_stop
from headwater.core.waits import ENGINE_CALL_LIMIT_S, ENGINE_START_LIMIT_S
from headwater.models.device import DTYPES
from headwater.weights.file import written_file
from headwater.weights.memory import Receiver

T = TypeVar("T")


class RemoteEngine:
    """What the engines of all programs share."""

    program: ClassVar[str] = ""
    api_key: str = ""
    """Of a server that this engine has started."""
    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        seeded_sampling=False,  # the same seed gives the same tokens only in the same batch
        checksums=False,  # its workers store weights in their own layout
        videos=False,  # no request can tell the rate of its frames, and text after them has other positions
    )

    def __init__(
        self, name: str, context: BackendContext, model: RunModel, make_server: Callable[[RemoteSession], RemoteServer]
    ) -> None:
        self._config = context.config
        self._model = model
        self._name = name
        self._numbers = itertools.count()
        self._newest: WeightFile | None = None
        """Kept until the next version, because a process that replaces this one reads it."""
        self._choosing = threading.Lock()
        self._chosen_for: str | None = None
        """The process for which ``_chosen`` was made."""
        self._chosen: WeightStream | None = None
        self._replaced: list[WeightStream] = []
        """Streams to processes that took weights in another way, which end before the next update."""
        self._resources = ExitStack()
        self._thread = EngineThread(f"headwater-{self.program.lower()}-engine")
        atexit.register(self.close)
        prompts = None if model.processor is None else MediaPrompts(model.processor)
        served = ServedModel(context.tokenizer, model.end_tokens, prompts)
        self._session = RemoteSession(name, served, context.spans, is_one_of_many=context.is_one_of_many)
        self._session.weights.is_owned = context.owns_weights
        self._server = make_server(self._session)
        try:
            self._do(self._server.start(), f"{name} starts", limit_s=ENGINE_START_LIMIT_S + 60.0)
            self._check_run(context)
        except BaseException:
            self.close()
            raise

    @classmethod
    def launch(cls, context: BackendContext, devices: Sequence[str]) -> Self:
        """Start a server on ``devices``, and keep it alive."""
        start, is_shared = _starter(context, devices)
        if is_shared and devices[0] == "cpu" and context.config.learner.offload_during_rollout:
            raise ConfigError(
                [
                    f"learner.offload_during_rollout = true: the {cls.program} server releases memory only on a GPU, "
                    "and it would run on the CPU; use false"
                ]
            )
        model, key = RunModel.of(context), secrets.token_urlsafe(32)
        check_length(context, model.max_tokens)
        cls._check_model(context, model)
        with ExitStack() as stack:
            # A process that replaces the first one loads the folder again.
            folder = stack.enter_context(model_folder(context))
            how = cls._command(context, folder, devices, api_key=key, shares_device=is_shared)

            def make(session: RemoteSession) -> LaunchedServer:
                return LaunchedServer(session, how, lambda url: cls._link_to(url, key, model), start)

            engine = cls(f"the {cls.program} server", context, model, make)
            engine._resources, engine.api_key = stack.pop_all(), key
        return engine

    @classmethod
    def connect(cls, url: str, context: BackendContext) -> Self:
        """Use a running server. Unless it serves the weights of another owner, it waits for those of this run."""
        model, where = RunModel.of(context), f"the {cls.program} server at {url}"
        key, limit_s = os.environ.get(SERVER_KEY, ""), context.config.rollout.server_timeout_s

        async def check(link: ServerLink, info: ServerInfo) -> None:
            if context.owns_weights:
                await link.resume()  # an earlier run may have left it paused
            model.check_same(info, where)
            await cls._check_server(link, info, context, model, url)

        def make(session: RemoteSession) -> ConnectedServer:
            session.weights.is_needed = context.owns_weights
            return ConnectedServer(
                session,
                url,
                lambda: cls._link_to(url, key, model),
                check,
                limit_s=limit_s,
                is_one_of_many=context.is_one_of_many,
            )

        return cls(where, context, model, make)

    # What a program adds

    @classmethod
    def _command(
        cls, context: BackendContext, model: Path, devices: Sequence[str], *, api_key: str, shares_device: bool
    ) -> Command:
        """How a server of the run's model starts on ``devices``."""
        raise NotImplementedError

    @classmethod
    def _link_to(cls, url: str, api_key: str, model: RunModel) -> HttpLink:
        raise NotImplementedError

    @classmethod
    def _check_model(cls, context: BackendContext, model: RunModel) -> None:
        """Raise ``ConfigError`` if the program does not have the model, before a server is started."""

    @classmethod
    async def _check_server(
        cls, link: ServerLink, info: ServerInfo, context: BackendContext, model: RunModel, url: str
    ) -> None:
        """Raise ``ConfigError`` if a running server serves another model, or cannot take new weights."""
        raise NotImplementedError

    def _make_stream(self) -> WeightStream | None:
        """How weights reach the server without a file; None if they do not."""
        raise NotImplementedError

    def _sampling_problem(self, sampling: SamplingParams) -> str | None:
        """Why the server would not sample as it is asked, or report other log-probs than those that it sampled with."""
        raise NotImplementedError

    def _check_run(self, context: BackendContext) -> None:
        """Raise ``ConfigError`` if the server cannot do what the recipe needs."""
        rollout = context.config.rollout
        sampling = SamplingParams(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_k,
            rollout.top_p,
            rollout.min_p,
            rollout.min_new_tokens,
        )
        if (problem := self._sampling_problem(sampling)) is not None:
            raise ConfigError([f"{self._name}: {problem}"])
        check_length(context, self._info.max_model_tokens)

    @property
    def _info(self) -> ServerInfo:
        assert self._session.info is not None, "started"
        return self._session.info

    @property
    def _stream(self) -> WeightStream | None:
        """Chosen again for every process: one that was restarted with other options may take weights in another way."""
        instance = self._info.instance
        with self._choosing:
            if instance != self._chosen_for:
                chosen, before = self._make_stream(), self._chosen
                if type(chosen) is not type(before):
                    self._chosen = chosen
                    self._replaced += [before] if before is not None else []
                self._chosen_for = instance
            return self._chosen

    # What it is

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def _media_problem(self) -> str:
        """Why a server of a vision model must not be given images; empty if it may."""
        return ""

    @property
    def capabilities(self) -> Capabilities:
        problem = self._media_problem
        modes: tuple[UpdateMode, ...] = ("interrupt", "drain")
        return replace(
            self.declared_capabilities,
            file_weights=self._stream is None,
            media=self._info.takes_media and self._model.processor is not None and not problem,
            media_problem=problem,
            dtype=self._info.dtype,
            memory_tags=ALL_TAGS if self._info.can_sleep else (),
            update_modes=(*modes, "in_flight") if self._info.labels_tokens else modes,
        )

    @property
    def limits(self) -> EngineLimits:
        longest = self._info.max_model_tokens
        return EngineLimits(self._model.vocab_size, longest, longest, self._config.engine.max_queue)

    def status(self) -> EngineStatus:
        session = self._session
        pause = {} if session.last_pause_s is None else {"last_update_pause_s": session.last_pause_s}
        return EngineStatus(
            version=session.weights.version,
            num_running=session.num_started,
            num_waiting=session.num_open - session.num_started,
            num_restarts=self._server.num_restarts,
            needs_weights=session.weights.is_needed and session.is_attached,
            is_paused=session.is_paused,
            is_asleep=bool(session.asleep),
            is_alive=not self._thread.is_closed and session.failure is None,
            is_reachable=session.is_attached,
            settings={
                self.program.lower(): self._info.version,
                "max_sequences": self._info.max_sequences,
                "url": self.url,
            },
            metrics={**session.measured, **pause},
        )

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The response to one request. Cancelling the caller ends the request."""
        self.check(request)
        if (whole := given_whole(request, self._model.end_tokens)) is not None:
            return whole

        def opened(deliver: Deliver) -> Any:
            return self._opened(OpenRequest(next(self._numbers), request, deliver))

        return await self._thread.answer(opened)

    async def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield new tokens as they arrive. After an update in flight, those whose version is known only at the end of
        the response arrive then."""
        self.check(request)
        if (whole := given_whole(request, self._model.end_tokens)) is not None:
            yield Delta.of(whole)
            return

        def opened(deliver: Deliver, take: Callable[[Delta], None]) -> Any:
            return self._opened(OpenRequest(next(self._numbers), request, deliver, take))

        async with aclosing(self._thread.follow(opened)) as deltas:
            async for delta in deltas:
                yield delta

    @contextmanager
    def _opened(self, opened: OpenRequest) -> Iterator[None]:
        """A request that the server works on within the block."""
        self._thread.enter(lambda: self._session.enter(opened))
        try:
            yield
        finally:
            if not opened.has_ended:
                self._thread.post(lambda: self._session.leave(opened))

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        check_features(request, self.capabilities if request.media else self.declared_capabilities)
        name, sampling, size = f"request {request.request_id}", request.sampling, self._model.vocab_size
        biased = (token for token, _ in sampling.logit_bias)
        tokens = (*request.input_tokens, *request.given_tokens, *sampling.stop_token_ids, *biased)
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"{name}: token id {wrong} is outside the vocabulary of {size}")
        num_tokens, longest = len(request.input_tokens) + sampling.max_new_tokens, self._info.max_model_tokens
        if num_tokens > longest:
            raise RequestError(
                f"{name}: {num_tokens} tokens exceed the limit of the server, {longest} tokens; shorten the prompt, "
                "lower max_new_tokens, or start the server for longer texts"
            )
        if (fault := wrong_stop(sampling.stop_strings)) is not None:
            raise RequestError(f"{name}: stop_strings{fault}")
        if (problem := self._sampling_problem(sampling)) is not None:
            raise RequestError(f"{name}: {problem}")

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. They return the tokens they have."""
        return self._do(self._session.abort(request_id), f"{self._name} aborts requests")

    # Control

    def pause(self) -> None:
        self._do(self._session.set_paused(True), f"{self._name} pauses")

    def resume(self) -> None:
        self._do(self._session.set_paused(False), f"{self._name} resumes")

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._check_sleeps()
        self._do(self._session.set_asleep(tags, True, ENGINE_CALL_LIMIT_S), f"{self._name} goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._check_sleeps()
        self._do(self._session.set_asleep(tags, False, ENGINE_CALL_LIMIT_S), f"{self._name} wakes up")

    def _check_sleeps(self) -> None:
        if not self._info.can_sleep:
            raise RolloutFailed(
                f"{self._name} cannot release its memory: it was started without the option for it, or its device has "
                "no such memory"
            )

    def get_version(self) -> int:
        return self._session.weights.version

    def set_version(self, version: int) -> None:
        self._do(self._session.set_version(version), f"{self._name} sets its version")

    def weights_checksum(self) -> str:
        raise WeightsError(f"{self.program} stores weights in its own layout, so they have no checksum")

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Send the weights. ``TransferLost`` if the server's process died; send them again then."""
        try:
            chosen = self._mode(mode)
            Receiver(self._model.skeleton, update.shapes, adapters_alone=update.adapters_alone)  # names and shapes
            return self._thread.submit(self._take, update, chosen)
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

    # On the sender's thread

    def _take(self, update: WeightUpdate, mode: UpdateMode) -> None:
        try:
            self._send(update, mode)
        except CancelledError as error:
            raise RolloutFailed("the engine is closed") from error
        finally:
            update.close()

    def _send(self, update: WeightUpdate, mode: UpdateMode) -> None:
        stream = self._stream
        while self._replaced:
            self._do(self._replaced.pop().end(), f"{self._name} ends a stream of weights")
        if stream is None:
            self._send_file(update, mode)
            return

        stream.prepare(update.shapes)

        async def load(link: ServerLink, label: str) -> None:
            if self._stream is not stream:
                raise TransferLost(f"{self._name}: a process that takes weights in another way has replaced the server")
            await stream.load(link, self._info, update, label, flush=mode != "in_flight")

        self._update(update.version, mode, load)

    def _send_file(self, update: WeightUpdate, mode: UpdateMode) -> None:
        """Write the weights to a file, which the server loads."""
        written = written_file(update, self._dtype, self._config.rollout.weight_folder)
        folder, keeps = str(written.path.parent), mode == "in_flight"

        def load(link: ServerLink, label: str) -> Coroutine[Any, Any, None]:
            return link.reload(folder, label, keeps_cache=keeps)

        self._load_files(written, update.version, mode, load, folder=folder)

    def _load_files(
        self,
        written: WeightFile,
        version: int,
        mode: UpdateMode,
        load: Callable[[Any, str], Any],
        *,
        folder: str,
        adapter_folder: str = "",
    ) -> None:
        """Let the server ``load`` what was written to these folders, and keep it for a process that replaces it."""
        weights = self._session.weights
        try:
            self._update(version, mode, load, folder=folder, adapter_folder=adapter_folder)
        except BaseException:
            if (weights.folder, weights.adapter_folder) == (folder, adapter_folder):
                self._keep(written)  # it was loaded before the error, so a server that restarts loads it again
            else:
                written.discard()
            raise
        self._keep(written)

    @property
    def _dtype(self) -> torch.dtype:
        """The number type in which the server takes weights."""
        return DTYPES[self._info.dtype]  # type: ignore[index]

    def _update(
        self,
        version: int,
        mode: UpdateMode,
        load: Callable[[Any, str], Any],
        *,
        folder: str = "",
        adapter_folder: str = "",
    ) -> None:
        limit_s = max(ENGINE_CALL_LIMIT_S, self._config.rollout.timeout_s)
        work = self._session.update(version, load, mode, limit_s=limit_s, folder=folder, adapter_folder=adapter_folder)
        self._do(work, f"{self._name} takes the weights of version {version}", limit_s=limit_s)

    def _keep(self, written: WeightFile) -> None:
        """Until the next version: a server that restarts loads the newest file."""
        if self._newest is not None:
            self._newest.discard()
        self._newest = written

    # The thread

    def close(self) -> None:
        """End every request with the tokens it has, and a server that was started here. Closing twice is allowed."""
        atexit.unregister(self.close)
        try:
            self._thread.close(self._end, f"{self._name} ends")
        finally:
            newest, self._newest = self._newest, None
            if newest is not None:
                newest.discard()
            self._resources.close()

    async def _end(self) -> None:
        for stream in (*self._replaced, self._chosen):
            if stream is not None:
                await stream.end()
        await self._session.end()
        await self._server.end()

    def _do(self, work: Coroutine[Any, Any, T], what: str, limit_s: float = ENGINE_CALL_LIMIT_S) -> T:
        try:
            return self._thread.do(work, what, limit_s)
        except LinkLost as error:
            raise ServerLost(f"{what}: {error}") from error


def _starter(context: BackendContext, devices: Sequence[str]) -> tuple[StartChild, bool]:
    """What starts the process of a server, and whether the learner uses its devices too."""
    if context.places:
        return context.places[0].start_child, context.places[0].shares_device
    return ChildServer.start, engine_device(devices[0], context.config.model.device)[1]
