"""AdamW's averages in main memory: they pass through the device bucket by bucket while an optimiser step is taken.

Three buckets are in flight. One is copied to the device, the next one is used, and the one before returns to main
memory. The two directions of the bus work at the same time, so a step takes about as long as one direction alone. The
device holds the averages of three buckets instead of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.learner.held import averages_of, held_by, hold
from headwater.models.pinned import PinnedMemory

BUCKET_BYTES = 1 << 29
"""Averages of one bucket. A larger parameter is a bucket alone."""
_NUM_AHEAD = 2


@dataclass
class _Bucket:
    optimizers: Sequence[torch.optim.Optimizer]
    arrived: torch.cuda.Event
    on_device: list[Tensor]
    """Kept until they have been copied back."""
    left: torch.cuda.Event | None = None


class StreamedAverages:
    """Takes the steps of optimisers that have one parameter each, and whose averages live in main memory."""

    def __init__(self, device: torch.device, pinned: PinnedMemory) -> None:
        self._device = device
        self._pinned = pinned
        self._homes: dict[int, Tensor] = {}
        """Where each average lives, by the identity of the tensor that AdamW keeps."""
        self.num_bytes_moved = 0
        """Copied in either direction, since the beginning."""
        self._arrive = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leave = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """AdamW's state is replaced, for example by a checkpoint's."""
        self._homes.clear()

    @torch.no_grad()
    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """One step of every optimiser, in order. Work that is queued afterwards sees the new parameters.

        The host does not wait. Before it reads the averages, it must synchronise with the device.
        """
        groups = list(_buckets(optimizers))
        flying: list[_Bucket] = []
        for place in range(len(groups)):
            while len(flying) < min(place + _NUM_AHEAD, len(groups)):
                flying.append(self._fetch(groups[len(flying)]))
            bucket = flying[place]
            self._main.wait_event(bucket.arrived)
            for optimizer in bucket.optimizers:
                optimizer.step()
            self._send(bucket)
            if place:
                self._land(flying[place - 1])
        if flying:
            self._land(flying[-1])

    @torch.no_grad()
    def send_home(self, optimizer: torch.optim.Optimizer) -> None:
        """Move averages that were made on the device, for a checkpoint to fill, to main memory."""
        bucket = _Bucket([optimizer], _event(), list(map(held_by, averages_of(optimizer))))
        self._send(bucket)
        self._land(bucket)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _fetch(self, optimizers: Sequence[torch.optim.Optimizer]) -> _Bucket:
        """Start to copy the averages to the device. A new optimiser has none yet."""
        bucket = _Bucket(optimizers, _event(), [])
        averages = [each for optimizer in optimizers for each in averages_of(optimizer)]
        # Memory of the main stream, which is free now that the gradients are complete. Earlier work may still use it.
        bucket.on_device = [torch.empty_like(held_by(each), device=self._device) for each in averages]
        self._arrive.wait_stream(self._main)
        with torch.cuda.stream(self._arrive):
            for average, target in zip(averages, bucket.on_device, strict=True):
                target.copy_(held_by(average), non_blocking=True)
                hold(average, target)
                self.num_bytes_moved += target.nbytes
            bucket.arrived.record(self._arrive)
        return bucket

    def _send(self, bucket: _Bucket) -> None:
        """Start to copy the averages back, after the step that is queued."""
        averages = [each for optimizer in bucket.optimizers for each in averages_of(optimizer)]
        bucket.on_device = [held_by(each) for each in averages]  # the first step has made them
        self._leave.wait_stream(self._main)
        with torch.cuda.stream(self._leave):
            for average, source in zip(averages, bucket.on_device, strict=True):
                if id(average) not in self._homes:
                    self._homes[id(average)] = self._pinned.empty(source.shape, source.dtype)
                hold(average, self._homes[id(average)].copy_(source, non_blocking=True))
                self.num_bytes_moved += source.nbytes
            bucket.left = _event()
            bucket.left.record(self._leave)

    def _land(self, bucket: _Bucket) -> None:
        """Let the main stream reuse the memory of a bucket once it has been copied back."""
        assert bucket.left is not None, "sent before"
        self._main.wait_event(bucket.left)
        bucket.on_device.clear()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _buckets(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Sequence[torch.optim.Optimizer]]:
    bucket: list[torch.optim.Optimizer] = []
    num_bytes = 0
    for optimizer in optimizers:
        size = sum(2 * held_by(each).nbytes for group in optimizer.param_groups for each in group["params"])
        if bucket and num_bytes + size > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(optimizer)
        num_bytes += size
    if bucket:
        yield bucket
