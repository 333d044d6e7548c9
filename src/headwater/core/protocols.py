"""The contracts between folders. Any class with these methods can be used."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from headwater.core.errors import RequestError, RolloutFailed
from headwater.core.records import Delta, ModelRequest, ModelResponse, Prompt, SamplingFeature, Score, StopReason

if TYPE_CHECKING:
    import torch

    from headwater.core.data_proto import DataProto
    from headwater.core.new_tokens import NewTokens
    from headwater.core.parcels import DirectSend, Parcel, SendOrder, SendReport


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

Role = Literal["policy", "critic"]
"""The models that a learner trains."""


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


MemoryTag = Literal["kv_cache", "weights"]
"""What an engine can release from its device while it sleeps."""

ALL_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")

UpdateMode = Literal["interrupt", "in_flight", "drain"]
"""What happens to running requests when the weights change."""

ALL_UPDATE_MODES: tuple[UpdateMode, ...] = ("interrupt", "in_flight", "drain")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. Callers read this before they rely on it."""

    per_token_versions: bool = True
    """Every token carries the policy version that produced it."""
    seeded_sampling: bool = True
    """``ModelRequest.rng_key`` alone decides the sampled tokens."""
    resumable: bool = True
    """``ModelRequest.given_tokens`` is supported."""
    checksums: bool = True
    """``weights_checksum`` covers every bit of the weights."""
    adapters: bool = False
    """The engine accepts LoRA adapters without the base weights."""
    media: bool = False
    """Requests may contain images, and videos unless ``videos`` is false."""
    videos: bool = True
    tools: bool = False
    """The engine parses tool calls and ends a response with ``tool_calls``."""
    streaming: bool = True
    """``astream`` yields tokens as they are generated. Otherwise it yields the complete response once."""
    rounds: bool = False
    """The engine is a ``RoundEngine``."""
    memory_tags: tuple[MemoryTag, ...] = ALL_TAGS
    """What ``sleep`` can release."""
    discards_weights: bool = False
    """The engine has ``discard_weights``: it releases its weights without a copy until the next update."""
    update_modes: tuple[UpdateMode, ...] = ALL_UPDATE_MODES
    """The modes that ``update_weights`` supports."""
    dtype: str = "float32"
    """The number type of the engine's weights, for example ``bfloat16``. Published weights are converted to it."""
    direct_weights: bool = False
    """The engine takes weights straight from the learner's ranks (``WeightUpdate.direct``)."""
    file_weights: bool = False
    """The engine reads weights from a file (``WeightUpdate.file``)."""
    features: tuple[SamplingFeature, ...] = ()
    """The settings of ``SamplingParams`` beyond the usual ones that requests may use (``SamplingParams.features``)."""


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


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server behind an engine that uses several."""

    name: str
    """Unique within the engine."""
    url: str = ""
    """Empty for an engine in this process."""
    version: int = 0
    """The policy version that it serves."""
    num_running: int = 0
    num_waiting: int = 0
    is_alive: bool = True
    """False while it cannot be reached or has failed."""
    num_restarts: int = 0
    state: str = "serving"
    """In words, for example ``serving``, ``draining`` or ``unreachable: connection refused``."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine at one moment."""

    version: int
    """The policy version of the current weights."""
    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    """How often the engine's process was replaced."""
    needs_weights: bool = False
    """The engine generates nothing until the current weights have been published to it again."""
    is_paused: bool = False
    is_asleep: bool = False
    """Some of the engine's memory is released, so it generates nothing until ``wake``."""
    is_alive: bool = True
    """False after the engine has failed or was closed; every request then fails."""
    is_reachable: bool = True
    """False while the engine's process or server does not answer, for example because it restarts. Requests wait."""
    servers: tuple[ServerStatus, ...] = ()
    """The servers of an engine that uses several (``backends/router``)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's settings, with automatic values resolved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further measurements; their names depend on the engine."""


def check_features(request: ModelRequest, capabilities: Capabilities) -> None:
    """Raise ``RequestError`` for settings that the engine does not have, and for media if it takes only text."""
    if request.media and not capabilities.media:
        raise RequestError(
            f"request {request.request_id}: has images or videos, and this engine takes only text; use a vision model "
            "and a backend that takes media, or remove them"
        )
    if not capabilities.videos and any(item.content.kind == "video" for item in request.media):
        raise RequestError(
            f"request {request.request_id}: has a video, and this engine takes only images; use the backend embedded"
        )
    missing = [name for name in request.sampling.features if name not in capabilities.features]
    if missing:
        raise RequestError(
            f"request {request.request_id}: this engine does not support {', '.join(missing)}; "
            "use the backend embedded, or remove these settings"
        )


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


async def whole_response(engine: EpisodeEngine, request: ModelRequest) -> AsyncGenerator[Delta, None]:
    """``astream`` for an engine without streaming: the complete response as one delta."""
    yield Delta.of(await engine.agenerate(request))


delta_listener: ContextVar[Callable[[Delta], None] | None] = ContextVar("headwater_delta_listener", default=None)
"""Receives the tokens of an episode's next reply as they are generated, if the engine can stream."""


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


EpisodeStage = Literal["pending", "generating", "calling_tools", "scoring", "working", "done", "failed"]
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
        self.begin_late: Callable[[], None] = lambda: None
        """Called by an episode that cannot send its first request soon, so that others do not wait for it."""

    def doing(self, what: str, stage: EpisodeStage = "working") -> AbstractContextManager[None]:
        """State what happens inside this block."""
        return _Doing(self, what, stage)

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


class _Doing:
    """An activity. A class, because thousands of short episodes enter several of these blocks each."""

    __slots__ = ("_activity", "_stage", "_state", "_what")

    def __init__(self, state: EpisodeState, what: str, stage: EpisodeStage) -> None:
        self._state = state
        self._what = what
        self._stage = stage

    def __enter__(self) -> None:
        self._activity = (self._stage, self._what, time.monotonic())
        self._state._open.append(self._activity)

    def __exit__(self, *_: object) -> None:
        state, stage = self._state, self._stage
        state._open.remove(self._activity)
        state.seconds[stage] = state.seconds.get(stage, 0.0) + time.monotonic() - self._activity[2]


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


class ScorableEpisode(Protocol):
    """What a reward manager sees of an episode. ``Episode`` and ``Answer`` both have it."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def text(self) -> str:
        """The model's last reply."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The whole conversation: the prompt's messages, the model's replies and the messages between them."""
        ...


class RewardManager(Protocol):
    """Scores an episode. Raises ``RewardFailed`` if it cannot; a failure is never turned into a number."""

    async def score(self, episode: ScorableEpisode) -> Score: ...


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One process of a learner."""

    rank: int
    host: str
    pid: int
    device: str
    peak_memory_bytes: int = 0
    """The most memory of the device that was ever allocated; on a CPU, the most memory of the process."""
    state: str = "idle"
    """In words, for example ``idle``, ``executes update for 12 s`` or ``ended: killed``."""
    last_call: str = ""
    """The last call that it has completed, and how long that took."""
    is_alive: bool = True
    """False after the process has ended."""


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """The state of a learner."""

    num_ranks: int
    device: str
    num_optimizer_steps: int
    """Optimiser steps of the policy."""
    learning_rate: float
    """The rate of the policy's next optimiser step."""
    memory_bytes: int
    """Memory of the device that is allocated, of the rank with the most; 0 on a CPU."""
    failure: str = ""
    """Why the learner cannot be used any more, such as a rank that has ended. Empty while it works."""
    ranks: tuple[RankStatus, ...] = ()


class SavedLater(Protocol):
    """The state of a learner at one moment."""

    def write(self) -> None:
        """Write it as ``Learner.save`` does, on any thread, and return when all files are there."""
        ...


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """What a profile records, and where it is written."""

    folder: Path
    """An absolute path."""
    name: str
    """The beginning of the files' names, such as ``step_000003``."""
    ranks: tuple[int, ...]
    """The ranks that are recorded."""
    memory: bool
    """Whether allocations are recorded too."""


class Learner(Protocol):
    """Holds the policy, the critic, the reference and the reward model, and trains the first two.

    One process (``learner.learner.LocalLearner``) or several (``cluster.group.LearnerGroup``). All calls take and
    return values that can be serialised.
    """

    def compute(self, batch: DataProto, what: Sequence[str]) -> dict[str, torch.Tensor]:
        """Columns for the rows of ``batch``.

        ``logprobs`` also gives ``entropy`` and ``sum_pi_squared``. ``reference_logprobs`` and ``values`` are
        ``[samples, response]``, and ``reward_model`` scores the column ``conversation``, ``[samples]``.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train the critic, then, after ``critic.num_warmup_steps``, the policy; returns ``critic/*`` and ``actor/*``.

        ``batch.meta_info["version"]`` is the number of steps the policy has been trained.
        """
        ...

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step of the warm start, which increases the likelihood of the batch's responses."""
        ...

    def keep_reference(self, folder: Path) -> None:
        """Make the present policy the reference, and save it in ``folder`` for a resumed run. Ends the warm start."""
        ...

    def export(self, role: Role = "policy") -> Iterator[Bucket]:
        """All weights in Hugging Face names, in buckets, with adapters merged. It must be drained or closed."""
        ...

    def shapes(self, role: Role = "policy") -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export`` yields."""
        ...

    def export_unmerged(self, adapters_alone: bool) -> Iterator[Bucket]:
        """LoRA adapters and the frozen weights, or ``adapters_alone``. It must be drained or closed."""
        ...

    def unmerged_shapes(self, adapters_alone: bool) -> Mapping[str, tuple[int, ...]]:
        """The names and shapes that ``export_unmerged`` yields."""
        ...

    @property
    def connected(self) -> SendOrder | None:
        """The group of engines that all ranks can send to; None before ``connect`` and after a failure."""
        ...

    def parcels(self) -> Sequence[Parcel]:
        """Every tensor that ``export`` yields, and which rank holds which part of it."""
        ...

    def connect(self, order: SendOrder) -> Sequence[SendReport]:
        """Join a group of engines on every rank (``weights.collective``). One report per rank."""
        ...

    def broadcast(self, order: SendOrder) -> Sequence[SendReport]:
        """Every rank sends its part of the policy to the engines. Nothing is gathered."""
        ...

    def checksum(self, role: Role = "policy") -> str:
        """A text that identifies the trained weights, adapters as they are. The number of ranks does not change it."""
        ...

    def save(self, folder: Path) -> None:
        """Write the state of training, and the policy as ``model/`` in the Hugging Face format."""
        ...

    def snapshot(self, folder: Path) -> SavedLater | None:
        """A copy of what ``save`` writes, to be written to ``folder`` while training continues; None if this learner
        can only ``save``. The folder exists. The copy is valid until the next one is taken."""
        ...

    def load(self, folder: Path) -> None: ...
    def profile(self, order: ProfileOrder | None) -> None:
        """Record what the learner computes, until the next call with None, which writes the files."""
        ...

    def prepare_offload(self) -> None:
        """Start to copy the weights to main memory, so that ``offload`` takes less time. They must not change before
        it, or the copy is made again."""
        ...

    def offload(self) -> None:
        """Move everything to main memory, to make room for a rollout on the same device."""
        ...

    def onload(self) -> None: ...
    def status(self) -> LearnerStatus: ...
    def close(self) -> None: ...
