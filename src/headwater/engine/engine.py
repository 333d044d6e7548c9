"""The embedded inference engine. It generates responses while its weights are updated.

    engine = Engine.load("tiny:qwen3", EngineConfig())
    [response] = engine.generate([ModelRequest("r1", (5, 6, 7), SamplingParams(max_new_tokens=8), rng_key=1)])

A separate thread runs the model (``loop``). Every method of ``Engine`` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from headwater.config.schema import EngineConfig
from headwater.core.capabilities import ALL_TAGS, ALL_UPDATE_MODES, Capabilities, EngineStatus, MemoryTag, UpdateMode
from headwater.core.errors import ConfigError, WeightsError, WeightsIncomplete
from headwater.core.interpreter import garbage_put_off, settle_garbage
from headwater.core.protocols import EngineLimits, RoundSink, WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingFeature
from headwater.core.waits import start_in_thread
from headwater.engine.delivery import Gathering, Mailboxes, failure_of, wait_for
from headwater.engine.grammar import Grammars
from headwater.engine.intake import EngineFollower, Intake, RequestLimits
from headwater.engine.kv_cache import KVCache, num_pages_for, page_tokens_for
from headwater.engine.loop import EngineLoop
from headwater.engine.media import MediaEncoder
from headwater.engine.media_reader import MediaReader
from headwater.engine.memory import DeviceMemory, ModelWeights, check_tags
from headwater.engine.model_spec import ModelSpec
from headwater.engine.pages import PagePool
from headwater.engine.rows import DecodeRows
from headwater.engine.runners import make_runner
from headwater.engine.scheduler import Scheduler
from headwater.engine.sequence import EngineSequence
from headwater.engine.tower import PackedTower, make_tower, num_copied_bytes
from headwater.models.checksum import dtype_name, dtype_of_checksum
from headwater.models.load import end_token_ids, load_model, load_processor, load_tokenizer
from headwater.models.memory_sizes import CACHE_BYTES, GPU_TOWER_BYTES
from headwater.models.virtual_memory import is_supported
from headwater.models.vision import VisionProcessor
from headwater.observe.spans import Spans
from headwater.weights.file import file_update
from headwater.weights.memory import Receiver

FEATURES: tuple[SamplingFeature, ...] = ("logit_bias", "penalties", "grammar", "top_logprobs", "prompt_logprobs")

_MAX_GPU_PREFILL_TOKENS = 65535
STREAM_PRIORITY = -1
"""Higher than that of a learner on the same device: a decode step consists of hundreds of small kernels, each of which
would otherwise wait until a large kernel of the learner has ended."""
_MAX_VERSION = 2**31 - 1
"""The version of a token is stored in 32 bits."""


@dataclass(frozen=True)
class EngineMetrics:
    """The state and the counters of an engine at one moment."""

    version: int
    is_paused: bool
    is_asleep: bool
    needs_weights: bool
    """An update failed midway; nothing is generated until a complete one succeeds."""
    num_waiting: int
    num_running: int
    num_finished: int
    num_aborted: int
    num_failed: int
    """Requests whose logits were NaN or infinite."""
    num_preempted: int
    num_interrupted: int
    num_weight_updates: int
    last_update_pause_s: float
    """How long generation was stopped for the last weight update."""
    kv_pages_total: int
    kv_pages_used: int
    num_tokens_generated: int
    num_tokens_prefilled: int
    num_tokens_cached: int
    """Prompt tokens that were found in the prefix cache instead of being computed."""
    tokens_per_s: float
    """Generated tokens per second over the last five seconds, or over the engine's lifetime if that is shorter."""


class Engine:
    """A model with its KV cache, its request queue and its thread."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        *,
        shares_device: bool = False,
        own_stream: bool = True,
        spans: Spans | None = None,
        processor: VisionProcessor | None = None,
    ) -> None:
        """``own_stream`` lets the engine compute on a GPU while other threads, such as a learner's, do so too.

        ``processor`` is that of a vision model. Without it, requests contain only text.
        """
        settle_garbage()
        spec = ModelSpec.of(model)
        if config.adapter_rank:
            _add_adapters(model, config, spec.device)
        on_gpu = spec.device.type == "cuda"
        if on_gpu and config.max_prefill_tokens > _MAX_GPU_PREFILL_TOKENS:
            raise ConfigError(
                [f"engine.max_prefill_tokens = {config.max_prefill_tokens}: at most {_MAX_GPU_PREFILL_TOKENS}"]
            )
        max_sequences = config.chosen_sequences(on_gpu=on_gpu)
        page_tokens = page_tokens_for(config, spec.device)
        max_prefill_tokens = config.chosen_prefill_tokens(on_gpu=on_gpu)
        num_pages = num_pages_for(
            spec,
            config,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            page_tokens=page_tokens,
            is_shared=shares_device,
            num_media_bytes=CACHE_BYTES + GPU_TOWER_BYTES + num_copied_bytes(model)
            if processor is not None and on_gpu
            else 0,
        )
        scheduler = Scheduler(
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            max_tokens_per_sequence=spec.max_positions,
            pool=PagePool(num_pages),
            page_tokens=page_tokens,
            prefix_cache=config.prefix_cache,
        )
        stream = None
        if on_gpu and own_stream:
            stream = torch.cuda.Stream(spec.device, priority=STREAM_PRIORITY)  # type: ignore[no-untyped-call]
        # On the engine's stream: memory that its thread replaces or frees must not be reused on another one before
        # queued work has read it.
        with torch.cuda.stream(stream):
            rows = DecodeRows(max_sequences, scheduler.lanes.page_table.shape[1], config.decode_steps, spec.device)
            keeps_addresses = config.keep_addresses and is_supported(spec.device)
            cache = KVCache(spec, num_pages, page_tokens, keeps_address=keeps_addresses)
        self._runner = make_runner(model.eval(), spec, cache, rows, deterministic=config.deterministic, stream=stream)
        self.config = replace(
            config,
            max_sequences=max_sequences,
            page_tokens=page_tokens,
            max_prefill_tokens=max_prefill_tokens,
            kv_cache_gib=config.kv_cache_gib or cache.num_bytes / 2**30,
        )
        """The given config, with the values that the engine chose filled in."""
        self.tokenizer = tokenizer
        self._model = model
        self._dtype = dtype_name(model.parameters())  # asked for in every update of the weights
        self._media: MediaReader | None = None
        if processor is not None:
            tower = make_tower(model, processor)
            self._media = MediaReader(
                processor,
                uses_grid=spec.uses_grid,
                max_positions=spec.max_positions,
                dtype=spec.dtype,
                as_levels=isinstance(tower, PackedTower),
            )
            self._runner.media = MediaEncoder(
                model, tower, self._media, CACHE_BYTES, deterministic=config.deterministic
            )
        self._mailboxes = Mailboxes()
        self._weights = ModelWeights(model)
        if keeps_addresses:
            self._weights.fix_addresses(self._runner.weight_views())
        self._num_updates = 0
        self._num_interrupted = 0
        self._last_pause_s = 0.0
        num_weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        end_ids = end_token_ids(model, tokenizer)
        limits = RequestLimits(spec.vocab_size, spec.max_positions, page_tokens, scheduler.pool.num_total)
        self.limits = EngineLimits(
            spec.vocab_size, spec.max_positions, limits.max_request_tokens, max_queue=config.max_queue
        )
        self._loop = EngineLoop(
            scheduler,
            self._runner,
            tokenizer,
            num_steps=config.decode_steps,
            overlap=config.overlap and on_gpu,
            max_scored_tokens=max_prefill_tokens,
            spans=spans or Spans(),
        )
        self._memory = DeviceMemory(self._loop, cache, self._weights, num_weight_bytes)
        grammars = Grammars(tokenizer, spec.vocab_size, end_ids)
        self._intake = Intake(
            self._loop,
            limits,
            grammars,
            max_queue=config.max_queue,
            end_token_ids=end_ids,
            media=self._media,
            model_name=model.config.name_or_path or model.config.model_type,
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
    ) -> Engine:
        """Load a model from a folder, a hub id, ``tiny:<preset>`` or ``smollm2``, by default with its own tokenizer."""
        model = load_model(model_path, dtype=dtype, device=device, seed=seed)
        processor = load_processor(model_path)
        return cls(model, tokenizer or load_tokenizer(model_path), config, processor=processor)

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate the response to one request. There is no time limit; cancelling the call ends the request."""
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        (leave,) = self.begin([request], [answer])
        try:
            return await answer
        finally:
            leave()

    def begin(
        self, requests: Sequence[ModelRequest], answers: Sequence[asyncio.Future[ModelResponse]]
    ) -> list[Callable[[], None]]:
        """Generate the responses to many requests, which enter the next batch together (``JointEngine``)."""
        return self._intake.begin(requests, answers, self._mailboxes.of_running_loop())

    async def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield new tokens as they are generated. Closing the generator early ends the request."""
        mailbox = self._mailboxes.of_running_loop()
        arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        def on_delta(delta: Delta) -> None:
            mailbox.post(arrived.put_nowait, delta)

        def on_end(_: int, ended: EngineSequence) -> None:
            if ended.error is not None:
                mailbox.post(arrived.put_nowait, failure_of(ended))

        entered = self._intake.enter([request], on_end, on_delta)
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.stop_reason is not None:
                    return
        finally:
            self._intake.leave(entered)

    def follow(self, sink: RoundSink) -> EngineFollower:
        """Requests whose new tokens are passed to ``sink`` together, once per round, on the running event loop."""
        return EngineFollower(self._intake, self._mailboxes.of_running_loop(), sink)

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Generate all responses, in order. Blocks until the last one has ended.

        An exception that ends the wait early, such as Ctrl-C, ends the requests too. Raises ``WaitTimeout`` if the
        engine computes nothing for ten minutes; time in which it is paused or asleep does not count. The wait is named
        (``core.waits``) and ends after one week in any case.
        """
        gathering = Gathering(len(requests))
        entered = self._intake.enter(requests, gathering.take)
        try:
            return gathering.wait(self._loop.progress)
        finally:
            self._intake.leave(entered)

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        self._intake.check(request)

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all requests if it is None. Return how many were ended.

        An aborted request returns the tokens it has, with stop reason ``abort``.
        """
        counts: list[int] = []

        def abort() -> None:
            counts.append(self._loop.abort(lambda each: request_id is None or each.request.request_id == request_id))

        self._call(abort, "aborting")
        return counts[0]

    # Control

    @property
    def is_alive(self) -> bool:
        """False after the engine has failed or was closed. Every request then fails."""
        return self._loop.is_alive

    @property
    def is_paused(self) -> bool:
        return self._loop.is_paused

    def pause(self) -> None:
        """Stop generating until ``resume``. Requests keep their caches, and new requests are queued."""
        self._call(lambda: self._set_paused(True), "pausing")

    def resume(self) -> None:
        self._call(lambda: self._set_paused(False), "resuming")

    def _set_paused(self, paused: bool) -> None:
        self._loop.is_paused = paused

    def get_version(self) -> int:
        return self._loop.scheduler.version

    def set_version(self, version: int) -> None:
        """Set the version of the current weights, for example after loading a checkpoint."""
        _check_version(version)
        self._call(lambda: self._loop.scheduler.weights_changed(version), "setting the version", keeps_order=True)

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Take new weights the way ``mode`` says (default: ``engine.update_mode``).

        ``interrupt``: running requests keep their tokens, and their keys and values are computed again under the new
        weights. ``in_flight``: running requests continue with the keys and values they have. ``drain``: running
        requests end first, even while the engine is paused; a drain of an engine that is asleep waits for ``wake``.

        Names and shapes are checked before this returns. The engine's thread then copies bucket after bucket between
        two decode steps. If the stream fails after a weight was changed, the error is ``WeightsIncomplete``, and the
        engine keeps its requests and generates nothing until an update succeeds.

        The tensors must not change until the future is done. This method does not raise: an update that is refused is a
        future that has failed.
        """
        try:
            return self._update_weights(update, mode or self.config.chosen_update_mode)
        except Exception as error:  # noqa: BLE001  every refusal is reported by the future
            refused: Future[None] = Future()
            refused.set_exception(error)
            return refused

    def _update_weights(self, update: WeightUpdate, mode: UpdateMode) -> Future[None]:
        if mode not in ALL_UPDATE_MODES:
            raise WeightsError(f"mode = {mode!r}: must be interrupt, in_flight or drain")
        _check_version(update.version)
        stream = self._runner.callers_stream()
        receiver = self._weights.receiver(update.shapes, adapters_alone=update.adapters_alone)
        swap = partial(self._swap, receiver, update, mode, stream)
        # An engine without weights cannot end what it runs. In order: an update that overtook one that waits for a
        # drain would be undone by it.
        return self._loop.call(swap, after_drain=mode == "drain" and not self._loop.needs_weights, keeps_order=True)

    def update_weights_from_file(self, path: str, version: int, mode: UpdateMode | None = None) -> Future[None]:
        """As ``update_weights``, from a safetensors file or a folder of them. Generation continues while it is checked.

        The file is read twice, so that wrong values are refused before a weight changes.
        """

        def update() -> None:
            with file_update(path, version, dtype_of_checksum(self.capabilities.dtype)) as stream:
                wait_for(self.update_weights(stream, mode), f"the weights of {path}")

        return start_in_thread(update, "headwater-weights")  # reading a large file does not hold up generation

    def _swap(self, receiver: Receiver, update: WeightUpdate, mode: UpdateMode, stream: Any) -> None:
        """Take an update. Its tensors are read on the caller's stream, so after the work that made them."""
        if self._memory.is_asleep("weights"):
            update.close()
            raise WeightsError("weight update refused: the engine's weights are asleep; wake(['weights']) first")
        started, loop = time.perf_counter(), self._loop
        with garbage_put_off():
            if mode == "interrupt" or (mode == "drain" and loop.needs_weights):
                self._num_interrupted += loop.scheduler.num_running
                loop.interrupt()
            try:
                self._memory.restore_discarded()
                with loop.runner.on_stream(stream):
                    self._weights.take(receiver, update)
            except WeightsIncomplete:
                loop.needs_weights = True
                raise
            loop.needs_weights = False
            loop.scheduler.weights_changed(update.version)
            loop.runner.forget_media()
        self._num_updates += 1
        self._last_pause_s = time.perf_counter() - started

    def weights_checksum(self) -> str:
        """The checksum of the weights in use, under their Hugging Face names (``models.checksum``)."""
        if self._loop.needs_weights:
            raise WeightsIncomplete("the engine holds parts of two versions; publish a complete one first")
        return self._weights.checksum()

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Release the memory of the KV cache, the weights (kept in main memory) or both. Requests keep their tokens."""
        check_tags(tags)
        self._call(lambda: self._memory.sleep(tags), "going to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        """Allocate the memory again. Generation continues when nothing is asleep any more.

        Raises ``MemoryRefused`` if there is not enough memory. The engine then stays asleep and can be woken later.
        """
        check_tags(tags)
        self._call(lambda: self._memory.wake(tags), "waking up")

    def discard_weights(self) -> None:
        """``DiscardingEngine``. Refused without ``Capabilities.discards_weights``."""
        self._call(self._memory.discard_weights, "discarding the weights")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            discards_weights=self._weights.keeps_addresses and self._weights.is_on_gpu,
            dtype=self._dtype,
            rounds=True,
            joint_start=True,
            adapters=self.config.adapter_rank > 0,
            media=self._media is not None,
            features=FEATURES,
        )

    def status(self) -> EngineStatus:
        metrics = self.metrics()
        settings = asdict(self.config) | {"update_mode": self.config.chosen_update_mode}
        if not self.config.memory_fraction:
            del settings["memory_fraction"]  # it was automatic; kv_cache_gib shows the result
        return EngineStatus(
            version=metrics.version,
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            needs_weights=metrics.needs_weights,
            is_paused=metrics.is_paused,
            is_asleep=metrics.is_asleep,
            is_alive=self.is_alive,
            settings=settings,
            metrics={**asdict(metrics), **self._loop.media_counts()},
        )

    def metrics(self) -> EngineMetrics:
        loop, scheduler = self._loop, self._loop.scheduler
        return EngineMetrics(
            version=scheduler.version,
            is_paused=loop.is_paused,
            is_asleep=loop.is_asleep,
            needs_weights=loop.needs_weights,
            num_waiting=scheduler.num_waiting + loop.num_unscored,
            num_running=scheduler.num_running,
            num_finished=loop.num_finished,
            num_aborted=loop.num_aborted,
            num_failed=loop.num_failed,
            num_preempted=scheduler.num_preempted,
            num_interrupted=self._num_interrupted,
            num_weight_updates=self._num_updates,
            last_update_pause_s=self._last_pause_s,
            kv_pages_total=scheduler.pool.num_total,
            kv_pages_used=scheduler.pool.num_used,
            num_tokens_generated=loop.throughput.total,
            num_tokens_prefilled=scheduler.num_prefilled_tokens,
            num_tokens_cached=scheduler.num_cached_tokens,
            tokens_per_s=loop.throughput.per_second(),
        )

    def close(self) -> None:
        """Abort every request and end the thread. Closing twice has no effect."""
        self._loop.close()
        if self._media is not None:
            self._media.close()

    def _call(self, action: Callable[[], object], name: str, *, keeps_order: bool = False) -> None:
        def run() -> None:
            action()

        wait_for(self._loop.call(run, keeps_order=keeps_order), name)


def _add_adapters(model: Any, config: EngineConfig, device: torch.device) -> None:
    from headwater.engine.adapters import add_adapters

    if config.deterministic and device.type == "cuda":
        raise ConfigError(
            [
                f"engine.adapter_rank = {config.adapter_rank}: on a GPU, engine.deterministic = true computes no "
                "adapters; use rollout.publish=full, or engine.deterministic=false"
            ]
        )
    add_adapters(model, rank=config.adapter_rank, alpha=config.adapter_alpha, targets=config.adapter_targets)


def _check_version(version: int) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= _MAX_VERSION:
        raise WeightsError(
            f"version = {version!r}: must be an int in 0..{_MAX_VERSION}; count the updates of the policy"
        )
