"""Shared by the engine's tests: tiny models, a reference to compare with, and an engine that runs step by step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from tiny import tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from headwater.config.schema import EngineConfig
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine
from headwater.engine.sequence import EngineSequence
from headwater.models.load import load_model

VOCABULARY = 512
END = 1
LIMIT_S = 240.0
"""A wait that takes longer than this hangs, even on a busy machine."""

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.18,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama3": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "linear": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2_window": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, **_LOCAL_AND_GLOBAL),
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=8),
    # Gemma scales its embeddings. With tied weights, a small random model would simply repeat its input.
    "gemma": lambda: GemmaConfig(**_SHAPE, tie_word_embeddings=False),
    "gemma3_text": lambda: Gemma3TextConfig(
        **_SHAPE, query_pre_attn_scalar=8, tie_word_embeddings=False, **_LOCAL_AND_GLOBAL
    ),
}
KINDS = (*_CONFIGS, "tiny:qwen3", "tiny:qwen2", "tiny:llama")


def build(config: Any, seed: int = 0) -> Any:
    """A model with random weights that depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases start as zeros and norms as ones, which would hide mistakes.
                if parameter.dim() == 1:
                    parameter += torch.randn_like(parameter) * 0.3
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    return model.eval()


def make_model(kind: str = "qwen3", seed: int = 0) -> Any:
    """A new model, because an engine changes the model it is given."""
    if kind.startswith("tiny:"):
        return load_model(kind, dtype="float32", device="cpu", seed=seed)
    return build(_CONFIGS[kind](), seed)


@lru_cache(maxsize=64)
def reference(kind: str = "qwen3", seed: int = 0) -> Any:
    """The same model, run by transformers. It must not be changed."""
    return make_model(kind, seed)


def weights(seed: int, version: int, kind: str = "qwen3") -> WeightUpdate:
    return WeightUpdate.of(version, reference(kind, seed).named_parameters())


def gib_of(model: Any, num_pages: int, page_tokens: int) -> float:
    """The ``engine.kv_cache_gib`` that gives exactly ``num_pages`` pages."""
    config = model.config
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return (num_pages + 0.5) * bytes_per_token * page_tokens / 2**30


@contextmanager
def running(model: Any = None, *, num_pages: int = 0, **settings: Any) -> Iterator[Engine]:
    """An engine for one test. ``num_pages`` limits the size of its cache."""
    model = model if model is not None else make_model()
    if num_pages:
        settings["kv_cache_gib"] = gib_of(model, num_pages, settings.setdefault("page_tokens", 4))
    engine = Engine(model, tokenizer(), EngineConfig(**settings))
    try:
        yield engine
    finally:
        engine.close()


def like_a_gpu(engine: Engine) -> Engine:
    """Make the CPU engine queue rounds ahead and pad its rows to buckets, as on a GPU."""
    capacity = engine._loop.scheduler.lanes.capacity

    def configure() -> None:
        engine._loop._depth = 1
        engine._runner.bucket_of = lambda num_rows: min(capacity, 1 << max(0, num_rows - 1).bit_length())

    engine._loop.call(configure).result(LIMIT_S)
    return engine


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt: random tokens, none of them special."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(6, VOCABULARY, (length,), generator=generator).tolist())


def request(prompt: Sequence[int], key: int = 0, name: str = "", **sampling: Any) -> ModelRequest:
    params = SamplingParams(**{"max_new_tokens": 12, "ignore_end": True, **sampling})
    return ModelRequest(name or f"{len(prompt)}/{key}", tuple(prompt), params, key)


def late_token(tokens: Sequence[int], start: int) -> tuple[int, int]:
    """A token that first occurs after ``start`` others, and how many tokens a response has that stops at it."""
    place = next(place for place in range(start, len(tokens)) if tokens[place] not in tokens[:place])
    return tokens[place], place + 1


def texts(responses: Sequence[ModelResponse]) -> list[tuple[int, ...]]:
    return [each.output_tokens for each in responses]


def bits(responses: Sequence[ModelResponse]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(each.output_tokens, each.output_logprobs) for each in responses]


def assert_same(actual: Sequence[ModelResponse], expected: Sequence[ModelResponse], tolerance: float = 1e-4) -> None:
    """Equal tokens and, within rounding, equal log-probs."""
    assert texts(actual) == texts(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=tolerance)


@torch.no_grad()
def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The logits after each of ``tokens``, ``[tokens, vocabulary]``, computed in one pass."""
    return model(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0].float().cpu()


def distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The log-probs that one token is sampled from, computed token by token from the definitions."""
    logprobs = (logits / (sampling.temperature or 1.0)).double().log_softmax(-1)
    if sampling.temperature == 0 or (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0):
        return logprobs
    probabilities, order = logprobs.exp().tolist(), logprobs.argsort(descending=True).tolist()
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass, share, nucleus = sum(probabilities[token] for token in kept), 0.0, []
    for token in kept:
        if share >= sampling.top_p:
            break
        nucleus.append(token)
        share += probabilities[token] / mass
    least = sampling.min_p * probabilities[order[0]]
    nucleus = [token for token in nucleus if probabilities[token] >= least] or order[:1]
    result = torch.full_like(logprobs, -torch.inf)
    result[nucleus] = logprobs[nucleus].log_softmax(-1)
    return result


def full_pass(model: Any, response: ModelResponse, sampling: SamplingParams) -> list[float]:
    """Log-probs of a response's tokens by one forward pass over the prompt and the whole response."""
    everything = (*response.input_tokens, *response.output_tokens)
    logits = logits_after(model, everything[:-1])[len(response.input_tokens) - 1 :]
    logits[: sampling.min_new_tokens, list(sampling.stop_token_ids)] = -torch.inf  # excluded up to the minimum length
    rows = zip(logits, response.output_tokens, strict=True)
    return [float(distribution(row, sampling)[token]) for row, token in rows]


def run(scenario: Any) -> Any:
    """Run a coroutine to its end, with a time limit."""
    return asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


async def collect(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


@dataclass
class Streamed:
    """A request that is being streamed: the deltas received so far."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(version for delta in self.deltas for version in delta.versions)

    def response(self, request: ModelRequest) -> ModelResponse:
        ends = [delta.stop_reason for delta in self.deltas if delta.stop_reason is not None]
        assert len(ends) == 1, f"{request.request_id} ended {len(ends)} times"
        assert self.deltas[-1].stop_reason is not None, "nothing comes after the end"
        return ModelResponse(request.input_tokens, self.tokens, self.logprobs, self.versions, ends[0])


class Stepped:
    """An engine that runs one turn of its loop at a time, so that a test controls what happens between rounds.

    with stepping(engine) as slow:
        answer = slow.submit(request)
        slow.turn(3)
        slow.call(engine.pause)
        slow.finish()
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = engine._loop
        self._wait = self._loop._wait_for_work
        self._free = False
        self._parked = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._events.run_forever, daemon=True)
        self._thread.start()
        self.streams: dict[int, Streamed] = {}
        self._loop._wait_for_work = self._take_turns  # type: ignore[method-assign]
        self._loop.call(lambda: None)
        self._await_parked()

    def _take_turns(self) -> bool:
        if self._free:
            return self._wait()
        self._parked.release()
        self._permits.acquire()
        return self._wait() if self._free else True

    def _await_parked(self) -> None:
        assert self._parked.acquire(timeout=LIMIT_S) or not self._loop.is_alive, "the engine's loop hangs"

    def turn(self, count: int = 1) -> None:
        """Process the inbox and run one round, ``count`` times."""
        for _ in range(count):
            if not self._loop.is_alive:
                return
            self._permits.release()
            deadline = time.monotonic() + LIMIT_S
            while not self._parked.acquire(timeout=0.2):
                if not self._loop._thread.is_alive():
                    return
                assert time.monotonic() < deadline, f"a turn of the engine's loop has not ended after {LIMIT_S:g} s"

    def call(self, action: Callable[[], Any]) -> Any:
        """Make a control call now; the loop runs it at the start of the next turn."""
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(action())
            except Exception as error:  # noqa: BLE001  the test wants to see it
                answer.set_exception(error)

        waiting = len(self._loop._inbox)
        threading.Thread(target=work, daemon=True).start()
        deadline = time.monotonic() + LIMIT_S
        while not answer.done() and len(self._loop._inbox) == waiting:
            assert time.monotonic() < deadline, "the control call was never made"
            time.sleep(0.0002)
        if not answer.done():
            self.turn()
        return answer.result(LIMIT_S)

    def await_media(self, num_requests: int) -> None:
        """Wait until the media of this number of requests have been read, so that the next turn starts all of them."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            waiting = [each for each in list(self._loop._inbox) if isinstance(each, EngineSequence)]
            read = [each for each in waiting if each.reading is not None and each.reading.is_done]
            if len(read) == num_requests:
                return
            assert time.monotonic() < deadline, f"the media of {len(read)} of {num_requests} requests were read"
            time.sleep(0.0002)

    def submit(self, request: ModelRequest) -> Future[ModelResponse]:
        return self._start(self.engine.agenerate(request))

    def stream(self, request: ModelRequest) -> tuple[Streamed, Future[ModelResponse]]:
        """The deltas as they arrive, and the complete response."""
        streamed = Streamed()

        async def follow() -> ModelResponse:
            async for delta in self.engine.astream(request):
                streamed.deltas.append(delta)
            return streamed.response(request)

        return streamed, self._start(follow())

    def _start(self, coroutine: Any) -> Future[Any]:
        started = asyncio.run_coroutine_threadsafe(coroutine, self._events)
        self.settle()
        return started

    def settle(self) -> None:
        """Wait until everything that the engine has delivered has arrived."""
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._events).result(LIMIT_S)

    def finish(self, max_turns: int = 3000) -> None:
        """Run turns until no request is open."""
        for _ in range(max_turns):
            if not self.engine._intake.num_open and not self._loop._inbox and not self._loop._awaiting_drain:
                self.turn(2)  # also reads rounds that were queued ahead
                self.settle()
                return
            self.turn()
        waiting = self.engine.metrics()
        pytest.fail(f"{self.engine._intake.num_open} requests have not ended after {max_turns} turns: {waiting}")

    def let_go(self) -> None:
        """Let the loop run freely from now on."""
        self._free = True
        self._permits.release()

    def close(self) -> None:
        self.let_go()
        self.engine.close()
        self.settle()
        self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join(LIMIT_S)
        self._events.close()


@contextmanager
def stepped(model: Any = None, *, gpu_like: bool = False, **settings: Any) -> Iterator[Stepped]:
    with running(model, **settings) as engine, stepping(like_a_gpu(engine) if gpu_like else engine) as slow:
        yield slow


@contextmanager
def stepping(engine: Engine) -> Iterator[Stepped]:
    """The engine step by step. A test that fails lets it run freely, so that it can be closed."""
    slow = Stepped(engine)
    try:
        yield slow
    finally:
        slow.close()


class Held:
    """Stops the engine's loop before its ``at``-th round of decoding, until ``go_on``. No request ends meanwhile."""

    def __init__(self, engine: Engine, at: int = 2) -> None:
        decode, self._num_left = engine._runner.decode, at
        self._is_held, self._may_go_on = threading.Event(), threading.Event()

        def held(*arguments: Any) -> Any:
            self._num_left -= 1
            if self._num_left == 0:
                self._is_held.set()
                assert self._may_go_on.wait(LIMIT_S), "the test has forgotten to call go_on"
            return decode(*arguments)

        engine._runner.decode = held  # type: ignore[method-assign]

    async def wait(self) -> None:
        assert await asyncio.to_thread(self._is_held.wait, LIMIT_S), "the engine does not generate"

    def go_on(self) -> None:
        self._may_go_on.set()


def assert_nothing_is_held(engine: Engine) -> None:
    """No request, row, lane or page is in use, and the page pool is consistent."""
    scheduler = engine._loop.scheduler
    metrics = engine.metrics()
    assert (metrics.num_waiting, metrics.num_running, metrics.kv_pages_used) == (0, 0, 0)
    assert engine._intake.num_open == 0
    assert scheduler.lanes.num_free == scheduler.lanes.capacity
    assert sorted(scheduler._rows._free) == list(range(scheduler.lanes.capacity))
    assert scheduler.num_rows == 0
    assert not scheduler._prompts._computing
    assert not scheduler._prompts._waiting.num_sequences
    assert (scheduler.pool._references == 0).all()
    assert not engine._runner.rows.alive.any()
