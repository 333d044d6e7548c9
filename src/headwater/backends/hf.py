"""Generation with transformers' ``generate``: the simplest engine, and the reference for the others.

Requests that arrive together are generated together. Headwater's sampler draws the tokens inside the generation loop.
The randomness of a request therefore does not depend on its neighbours, and the log-prob of every token is recorded
when it is drawn.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from headwater.backends import BACKENDS, BackendContext, check_lengths
from headwater.config.schema import EngineConfig
from headwater.config.traits import BackendTraits
from headwater.core.errors import QueueFull, RequestError, RolloutFailed, WeightsError, WeightsIncomplete
from headwater.core.protocols import (
    ALL_TAGS,
    Capabilities,
    EngineLimits,
    EngineStatus,
    MemoryTag,
    UpdateMode,
    WeightUpdate,
    check_features,
    whole_response,
)
from headwater.core.records import Alternatives, Delta, ModelRequest, ModelResponse, SamplingParams, wrong_stop
from headwater.core.waits import named_wait
from headwater.engine.delivery import in_thread
from headwater.engine.grammar import Grammars
from headwater.engine.guides import Guidance, Guide, alternatives
from headwater.engine.sampler import SamplingBatch, distribution, sample
from headwater.engine.stops import find_stop
from headwater.models.checksum import checksum, dtype_name
from headwater.models.load import end_token_ids, load_model, load_tokenizer
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


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Draws the next tokens with Headwater's sampler, and makes them the only tokens that ``generate`` can choose."""

    def __init__(self, batch: SamplingBatch, prompt_width: int, guides: Sequence[Guide]) -> None:
        self._batch = batch
        self._prompt_width = prompt_width
        """Excludes given tokens of the response: randomness depends on the position in the response."""
        self._guides = guides
        self.logprobs: list[Tensor] = []
        self.top: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._prompt_width
        logits = self._guided(input_ids, scores) if self._guides else scores
        tokens, logprobs = sample(logits, self._batch, torch.full_like(self._batch.keys, position))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def _guided(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for guide, tokens in zip(self._guides, input_ids[:, self._prompt_width :].tolist(), strict=True):
            guide.advance(tokens)
        guidance = Guidance.of(list(enumerate(self._guides)))
        logits = guidance.adjust(scores)
        if guidance.num_top:
            likely = distribution(logits, self._batch).topk(guidance.num_top, dim=-1)
            self.top.append((likely.indices.cpu(), likely.values.cpu()))
        return logits

    def alternatives(self, row: int, count: int) -> tuple[Alternatives, ...]:
        """Those of the first ``count`` tokens of a row."""
        if not self.top:
            return ()
        wanted = self._guides[row].request.sampling.num_top_logprobs
        return tuple(alternatives(tokens[row], logprobs[row], wanted) for tokens, logprobs in self.top[:count])


class _Abandoned(StoppingCriteria):  # type: ignore[misc]
    """Ends a ``generate`` call when no caller waits for its responses any more, as after Ctrl-C."""

    def __init__(self, batch: list[_Pending]) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        abandoned = all(pending.future.done() for pending in self._batch)
        return torch.full((input_ids.shape[0],), abandoned, device=input_ids.device)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Ends rows at their stop strings."""

    def __init__(self, engine: HfEngine, batch: list[_Pending], width: int) -> None:
        self._engine = engine
        self._batch = batch
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        outputs = input_ids[:, self._width :].tolist()
        ended = [
            self._engine.end_of(pending.request, output) is not None
            for pending, output in zip(self._batch, outputs, strict=True)
        ]
        return torch.tensor(ended, device=input_ids.device)


@BACKENDS.register(BackendTraits(engine_settings=("max_sequences", "max_queue")))
class HfEngine:
    """Batches concurrent requests into calls of ``model.generate`` on a separate thread."""

    declared_capabilities: ClassVar[Capabilities] = Capabilities(
        streaming=False, update_modes=("drain",), features=("logit_bias", "penalties", "grammar", "top_logprobs")
    )

    def __init__(
        self, model: Any, tokenizer: Any, *, max_batch_sequences: int, max_queue: int = 65536, spans: Spans
    ) -> None:
        text_config = model.config.get_text_config()
        num_positions = text_config.max_position_embeddings
        self.limits = EngineLimits(text_config.vocab_size, num_positions, num_positions, max_queue)
        self._model = model.eval()
        self._device = model.device
        self._tokenizer = tokenizer
        self._pad_token_id = tokenizer.pad_token_id
        self._end_token_ids = end_token_ids(model, tokenizer)
        self._grammars = Grammars(tokenizer, text_config.vocab_size, self._end_token_ids)
        # The model's generation settings, such as a repetition penalty, would change the distribution that is sampled.
        model.generation_config = GenerationConfig()
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
        )

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared_capabilities, dtype=dtype_name(self._model.parameters()))

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
        whole = self._given_whole(request)
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
            with self._updating():
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
        return in_thread(take)

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
        settings and the same number of given tokens."""

        def kind(pending: _Pending) -> tuple[SamplingParams, int]:
            return pending.request.sampling, len(pending.request.given_tokens)

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
        if request.sampling.grammar is not None:
            self._grammars.start(request.sampling.grammar)

    @torch.inference_mode()
    def _generate(self, batch: list[_Pending]) -> list[ModelResponse]:
        requests = [pending.request for pending in batch]
        params, num_given = requests[0].sampling, len(requests[0].given_tokens)
        stopping: list[StoppingCriteria] = [_Abandoned(batch)]
        started = time.perf_counter()
        with self._spans.span("generate"), self._weights_lock:
            version = self._version
            input_ids, attention_mask = self._pad(requests)
            width = input_ids.shape[1]
            settings = SamplingBatch.build(
                [request.sampling for request in requests], [request.rng_key for request in requests], input_ids.device
            )
            guides = [self._guide(request) for request in requests] if params.uses_guide else []
            draw = _Draw(settings, width - num_given, guides)
            if params.stop_strings:
                stopping.append(_Ended(self, batch, width))
            sequences = self._model.generate(
                input_ids,
                attention_mask=attention_mask,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList(stopping),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=params.max_new_tokens - num_given,
                min_new_tokens=max(0, params.min_new_tokens - num_given) or None,
                eos_token_id=list(self._stop_ids(params)) or None,
                pad_token_id=self._pad_token_id,
            )
            outputs = sequences[:, width:].tolist()
            logprobs = torch.stack(draw.logprobs, dim=1).tolist()
        elapsed = time.perf_counter() - started
        return [
            replace(response, output_top_logprobs=draw.alternatives(row, len(response.output_tokens)))
            for row, response in enumerate(
                self._respond(pending, outputs[row], logprobs[row], version, started - pending.arrived, elapsed)
                for row, pending in enumerate(batch)
            )
        ]

    def _guide(self, request: ModelRequest) -> Guide:
        grammar = request.sampling.grammar
        return Guide(request, None if grammar is None else self._grammars.start(grammar))

    def _pad(self, requests: list[ModelRequest]) -> tuple[Tensor, Tensor]:
        rows = [request.input_tokens + request.given_tokens for request in requests]
        width = max(map(len, rows))
        shape = (len(rows), width)
        input_ids = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            input_ids[row, width - len(tokens) :] = torch.tensor(tokens)
            attention_mask[row, width - len(tokens) :] = 1
        device = self._model.device
        return input_ids.to(device), attention_mask.to(device)

    def _respond(
        self,
        pending: _Pending,
        output: list[int],
        logprobs: list[float],
        version: int,
        queue_s: float,
        generate_s: float,
    ) -> ModelResponse:
        # generate pads a row after its end token; the end token belongs to the response.
        end = self.end_of(pending.request, output)
        count = end if end is not None else len(output)
        return ModelResponse(
            input_tokens=pending.request.input_tokens,
            output_tokens=tuple(output[:count]),
            output_logprobs=tuple(logprobs[:count]),
            output_versions=(version,) * count,
            stop_reason="length" if end is None else "stop",
            queue_s=queue_s,
            generate_s=generate_s,
        )

    def _given_whole(self, request: ModelRequest) -> ModelResponse | None:
        """The answer to a request whose given tokens are already a complete response."""
        given = request.given_tokens
        has_stopped = bool(given) and self.end_of(replace(request, given_tokens=given[:-1]), given[-1:]) is not None
        if has_stopped or len(given) >= request.sampling.max_new_tokens:
            return ModelResponse(request.input_tokens, (), (), (), "stop" if has_stopped else "length")
        return None

    def end_of(self, request: ModelRequest, output: Sequence[int]) -> int | None:
        """The number of tokens after the given ones at which the response stops; ``None`` if it does not stop."""
        params, num_given = request.sampling, len(request.given_tokens)
        first = min(max(0, params.min_new_tokens - num_given), len(output))
        stop_ids = self._stop_ids(params)
        ends = [place + 1 for place in range(first, len(output)) if output[place] in stop_ids][:1]
        if params.stop_strings:
            tokens = [*request.given_tokens, *output]
            found = find_stop(self._tokenizer, tokens, num_given + first, params.stop_strings)
            ends += [found - num_given] if found is not None else []
        return min(ends, default=None)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own_ends = () if params.ignore_end else self._end_token_ids
        return (*own_ends, *params.stop_token_ids)


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
