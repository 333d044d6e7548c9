"""Whether tensors are on the device. While they are not, their values are in page-locked main memory.

    residency = Residency(device)
    residency.copy_out(tensors)     # optional: starts the copy while the device computes
    residency.release(tensors)      # their memory on the device is free for others
    residency.restore()             # the same tensors, with the same values, at new addresses
    residency.wait()                # from here on, queued work may use them

Memory is released below the tensors, so the objects that others hold (FSDP, an optimiser) stay valid. The copies in
main memory are allocated once, and are made again only after ``changed``. Copies run on a separate stream. On a CPU
nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headwater.learner.held import held_by
from headwater.models.pinned import PinnedMemory


class Residency:
    """One group of tensors that leaves the device and returns together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moves = device.type == "cuda"
        self._storages: list[torch.UntypedStorage] = []
        self._homes: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        """The end of the last copy."""
        self._is_copied = False
        """Main memory has the present values, or will have them after ``_done``."""
        self.is_away = False
        self.num_bytes_moved = 0
        """Copied in either direction, since the beginning."""

    def changed(self) -> None:
        """The tensors get new values: the copy in main memory is no longer valid."""
        self._is_copied = False

    @torch.no_grad()
    def copy_out(self, tensors: Iterable[Tensor]) -> None:
        """Start to copy the tensors to main memory. They stay on the device."""
        if not self._moves or self.is_away or self._is_copied:
            return
        self._take(tensors)
        with self._on_stream() as stream:
            for storage, home in zip(self._storages, self._homes, strict=True):
                home.copy_(_bytes_of(storage, self._device), non_blocking=True)
                self.num_bytes_moved += home.nbytes
            self._done = stream.record_event()
        self._is_copied = True

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Wait for the copy, and free the memory on the device."""
        if not self._moves or self.is_away:
            return
        self.copy_out(tensors)
        if self._done is not None:
            self._done.synchronize()
        self._synchronize()  # others may use the memory at once, on any stream
        self.is_away = True  # first: an interrupt below leaves some without memory, and ``restore`` repairs that
        for storage in self._storages:
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Allocate the memory again and start to copy the values into it.

        If there is not enough memory, nothing is allocated, and this can be repeated, as after an interrupt.
        """
        if not self.is_away:
            return
        try:
            for storage, home in zip(self._storages, self._homes, strict=True):
                storage.resize_(home.nbytes)
        except torch.OutOfMemoryError:
            for storage in self._storages:
                storage.resize_(0)
            raise
        with self._on_stream() as stream:
            for storage, home in zip(self._storages, self._homes, strict=True):
                _bytes_of(storage, self._device).copy_(home, non_blocking=True)
                self.num_bytes_moved += home.nbytes
            self._done = stream.record_event()
        self.is_away = False  # last: until here the tensors may have memory without values

    def wait(self) -> None:
        """Make work that is queued from now on wait for the last copy. The host does not wait."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def _take(self, tensors: Iterable[Tensor]) -> None:
        """Find the memory of the tensors. Page-locked memory for it is allocated once."""
        storages = {}
        for tensor in tensors:
            storage = held_by(tensor).untyped_storage()
            if storage.device.type == self._device.type and storage.nbytes():
                storages[storage.data_ptr()] = storage  # tied weights share one
        self._storages = list(storages.values())
        sizes = [storage.nbytes() for storage in self._storages]
        if [home.nbytes for home in self._homes] != sizes:
            self._homes = self._allocate(sizes)

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        pinned = PinnedMemory(sum(-(-size // 64) * 64 for size in sizes))
        return [pinned.empty(torch.Size((size,)), torch.uint8) for size in sizes]

    def _synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[torch.cuda.Stream]:
        """Work on the separate stream, after everything that is queued on the current one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._stream


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
