"""Publish a policy version to an engine and verify that it arrived."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headwater.core.errors import TransferLost, WeightsError
from headwater.core.protocols import Bucket, InferenceEngine, WeightSource, WeightUpdate
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

    Both sides compute a checksum, the sender while the weights pass. Raises ``WeightsError`` if they differ. The engine
    computes its own after it has resumed generation. Tokens of a damaged version are never trained on, because the
    error ends the run.

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
    trained, sent = Checksum(), Checksum(dtype_of_checksum(engine.capabilities.dtype))
    exported = learner.export()
    update = WeightUpdate(version, learner.shapes(), _summed(exported, trained, sent))
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
            WeightUpdate(version, {}, exported).close()  # also if it was never read
    published = Published(sent.text(), trained.text())
    if engine.capabilities.checksums and (serving := engine.weights_checksum()) != published.serving:
        raise WeightsError(
            f"policy version {version}: the engine serves weights with checksum {serving}, the learner's have "
            f"{published.serving}; they were damaged on the way or changed in the meantime: resume from the last "
            "checkpoint"
        )
    return published


def _summed(buckets: Iterable[Bucket], *checksums: Checksum) -> Iterator[Bucket]:
    for bucket in buckets:
        for each in checksums:
            each.add(bucket)
        yield bucket
