"""Generation with transformers' ``generate``: the simplest engine, and the reference for the others.

Requests that arrive together are generated together (``hf_generator.py``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from headwater.backends import BACKENDS, BackendContext, check_lengths
from headwater.backends.hf_generator import HfGenerator
from headwater.config.schema import EngineConfig
from headwater.config.traits import BackendTraits
from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus, MemoryTag, UpdateMode, check_features
from headwater.core.errors import QueueFull, RequestError, RolloutFailed, WeightsError, WeightsIncomplete
from headwater.core.protocols import EngineLimits, WeightUpdate, whole_response
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams, wrong_stop
from headwater.core.waits import named_wait, start_in_thread
from headwater.engine.media_reader import MediaReader, refuse_media
from headwater.models.checksum import checksum, dtype_name
from headwater.models.load import load_model, load_processor, load_tokenizer
from headwater.models.vision import VisionProcessor, uses_grid_positions
from headwater.observe.spans import Spans
from headwater.weights.memory import Receiver

_GATHER_S = 0.002
_POLL_S = 0.01
_PAUSE_LIMIT_S = 600.0
_MAX_SEQUENCES = 256


@dataclass(eq=False)
class _Pending:
    request: ModelRequest
    future: asyncio.Future[ModelResponse]
    arrived: float


@BACKENDS.register(BackendTraits(engine_settings=("max_sequences", "max_queue")))
class HfEngine:
    """Batches concurrent requests into calls of ``model.generate`` on a separate thread."""

    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        streaming=False,
        media=True,
        update_modes=("drain",),
        features=("logit_bias", "penalties", "grammar", "top_logprobs"),
    )

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch_sequences: int,
        max_queue: int = 65536,
        spans: Spans,
        processor: VisionProcessor | None = None,
    ) -> None:
        """``processor`` is that of a vision model. Without it, requests contain only text."""
        text_config = model.config.get_text_config()
        num_positions = text_config.max_position_embeddings
        self.limits = EngineLimits(text_config.vocab_size, num_positions, num_positions, max_queue)
        self._model = model.eval()
        self._device = model.device
        self._media: MediaReader | None = None
        if processor is not None:
            self._media = MediaReader(
                processor, uses_grid=uses_grid_positions(model.config), max_positions=num_positions
            )
        self._generator = HfGenerator(model, tokenizer, None if self._media is None else self._media.processor)
        self._max_batch_sequences = max_batch_sequences
        self._spans = spans
        self._version = 0
        self._pending: list[_Pending] = []
        self._open: list[_Pending] = []
        """The requests that wait or run."""
        self._open_lock = threading.Lock()
        self._num_running = 0
        self._is_asleep = False
        self._is_closed = False
        self._batcher: asyncio.Task[None] | None = None
        self._is_paused = False
        self._needs_weights = False
        self._num_updating = 0
        self._counting = threading.Lock()
        # Held while weights are read by a generate call or written by an update, so that no response mixes versions.
        self._weights_lock = threading.Lock()
        # Held while weights change: a checksum need not wait for a generate call, which only reads them too.
        self._change_lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")

    @classmethod
    def from_context(cls, context: BackendContext) -> HfEngine:
        config = context.config
        model = load_model(
            context.model_path, dtype=config.model.dtype, device=config.model.device, seed=config.run.seed
        )
        check_lengths(context, model)
        return cls(
            model,
            context.tokenizer,
            max_batch_sequences=config.engine.max_sequences or _MAX_SEQUENCES,
            max_queue=config.engine.max_queue,
            spans=context.spans,
            processor=load_processor(context.model_path),
        )

    @classmethod
    def load(
        cls,
        model_path: str,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
    ) -> HfEngine:
        """An engine for a folder, a hub id, ``tiny:<preset>`` or ``smollm2``, by default with its own tokenizer."""
        return cls(
            load_model(model_path, dtype=dtype, device=device, seed=seed),
            tokenizer or load_tokenizer(model_path),
            max_batch_sequences=config.max_sequences or _MAX_SEQUENCES,
            max_queue=config.max_queue,
            spans=Spans(),
            processor=load_processor(model_path),
        )

    @property
    def capabilities(self) -> Capabilities:
        dtype = dtype_name(self._model.parameters())
        return replace(self.declared_capabilities, dtype=dtype, media=self._media is not None)

    def status(self) -> EngineStatus:
        with self._open_lock:
            num_open, num_running = len(self._open), self._num_running
        return EngineStatus(
            version=self._version,
            num_running=num_running,
            num_waiting=max(0, num_open - num_running),
            needs_weights=self._needs_weights,
            is_paused=self._is_paused,
            is_asleep=self._is_asleep,
            is_alive=not self._is_closed,
            settings={"max_sequences": self._max_batch_sequences, "max_queue": self.limits.max_queue},
        )

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.check(request)
        if self._media is not None and request.media:
            await asyncio.to_thread(self._media.read, request)
        whole = self._generator.given_whole(request)
        if whole is not None:
            return whole
        future: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        pending = _Pending(request, future, time.perf_counter())
        with self._open_lock:
            if len(self._open) >= self.limits.max_queue:
                raise QueueFull(
                    f"request {request.request_id}: {len(self._open)} requests wait or run already and "
                    f"engine.max_queue is {self.limits.max_queue}; retry later, or raise the limit"
                )
            self._open.append(pending)
        self._pending.append(pending)
        if self._batcher is None or self._batcher.done():
            self._batcher = asyncio.ensure_future(self._serve_pending())
        try:
            return await future
        finally:
            with self._open_lock:
                self._open.remove(pending)

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield the complete response once: ``generate`` does not report tokens while it runs."""
        return whole_response(self, request)

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. Their responses are empty: no token has left ``generate`` yet."""
        with self._open_lock:
            wanted = [each for each in self._open if request_id in (None, each.request.request_id)]
            for pending in wanted:
                pending.future.get_loop().call_soon_threadsafe(_abort, pending)
        return len(wanted)

    def pause(self) -> None:
        """Start no further batch. The batch being generated is finished."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Take new weights when the batch being generated has ended, which is what ``drain`` means."""

        def take() -> None:
            on_gpu = self._model.device.type == "cuda"
            # NCCL receives on the current GPU of the thread that reads the buckets.
            with torch.cuda.device(self._model.device) if on_gpu else nullcontext(), self._updating():
                try:
                    receiver.take_all(update)
                except WeightsIncomplete:
                    self._needs_weights = True
                    raise
                self._needs_weights = False
                self._version = update.version

        try:
            if mode not in (None, "drain"):
                raise WeightsError(f"mode = {mode}: the hf engine only supports drain")
            receiver = Receiver(self._model, update.shapes)
        except WeightsError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused
        return start_in_thread(take, "headwater-weights")

    @contextmanager
    def _updating(self) -> Iterator[None]:
        with self._counting:
            self._num_updating += 1  # otherwise one batch after the other could take the lock first
        try:
            with self._weights_lock, self._change_lock:
                yield
        finally:
            with self._counting:
                self._num_updating -= 1

    def get_version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    def weights_checksum(self) -> str:
        if self._needs_weights:
            raise WeightsIncomplete("the engine holds parts of two versions; publish a complete one first")
        with self._change_lock:
            return checksum(self._model.named_parameters())

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Start no further batch; with the tag ``weights`` the model moves to the CPU. No KV cache outlives a batch."""
        self.pause()
        self._is_asleep = True
        if "weights" in tags:
            with self._weights_lock, self._change_lock:
                self._model.to("cpu")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        if "weights" in tags:
            with self._weights_lock, self._change_lock:
                self._model.to(self._device)
        self._is_asleep = False
        self.resume()

    def close(self) -> None:
        self._is_closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self._media is not None:
            self._media.close()

    async def _serve_pending(self) -> None:
        # Episodes that start together send their requests within a moment; a short pause lets them share a batch.
        await asyncio.sleep(_GATHER_S)
        while self._pending:
            batch: list[_Pending] = []
            try:
                await self._until_running()
                batch = self._next_batch()
                if batch:
                    loop = asyncio.get_running_loop()
                    self._num_running = len(batch)
                    responses = await loop.run_in_executor(self._executor, self._generate, batch)
                    _answer(batch, responses)
            except Exception as error:  # noqa: BLE001  the error belongs to the requests that waited
                waiting = batch or self._pending
                _fail(waiting, error)
                self._pending = [each for each in self._pending if not each.future.done()]
            finally:
                self._num_running = 0

    async def _until_running(self) -> None:
        async def poll() -> None:
            while self._is_stopped():  # noqa: ASYNC110  resume() may be called from any thread
                await asyncio.sleep(_POLL_S)

        if self._is_stopped():
            waiting = len(self._pending)
            why = "to receive complete weights" if self._needs_weights else "to resume"
            await named_wait(
                poll(),
                lambda: f"{waiting} requests wait for the hf engine {why}",
                kind="engine_call",
                hard_limit_s=_PAUSE_LIMIT_S,
            )

    def _is_stopped(self) -> bool:
        return self._is_paused or self._needs_weights or self._num_updating > 0

    def _next_batch(self) -> list[_Pending]:
        """The oldest request, and all others that one ``generate`` call can serve with it: those with the same sampling
        settings, the same number of given tokens and the same pictures."""

        def kind(pending: _Pending) -> tuple[SamplingParams, int, tuple[str, ...]]:
            request = pending.request
            return request.sampling, len(request.given_tokens), tuple(each.content.digest for each in request.media)

        first = kind(self._pending[0])
        batch = [each for each in self._pending if kind(each) == first][: self._max_batch_sequences]
        taken = set(map(id, batch))
        self._pending = [each for each in self._pending if id(each) not in taken]
        # A cancelled caller no longer waits for its response.
        return [each for each in batch if not each.future.done()]

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        limits, name = self.limits, f"request {request.request_id}"
        tokens = (*request.input_tokens, *request.given_tokens, *request.sampling.stop_token_ids)
        wrong = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{name}: token id {wrong} is outside the vocabulary of {limits.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        num_prompt, num_new = len(request.input_tokens), request.sampling.max_new_tokens
        if num_prompt + num_new > limits.max_model_tokens:
            raise RequestError(
                f"{name}: {num_prompt} prompt tokens + {num_new} new tokens exceed the model's "
                f"{limits.max_model_tokens} positions; lower data.max_prompt_tokens or rollout.max_new_tokens"
            )
        if (fault := wrong_stop(request.sampling.stop_strings)) is not None:
            raise RequestError(f"{name}: stop_strings{fault}")
        check_features(request, self.declared_capabilities)
        if any(not 0 <= token < limits.vocab_size for token, _ in request.sampling.logit_bias):
            raise RequestError(f"{name}: logit_bias: a token id is outside the vocabulary of {limits.vocab_size}")
        if request.media:
            if self._media is None:
                refuse_media(request, self._model.config.name_or_path or self._model.config.model_type)
            self._media.check(request)
            self._generator.check_placeholders(request)
        if request.sampling.grammar is not None:
            self._generator.grammars.start(request.sampling.grammar)

    def _generate(self, batch: list[_Pending]) -> list[ModelResponse]:
        started = time.perf_counter()
        with self._spans.span("generate"), self._weights_lock:
            responses = self._generator.generate(
                [pending.request for pending in batch],
                self._version,
                lambda: all(pending.future.done() for pending in batch),
            )
        elapsed = time.perf_counter() - started
        return [
            replace(response, queue_s=started - pending.arrived, generate_s=elapsed)
            for pending, response in zip(batch, responses, strict=True)
        ]


def _answer(batch: list[_Pending], responses: list[ModelResponse]) -> None:
    for pending, response in zip(batch, responses, strict=True):
        if not pending.future.done():
            pending.future.set_result(response)


def _abort(pending: _Pending) -> None:
    if not pending.future.done():
        pending.future.set_result(ModelResponse(pending.request.input_tokens, (), (), (), "abort"))


def _fail(batch: list[_Pending], error: Exception) -> None:
    for pending in batch:
        if not pending.future.done():
            failure = RolloutFailed(f"hf engine failed on {len(batch)} sequences: {type(error).__name__}: {error}")
            failure.__cause__ = error
            pending.future.set_exception(failure)
