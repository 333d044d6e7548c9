"""Publish a policy version to an engine and verify that it arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from headwater.core.errors import RolloutFailed, TransferLost, WeightsError
from headwater.core.parcels import DirectSend, RankedSource
from headwater.core.protocols import AdapterSource, Bucket, InferenceEngine, WeightSource, WeightUpdate
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.models.checksum import Checksum, Sums, dtype_of_checksum

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_LOST = 8
"""Attempts to send one version. An engine that is a child of this process gives up earlier, with its output."""


@dataclass(frozen=True)
class Published:
    """One published version: its checksums, and what sending it took."""

    serving: str
    """Checksum of the weights in the engine's number type: those that generate."""
    trained: str
    """Checksum of the weights in the number type in which they are trained."""
    num_bytes: int = 0
    """Sent to each engine, after conversion and encoding."""
    seconds: float = 0.0
    """Until the engine used the weights. The comparison of checksums comes afterwards."""
    pause_s: float | None = None
    """How long the engine did not generate, if it tells."""

    def metrics(self) -> dict[str, float]:
        """What was sent, in what time and how fast, and, if known, how long the engine paused."""
        rate = self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0
        values = {
            "weights/bytes": float(self.num_bytes),
            "time/weights_s": self.seconds,
            "throughput/weights_gb_per_s": rate,
        }
        if self.pause_s is not None:
            values["time/weights_pause_s"] = self.pause_s
        return values


@dataclass(frozen=True)
class Sent:
    """A version that the engine uses already, and whose checksums have not been compared yet."""

    compare: Callable[[], Published]
    """Wait for the checksums of both sides, and raise ``WeightsError`` if they differ. Call it before the engine gets
    other weights. Any thread may do so: the learner's device counts its weights before it changes them."""
    num_bytes: int = 0
    seconds: float = 0.0
    pause_s: float | None = None
    """As in ``Published``."""

    def metrics(self) -> dict[str, float]:
        return Published("", "", self.num_bytes, self.seconds, self.pause_s).metrics()


class AdaptersAlone:
    """Publishing LoRA adapters without the frozen weights (``rollout.publish=adapter``).

    The first update has all weights, unmerged. Later ones have only the adapters. The checksums still cover all
    weights, because the sums of the frozen ones are kept.
    """

    def __init__(self) -> None:
        self._base: tuple[Sums, Sums] | None = None
        """The sums of the frozen weights that the engine has, in its number type and in the learner's."""

    def update(self, learner: AdapterSource, version: int, checksums: StreamChecksums, is_repeat: bool) -> WeightUpdate:
        alone = self._base is not None and not is_repeat  # repeated for servers that have lost their weights

        def export() -> Iterator[Bucket]:
            return checksums.watch(learner.export_unmerged(alone))

        direct = DirectSend(learner, "adapters" if alone else "unmerged") if isinstance(learner, RankedSource) else None
        shapes = learner.unmerged_shapes(alone)
        return WeightUpdate(version, shapes, export(), is_repeat, direct, adapters_alone=alone, again=export)

    def texts(self, serving: Sums, trained: Sums) -> tuple[str, str]:
        """The checksums of all weights, after an update of all or of the adapters, from what was sent."""
        if self._base is None:
            self._base = _frozen(serving), _frozen(trained)
        whole = [Checksum.merged([base | sums]) for base, sums in zip(self._base, (serving, trained), strict=True)]
        return whole[0].text(), whole[1].text()

    def forget(self) -> None:
        """The engine may have lost its weights: the next update has all of them."""
        self._base = None


def _frozen(sums: Sums) -> Sums:
    return {header: chunks for header, chunks in sums.items() if ".lora_" not in header}


def publish(
    learner: WeightSource,
    engine: InferenceEngine,
    version: int,
    *,
    longest_response_s: float = 0.0,
    num_turns: int = 1,
    is_repeat: bool = False,
    adapters: AdaptersAlone | None = None,
) -> Published:
    """Stream the learner's weights to the engine as ``version``, and return their checksums.

    The learner's checksums are computed from the buckets as they are sent, the engine's when it generates again, and
    ``WeightsError`` is raised if they differ. Tokens of a damaged version are never trained on, because the error ends
    the run.

    The wait ends after ``ENGINE_CALL_LIMIT_S``, or after ``longest_response_s`` if that is longer, because running
    responses may have to end first. ``num_turns`` is the number of servers that take the weights one after another,
    and each of them has this time. If the engine's process dies during the transfer, the weights are sent again to the
    process that replaces it. With ``is_repeat``, the same weights were published before, and only servers that do not
    have them need them. ``adapters`` is given if only LoRA adapters are sent.
    """
    limit_s = max(longest_response_s, ENGINE_CALL_LIMIT_S) * num_turns
    return _repeated(
        lambda: _send_once(learner, engine, version, limit_s, is_repeat, adapters).compare(), version, adapters
    )


def send(learner: WeightSource, engine: InferenceEngine, version: int, *, longest_response_s: float = 0.0) -> Sent:
    """Like ``publish``, but return as soon as the engine uses the weights. For an engine in this process, whose weights
    nothing else changes."""
    limit_s = max(longest_response_s, ENGINE_CALL_LIMIT_S)
    return _repeated(lambda: _send_once(learner, engine, version, limit_s, False, None), version, None)


def _repeated(attempt: Callable[[], T], version: int, adapters: AdaptersAlone | None) -> T:
    for num_lost in range(1, _MAX_LOST + 1):
        try:
            return attempt()
        except TransferLost as error:
            if adapters is not None:
                adapters.forget()
            if num_lost == _MAX_LOST:
                raise RolloutFailed(
                    f"policy version {version} was sent {num_lost} times and lost each time; look at the output of the "
                    f"servers. The last time: {error}"
                ) from error
            logger.warning("policy version %d is sent again: %s", version, error)
    raise AssertionError("unreachable")


def _send_once(
    learner: WeightSource,
    engine: InferenceEngine,
    version: int,
    limit_s: float,
    is_repeat: bool,
    adapters: AdaptersAlone | None,
) -> Sent:
    checksums = StreamChecksums(dtype_of_checksum(engine.capabilities.dtype))
    if adapters is not None:
        update = adapters.update(cast(AdapterSource, learner), version, checksums, is_repeat)
    else:
        direct = DirectSend(learner) if isinstance(learner, RankedSource) else None

        def export() -> Iterator[Bucket]:
            return checksums.watch(learner.export())

        update = WeightUpdate(version, learner.shapes(), export(), is_repeat, direct, again=export)
    started = time.perf_counter()
    done = engine.update_weights(update)
    try:
        what = f"the engine takes the weights of version {version}"
        wait_for_future(done, lambda: what, kind="weights", hard_limit_s=limit_s)
    finally:
        if done.done():  # otherwise the engine's thread still reads
            update.close()
    seconds = time.perf_counter() - started
    checksums.keep_order()
    pause_s = engine.status().metrics.get("last_update_pause_s")

    def compare() -> Published:
        published = _summary(update, checksums, adapters, seconds, pause_s)
        if engine.capabilities.checksums and (served := engine.weights_checksum()) != published.serving:
            raise WeightsError(
                f"policy version {version}: the engine serves weights with checksum {served}, the learner's have "
                f"{published.serving}; they were damaged on the way or changed in the meantime: resume from the last "
                "checkpoint"
            )
        return published

    return Sent(compare, checksums.num_bytes, seconds, pause_s)


def _summary(
    update: WeightUpdate,
    checksums: StreamChecksums,
    adapters: AdaptersAlone | None,
    seconds: float,
    pause_s: float | None,
) -> Published:
    direct = update.direct
    if direct is None or not direct.reports:
        texts = checksums.texts() if adapters is None else adapters.texts(*checksums.sums())
        return Published(*texts, checksums.num_bytes, seconds, pause_s)
    serving = Checksum.merged(each.serving for each in direct.reports)
    trained = Checksum.merged(each.trained for each in direct.reports)
    texts = (serving.text(), trained.text()) if adapters is None else adapters.texts(serving.sums(), trained.sums())
    return Published(*texts, sum(each.num_bytes for each in direct.reports), seconds, direct.pause_s)


class StreamChecksums:
    """The checksums of a stream of buckets, computed while an engine reads it.

    checksums = StreamChecksums(torch.bfloat16)
    engine.update_weights(WeightUpdate(version, shapes, checksums.watch(learner.export())))
    serving, trained = checksums.texts()

    Servers that take the weights one after another read several streams of the same weights. The first one that is read
    to its end counts.
    """

    def __init__(self, serving_dtype: torch.dtype) -> None:
        self._dtype = serving_dtype
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._is_complete = False
        self._begin()

    def _begin(self) -> None:
        self._serving, self._trained = Checksum(self._dtype), Checksum()
        self.num_bytes = 0
        """So far, in the engine's number type."""

    def watch(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        exported = WeightUpdate(0, {}, buckets)
        is_known = self._is_complete
        if not is_known:
            self._begin()  # a server that was lost may have read a part of an earlier stream
        try:
            for bucket in buckets:
                if not is_known:
                    self._add(bucket)
                yield bucket
            self._is_complete = True
        finally:
            exported.close()

    def keep_order(self) -> None:
        """Have devices count the weights before they do what the caller asks of them next, such as changing them."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def texts(self) -> tuple[str, str]:
        """The checksum in the engine's number type, and the one in the learner's."""
        self._synchronize()
        return self._serving.text(), self._trained.text()

    def sums(self) -> tuple[Sums, Sums]:
        """What the checksums are computed from."""
        self._synchronize()
        return self._serving.sums(), self._trained.sums()

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _add(self, bucket: Bucket) -> None:
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in bucket:
            by_device.setdefault(tensor.device, []).append((name, tensor))
        for device, tensors in by_device.items():
            self.num_bytes += sum(tensor.numel() for _, tensor in tensors) * self._dtype.itemsize
            with self._beside(device, tensors):
                self._trained.add(tensors)
                self._serving.add(tensors, same=self._trained)

    @contextmanager
    def _beside(self, device: torch.device, tensors: Bucket) -> Iterator[None]:
        """Compute on another stream of a GPU, so that the engine, which is paused, does not wait for checksums."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for _, tensor in tensors:
            tensor.record_stream(stream)
