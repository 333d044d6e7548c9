"""What workflows and backends outside the package are given or have to implement, in one place."""

from headwater.core.capabilities import ALL_TAGS, ALL_UPDATE_MODES, Capabilities, MemoryTag, UpdateMode
from headwater.core.engine import EngineLimits, EpisodeEngine, InferenceEngine
from headwater.core.engine_status import EngineStatus
from headwater.core.episode import EpisodeInput
from headwater.core.weights import WeightUpdate

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
