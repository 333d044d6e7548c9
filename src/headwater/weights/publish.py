"""Publish a policy version to an engine and verify that it arrived."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from headwater.core.errors import TransferLost, WeightsError
from headwater.core.protocols import InferenceEngine, WeightSource, WeightUpdate
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.models.checksum import Checksum, dtype_of_checksum

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """The checksums of one published version."""

    serving: str
    """Of the weights in the engine's number type: those that generate."""
    trained: str
    """Of the weights in the number type in which they are trained."""


def publish(
    learner: WeightSource, engine: InferenceEngine, version: int, *, longest_response_s: float = 0.0
) -> Published:
    """Stream the learner's weights to the engine as ``version``, and return their checksums.

    Both sides compute a checksum when the engine generates again, and ``WeightsError`` is raised if they differ. The
    learner's comes from a second pass over its buckets: computed in the first one, it would lengthen the pause of the
    engine. Tokens of a damaged version are never trained on, because the error ends the run.

    The wait ends after ``ENGINE_CALL_LIMIT_S``, or after ``longest_response_s`` if that is longer, because running
    responses may have to end first. If the engine's process dies during the transfer, the weights are sent again to the
    process that replaces it.
    """
    while True:
        try:
            return _publish_once(learner, engine, version, longest_response_s)
        except TransferLost as error:
            # The engine limits how often it is restarted, and then fails with another error.
            logger.warning("policy version %d is sent again: %s", version, error)


def _publish_once(learner: WeightSource, engine: InferenceEngine, version: int, longest_response_s: float) -> Published:
    update = WeightUpdate(version, learner.shapes(), learner.export())
    done = engine.update_weights(update)
    try:
        wait_for_future(
            done,
            lambda: f"the engine takes the weights of version {version}",
            kind="weights",
            hard_limit_s=max(longest_response_s, ENGINE_CALL_LIMIT_S),
        )
    finally:
        if done.done():  # otherwise the engine's thread still reads
            update.close()
    published = _checksums(learner, dtype_of_checksum(engine.capabilities.dtype))
    if engine.capabilities.checksums and (serving := engine.weights_checksum()) != published.serving:
        raise WeightsError(
            f"policy version {version}: the engine serves weights with checksum {serving}, the learner's have "
            f"{published.serving}; they were damaged on the way or changed in the meantime: resume from the last "
            "checkpoint"
        )
    return published


def _checksums(learner: WeightSource, serving_dtype: torch.dtype) -> Published:
    serving, trained = Checksum(serving_dtype), Checksum()
    exported = WeightUpdate(0, learner.shapes(), learner.export())
    try:
        for bucket in exported.buckets:
            serving.add(bucket)
            trained.add(bucket)
    finally:
        exported.close()
    return Published(serving.text(), trained.text())
