"""What an engine can do, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headwater.core.errors import RequestError
from headwater.core.requests import ModelRequest, SamplingFeature

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
    peft_alpha: float = 0.0
    """Such an engine takes updates as files in peft's format (``weights.adapter_files``), with this ``lora_alpha``. 0
    for one that takes adapters as it takes other weights."""
    media: bool = False
    """Requests may contain images, and videos unless ``videos`` is false."""
    media_problem: str = ""
    """Why requests may not contain images, and the remedy, if the model could read them."""
    videos: bool = True
    tools: bool = False
    """The engine parses tool calls and ends a response with ``tool_calls``."""
    streaming: bool = True
    """``astream`` yields tokens as they are generated. Otherwise it yields the complete response once."""
    rounds: bool = False
    """The engine is a ``RoundEngine``."""
    joint_start: bool = False
    """The engine is a ``JointEngine``."""
    memory_tags: tuple[MemoryTag, ...] = ALL_TAGS
    """What ``sleep`` can release."""
    discards_weights: bool = False
    """The engine is a ``DiscardingEngine``."""
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


def check_features(request: ModelRequest, capabilities: Capabilities) -> None:
    """Raise ``RequestError`` for settings that the engine does not have, and for media if it takes only text."""
    if request.media and capabilities.media_problem:
        raise RequestError(f"request {request.request_id}: has images or videos: {capabilities.media_problem}")
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
    needs_weights: bool = False
    """It generates nothing until the newest weights are sent to it."""


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
