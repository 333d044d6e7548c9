"""What workflows and backends outside the package are given or have to implement, in one place."""

from headwater.core.engine import InferenceEngine
from headwater.core.episode import EpisodeInput

__all__ = ["EpisodeInput", "InferenceEngine"]
