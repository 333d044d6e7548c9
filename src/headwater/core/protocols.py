"""The interfaces between engines, tokenizers, sources of weights and episodes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from headwater.core.capabilities import ALL_TAGS, ALL_UPDATE_MODES, Capabilities, EngineStatus, MemoryTag, UpdateMode
from headwater.core.errors import RolloutFailed
from headwater.core.records import Prompt
from headwater.core.requests import Delta, ModelRequest, ModelResponse, StopReason

if TYPE_CHECKING:
    import asyncio

    import torch

    from headwater.core.new_tokens import NewTokens
    from headwater.core.parcels import DirectSend

# Workflows and backends outside the package find here what they are given or have to implement.
__all__ = [
    "ALL_TAGS",
    "ALL_UPDATE_MODES",
    "Capabilities",
    "EngineLimits",
    "EngineStatus",
    "EpisodeEngine",
    "EpisodeInput",
    "InferenceEngine",
    "MemoryTag",
    "UpdateMode",
    "WeightUpdate",
]


class Tokenizer(Protocol):
    """What the framework asks of a tokenizer; transformers' tokenizers have all of it."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...


Bucket: TypeAlias = "Sequence[tuple[str, torch.Tensor]]"
"""Some named tensors of a model, in Hugging Face names: at most about 256 MiB, or one larger tensor alone."""


class WeightFile(Protocol):
    """A version that was written to a file once, for several engines (``weights.file``)."""

    @property
    def path(self) -> Path: ...
    def hold(self) -> WeightFile:
        """Keep the file until one more ``discard``."""
        ...

    def discard(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One policy version on its way to an engine, as a stream of buckets.

    An engine checks ``shapes`` before it changes a weight. It then iterates ``buckets`` once, on one thread. The
    tensors of a bucket are valid until the next bucket is requested.
    """

    version: int
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every tensor of the model, by name."""
    buckets: Iterable[Bucket]
    is_repeat: bool = False
    """The same weights were published as this version before. Only engines that do not have them need to take them."""
    direct: DirectSend | None = None
    """The learner, if its ranks can send the weights themselves. An engine then need not read ``buckets``."""
    file: WeightFile | None = None
    """Where the weights are already, for engines that read files (``Capabilities.file_weights``)."""
    adapters_alone: bool = False
    """Only the LoRA adapters, for an engine that has the other weights already (``Capabilities.adapters``)."""
    again: Callable[[], Iterator[Bucket]] | None = None
    """Exports the same buckets once more, for servers that take the weights one after another."""

    @classmethod
    def of(cls, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """An update of tensors that are all in memory already, as one bucket."""
        bucket = list(tensors)
        return cls(version, {name: tuple(tensor.shape) for name, tensor in bucket}, [bucket])

    def close(self) -> None:
        """End a stream that is not read to its end, so that its sender can release what it holds."""
        close = getattr(self.buckets, "close", None)
        if close is not None:
            close()


class WeightSource(Protocol):
    """What publishing needs from a learner."""

    def export(self) -> Iterator[Bucket]:
        """All weights of the policy, bucket by bucket; never the whole model in one list."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor that ``export`` yields, by name."""
        ...


class AdapterSource(WeightSource, Protocol):
    """What publishing adapters alone needs from a learner."""

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        """The adapters, named after their layers with ``.lora_A`` and ``.lora_B``, and before them all other weights
        unless ``adapters_alone``."""
        ...

    def unmerged_shapes(self, adapters_alone: bool) -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export_unmerged`` yields."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes that an engine checks requests against."""

    vocab_size: int
    """Token ids are in ``0..vocab_size - 1``."""
    max_model_tokens: int
    """The longest prompt and response together that the model supports."""
    max_request_tokens: int
    """As ``max_model_tokens``, but smaller if the KV cache holds less than that."""
    max_queue: int
    """The largest number of requests that may wait or run at the same time."""


class EpisodeEngine(Protocol):
    """What an episode sees of the engine."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse: ...


class InferenceEngine(EpisodeEngine, Protocol):
    """Generates responses, tags every token with the policy version that produced it, and takes new weights.

    ``pause`` stops generation and keeps every request; ``sleep`` also releases memory until ``wake``.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def limits(self) -> EngineLimits: ...
    def status(self) -> EngineStatus: ...
    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        ...

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        """Yield new tokens as they are generated. Closing the generator early ends the request.

        An engine that cannot stream returns ``whole_response(self, request)``.
        """
        ...

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all requests if it is None. Return how many were ended.

        An aborted request returns the tokens it has, with stop reason ``abort``.
        """
        ...

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Take new weights. Names and shapes are checked first; a mismatch leaves the old weights in place.

        A stream that fails after a weight was changed is ``WeightsIncomplete``: the engine keeps its requests and
        generates nothing until a later update succeeds.
        """
        ...

    def get_version(self) -> int: ...
    def set_version(self, version: int) -> None: ...
    def weights_checksum(self) -> str:
        """The checksum of the weights in use, as computed by ``models.checksum``."""
        ...

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None: ...
    def close(self) -> None: ...


delta_listener: ContextVar[Callable[[Delta], None] | None] = ContextVar("headwater_delta_listener", default=None)
"""Receives the tokens of an episode's next reply as they are generated, if the engine can stream."""


async def whole_response(engine: EpisodeEngine, request: ModelRequest) -> AsyncGenerator[Delta, None]:
    """``astream`` for an engine without streaming: the complete response as one delta."""
    yield Delta.of(await engine.agenerate(request))


async def generate_aloud(engine: EpisodeEngine, request: ModelRequest) -> ModelResponse:
    """``agenerate``, and pass new tokens to the ``delta_listener`` of the running task, if there is one."""
    listener, stream = delta_listener.get(), getattr(engine, "astream", None)
    if listener is None or stream is None:
        return await engine.agenerate(request)
    parts: list[Delta] = []
    began = first = time.monotonic()
    async with aclosing(stream(request)) as deltas:
        async for delta in deltas:
            first = first if parts else time.monotonic()
            parts.append(delta)
            listener(delta)
    if not parts or parts[-1].stop_reason is None:
        raise RolloutFailed(f"request {request.request_id}: the engine's stream has no end")
    return ModelResponse(
        request.input_tokens,
        tuple(token for part in parts for token in part.tokens),
        tuple(logprob for part in parts for logprob in part.logprobs),
        tuple(version for part in parts for version in part.versions),
        parts[-1].stop_reason,
        queue_s=first - began,
        generate_s=time.monotonic() - first,
    )


class JointEngine(Protocol):
    """An engine that takes many requests in one call, so that its next batch has all of them
    (``Capabilities.joint_start``)."""

    def begin(
        self, requests: Sequence[ModelRequest], answers: Sequence[asyncio.Future[ModelResponse]]
    ) -> list[Callable[[], None]]:
        """Start the requests in this order. Their answers arrive in futures of the running event loop.

        A request that is refused fails only its own future. Returns a function for each request that ends it early,
        for a caller that no longer waits.
        """
        ...


class DiscardingEngine(Protocol):
    """An engine whose weights can be released without a copy (``Capabilities.discards_weights``)."""

    def discard_weights(self) -> None:
        """Release the memory of the weights until ``update_weights`` brings all of them.

        Nothing is generated meanwhile (``EngineStatus.needs_weights``). Requests keep their tokens.
        """
        ...


class RoundSink(Protocol):
    """Takes what an engine generates for many requests. Called on one event loop.

    Every request ends with exactly one ``ended`` or ``failed``, also one that was left.
    """

    def take(self, new: NewTokens) -> None:
        """New tokens of some requests."""
        ...

    def ended(self, number: int, reason: StopReason) -> None: ...
    def failed(self, number: int, error: Exception) -> None: ...


class Follower(Protocol):
    """The requests of one ``RoundSink``, by its numbers."""

    def enter(self, number: int, request: ModelRequest) -> None:
        """Start a request. Raises as ``agenerate`` does for a request that is refused."""
        ...

    def leave(self, number: int) -> None:
        """The sink no longer wants this request. Tokens may still arrive until it has ended."""
        ...


class RoundEngine(Protocol):
    """An engine that can pass on the new tokens of many requests together (``Capabilities.rounds``)."""

    def follow(self, sink: RoundSink) -> Follower:
        """Called on the event loop that the sink belongs to."""
        ...


EpisodeStage = Literal[
    "pending", "generating", "calling_tools", "reading_media", "scoring", "working", "done", "failed"
]  # fmt: skip
"""``pending`` before an episode does anything; ``working`` while it does something that it has no name for."""


class EpisodeState:
    """What one episode is doing now. The status file and the doctor show it.

        with state.doing("calling search", "calling_tools"):
            result = await search(query)

    Several activities may be open at the same time; the newest is shown. Only the event loop's thread changes this
    object, and other threads may read it.
    """

    def __init__(self) -> None:
        self._rest: EpisodeStage = "pending"
        self._open: list[tuple[EpisodeStage, str, float]] = []
        """Each open activity, and when it began."""
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Time by kind of work: ``generating``, ``calling_tools`` and so on, and, once it has ended, ``total``."""
        self.begin_late: Callable[[], None] = is_not_awaited
        """Called by an episode that cannot send its first request soon, so that others do not wait for it."""

    def doing(self, what: str, stage: EpisodeStage = "working") -> EpisodeActivity:
        """State what happens inside this block."""
        return EpisodeActivity(self, what, stage)

    def rest(self, stage: EpisodeStage) -> None:
        """The stage while no activity is open."""
        self._rest = stage
        if stage == "done":
            self.seconds["total"] = time.monotonic() - self._began

    @property
    def stage(self) -> EpisodeStage:
        return self.now()[0]

    def now(self) -> tuple[EpisodeStage, str, float]:
        """The stage, the activity in words (empty if it has no name), and its seconds so far."""
        newest = self._open[-1:]  # a copy, because another thread may end the activity meanwhile
        if not newest:
            return self._rest, "", 0.0
        stage, what, began = newest[0]
        return stage, what, time.monotonic() - began


def is_not_awaited() -> None:
    """No other episode waits for this one."""


class EpisodeActivity:
    """What an episode does inside a block. A class without generators, because thousands of short episodes enter
    several of these blocks each."""

    __slots__ = ("_begun", "_stage", "_state", "_what")

    def __init__(self, state: EpisodeState, what: str, stage: EpisodeStage) -> None:
        self._state = state
        self._what = what
        self._stage: EpisodeStage = stage

    def __enter__(self) -> EpisodeActivity:
        self._begun = self._stage, self._what, time.monotonic()
        self._state._open.append(self._begun)
        return self

    def __exit__(self, *_: object) -> None:
        state, stage = self._state, self._stage
        state._open.remove(self._begun)
        state.seconds[stage] = state.seconds.get(stage, 0.0) + time.monotonic() - self._begun[2]

    def becomes(self, what: str, stage: EpisodeStage) -> None:
        """From now on, the block does something else."""
        self.__exit__()
        self._what, self._stage = what, stage
        self.__enter__()


@dataclass(frozen=True, slots=True)
class EpisodeInput:
    """One episode to run."""

    prompt: Prompt
    sample: int
    """Number of the episode within its group."""
    rng_key: int
    """All randomness of the episode is derived from this key."""
    state: EpisodeState = field(default_factory=EpisodeState, compare=False, repr=False)
    """What the episode is doing, for the doctor."""
