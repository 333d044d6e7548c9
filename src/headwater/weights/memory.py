"""Publishing a policy version to an engine in the same process."""

from __future__ import annotations

from headwater.core.protocols import InferenceEngine, TrainEngine, WeightUpdate

_SWAP_LIMIT_S = 600.0


def publish(learner: TrainEngine, engine: InferenceEngine, version: int) -> None:
    """Pause the engine, hand it the learner's weights as ``version``, and resume it, whatever happens in between."""
    engine.pause()
    try:
        engine.update_weights(WeightUpdate(version, learner.export_weights())).result(_SWAP_LIMIT_S)
    finally:
        engine.resume()
