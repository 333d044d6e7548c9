"""Publishing a policy version to an engine, and making sure that it arrived."""

from __future__ import annotations

from headwater.core.errors import WeightsError
from headwater.core.protocols import InferenceEngine, Learner, WeightUpdate
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.models.checksum import checksum, dtype_of_checksum


def publish(learner: Learner, engine: InferenceEngine, version: int, *, longest_response_s: float = 0.0) -> str:
    """Hand the learner's weights to the engine as ``version``; generation stops for no longer than the engine needs.

    Returns the checksum of the weights that serve then: the learner's, in the engine's number type, or else raises
    ``WeightsError``. They are compared when the engine runs again, so that generation does not stand still for it;
    tokens of a version that is not what it should be are never trained on, because the error ends the run.

    The wait for it ends after ``ENGINE_CALL_LIMIT_S``, or after ``longest_response_s`` where that is longer: responses
    may have to end first.
    """
    weights = [each for bucket in learner.export() for each in bucket]
    wait_for_future(
        engine.update_weights(WeightUpdate(version, weights)),
        lambda: f"the engine takes the weights of version {version}",
        kind="weights",
        hard_limit_s=max(longest_response_s, ENGINE_CALL_LIMIT_S),
    )
    serving = engine.weights_checksum()
    expected = checksum(weights, dtype_of_checksum(serving))
    if serving != expected:
        raise WeightsError(
            f"policy version {version}: the engine serves weights with checksum {serving}, the learner's have "
            f"{expected}; they were damaged on the way or changed meanwhile: resume from the last checkpoint"
        )
    return serving
