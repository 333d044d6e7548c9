"""A copy of everything that a checkpoint contains, taken while training continues.

    snapshots.prepare(...)               # at the start of a run that will save: allocates the memory of the copies
    ...
    snapshot = snapshots.take(...)       # starts to copy to main memory, on another thread
    ...                                  # generation and forward passes: the weights do not change
    snapshots.settle()                   # before the weights change or move
    snapshot.write()                     # on any thread

With several ranks, each one copies and writes its shard. The first rank then puts the model together from the files of
all ranks, one tensor at a time, so nothing is gathered and no collective operation runs beside training.

On a GPU, the copies go to page-locked memory on a separate stream. That memory is kept for the next snapshot. To
allocate it takes seconds, so a thread does that before the first snapshot, while training already runs.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headwater.core.waits import wait_for_future
from headwater.learner.export import merged_pieces, plain_name, trained_parameters
from headwater.learner.held import held_by
from headwater.learner.ranks import Ranks
from headwater.learner.sharded_checkpoint import (
    FOLDER,
    ShardPiece,
    Shards,
    gather_pieces,
    piece_of,
    read_tensors,
    shard_file,
    write_shards,
    write_tensors,
    writes,
)
from headwater.models.device import available_ram
from headwater.models.pinned import PinnedMemory, page_locked

logger = logging.getLogger(__name__)

COPY_LIMIT_S = 600.0
_BLOCK = 1 << 28
"""Bytes that are allocated at once, about a tenth of a second. Meanwhile other threads may wait for the driver."""
_PAUSE_S = 0.005
"""Between two blocks, so that other threads get their turn."""
_SHARE_OF_MEMORY = 0.5
"""Of the free main memory, the most that a copy may take."""

MODEL = "model"
"""The name of the copies of the exported model."""
_REST = ".rest"
"""The folder of pieces that are only needed to put the model together."""

_Copies = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rest:
    """The weights of the exported model that ``train/`` does not have: frozen ones, and those with merged adapters."""

    file: str
    pieces: Mapping[str, list[ShardPiece]]
    """Of all ranks."""


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of the learner's state. It is valid until the next one is taken."""

    _copied: Future[Mapping[str, _Copies]]
    _write: Callable[[Mapping[str, _Copies]], None]

    def write(self) -> None:
        """Write the files of a checkpoint, or those of this rank. May be called on any thread."""
        self._write(wait_for_copies(self._copied))


def wait_for_copies(copied: Future[Mapping[str, _Copies]]) -> Mapping[str, _Copies]:
    return wait_for_future(
        copied, lambda: "the weights are copied to main memory", kind="checkpoint", hard_limit_s=COPY_LIMIT_S
    )


class Snapshots:
    """Copies the tensors that this process holds of a learner to main memory, one snapshot at a time."""

    def __init__(self, device: torch.device, ranks: Ranks, *, allocate: Callable[[int], Tensor] | None = None) -> None:
        """``allocate`` makes the memory of the copies, a block at a time. It is page-locked if the device is a GPU."""
        self._device = device
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        """Its one thread allocates and then copies, so a copy finds all places that were prepared."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._allocate = allocate or (_ordinary if self._stream is None else _page_locked_if_possible)
        self._memory: PinnedMemory | None = None
        self._places: dict[tuple[str, str], Tensor] = {}
        """Where the copy of each tensor is, by its part and name."""
        self._prepared: Future[None] | None = None
        self._is_closed = threading.Event()
        self._last: Future[Mapping[str, _Copies]] | None = None

    def prepare(self, parts: Mapping[str, _Copies], model: nn.Module, *, num_bytes_kept: int = 0) -> None:
        """Start to allocate the memory for copies of tensors like those of ``parts`` and of ``model``.

        Nothing happens if there is too little memory, of which ``num_bytes_kept`` are needed for other copies; ``take``
        then decides. With several ranks, all of them must call this together.
        """
        wanted = {**parts, MODEL: dict(self._frozen(model))}
        num_bytes = sum(each.nbytes for tensors in wanted.values() for each in tensors.values())
        if self._memory is not None or self._ranks.max(int(self._is_too_large(num_bytes + num_bytes_kept))):
            return
        self._memory = PinnedMemory(num_bytes, max_block=_BLOCK, allocate=self._allocate)
        self._prepared = self._pool.submit(self._make_places, self._memory, wanted)

    def _frozen(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights of the exported model that have places apart from those of trained weights."""
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and "lora_" not in name and writes(parameter, self._ranks):
                yield plain_name(name), held_by(parameter)

    def _make_places(self, memory: PinnedMemory, wanted: Mapping[str, _Copies]) -> None:
        for part, tensors in wanted.items():
            for name, tensor in tensors.items():
                num_blocks = memory.num_blocks
                self._place(part, name, tensor)
                if memory.num_blocks > num_blocks and self._is_closed.wait(_PAUSE_S):
                    return

    def take(
        self,
        parts: Mapping[str, Shards],
        model: nn.Module,
        write: Callable[[Mapping[str, _Copies], Rest], None],
    ) -> Snapshot | None:
        """Copy the tensors of ``parts`` and the merged weights of ``model``; None if there is too little memory.

        ``write`` gets the copies by the names of the parts, and the merged weights as ``MODEL``. With several ranks,
        all of them must call this together, and ``MODEL`` has this rank's pieces of those that are not trained.
        """
        self.settle()
        num_bytes = sum(each.nbytes for shards in parts.values() for each in shards.tensors.values())
        num_bytes += sum(held_by(each).nbytes for each in model.parameters() if not each.requires_grad)
        if self._ranks.max(int(self._memory is None and self._is_too_large(num_bytes))):
            return None
        if self._memory is None:
            self._memory = PinnedMemory(num_bytes, max_block=_BLOCK, allocate=self._allocate)
        # Tensors are looked up here: during a forward pass, FSDP replaces the parameters of the modules.
        wanted = {part: dict(shards.tensors) for part, shards in parts.items()}
        file = shard_file(self._ranks)
        with self._ranks.together():
            merged = list(self._merged(model, file))
        wanted[MODEL] = {name: held for name, held, _ in merged}
        rest = Rest(file, gather_pieces({name: piece for name, _, piece in merged}, self._ranks))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._last = self._pool.submit(self._copy, wanted)
        return Snapshot(self._last, lambda copies: write(copies, rest))

    def _is_too_large(self, num_bytes: int) -> bool:
        """Before the first copy, whose memory is used again. The ranks of one machine share its memory."""
        hosts = self._ranks.gather(socket.gethostname())
        return num_bytes * hosts.count(socket.gethostname()) > _SHARE_OF_MEMORY * available_ram()

    @torch.no_grad()
    def _merged(self, model: nn.Module, file: str) -> Iterator[tuple[str, Tensor, ShardPiece]]:
        """The weights of the exported model. Those that are computed, because of adapters, are copied at once."""
        known = trained_names(model) if self._ranks.count > 1 else {}
        layouts = {plain_name(name): each for name, each in model.named_parameters()}
        for name, weight, is_computed in merged_pieces(model):
            if name in known:
                continue
            own = layouts[name]
            if is_computed and isinstance(weight, DTensor) and isinstance(own, DTensor):
                weight = weight.redistribute(placements=own.placements)
            if writes(weight, self._ranks):
                held, piece = held_by(weight), piece_of(weight, file)
                if is_computed:
                    self._wait_for_places()
                    held = self._place(MODEL, name, held).copy_(held, non_blocking=True)
                yield name, held, piece

    def settle(self) -> None:
        """Wait until the present tensors have been copied. A failure is raised by ``Snapshot.write``."""
        if self._last is not None:
            with suppress(Exception):
                wait_for_copies(self._last)
            self._last = None

    def _copy(self, wanted: Mapping[str, _Copies]) -> Mapping[str, _Copies]:
        if self._stream is None:
            return self._copied(wanted)
        with torch.cuda.stream(self._stream):
            copies = self._copied(wanted)
        self._stream.synchronize()
        return copies

    @torch.no_grad()
    def _copied(self, wanted: Mapping[str, _Copies]) -> Mapping[str, _Copies]:
        done: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

        def copied(part: str, name: str, tensor: Tensor) -> Tensor:
            if tensor is self._places.get((part, name)):
                return tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
            if key not in done:  # the exported model shares most of its tensors with the trained weights
                done[key] = self._place(part, name, tensor).copy_(tensor, non_blocking=True)
            return done[key]

        return {
            part: {name: copied(part, name, each) for name, each in tensors.items()} for part, tensors in wanted.items()
        }

    def _place(self, part: str, name: str, tensor: Tensor) -> Tensor:
        place = self._places.get((part, name))
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            assert self._memory is not None, "made before"
            place = self._places[part, name] = self._memory.empty(tensor.shape, tensor.dtype)
        return place

    def _wait_for_places(self) -> None:
        """Before another thread than the pool's uses them. What could not be allocated is tried again."""
        if self._prepared is not None:
            with suppress(Exception):
                wait_for_future(
                    self._prepared,
                    lambda: "memory for copies of the weights is allocated",
                    kind="checkpoint",
                    hard_limit_s=COPY_LIMIT_S,
                )
            self._prepared = None

    def close(self) -> None:
        self._is_closed.set()
        self._pool.shutdown()


def _ordinary(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _page_locked_if_possible(num_bytes: int) -> Tensor:
    try:
        return page_locked(num_bytes)
    except RuntimeError as error:  # torch has no narrower one for it
        logger.warning("page-locked memory for checkpoints: %s; they are copied more slowly, to other memory", error)
        return _ordinary(num_bytes)


def trained_names(model: nn.Module) -> dict[str, str]:
    """The weights of the exported model that are trained as they are, and their names in ``train/``."""
    return {plain_name(name): f"model.{name}" for name, _ in trained_parameters(model) if "lora_" not in name}


def write_parts(folder: Path, parts: Mapping[str, Shards], copies: Mapping[str, _Copies]) -> None:
    """Write the shards of each part into the sub-folder of its name."""
    for part, shards in parts.items():
        write_shards(folder / part, shards, copies[part])


def write_rest(folder: Path, rest: Rest, copies: _Copies) -> None:
    """Write this rank's pieces of weights that are not in ``train/``, until the model was put together."""
    if copies:
        write_tensors(folder / _REST, rest.file, copies)


def joined_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, str], trained: Shards, rest: Rest
) -> Iterator[tuple[str, Tensor]]:
    """The exported model, from the files that all ranks have written."""
    assert trained.index is not None, "only the first rank puts the model together"
    pieces = trained.index.pieces
    return read_tensors(
        {
            name: (folder / FOLDER, known[name], pieces[known[name]], shape)
            if name in known
            else (folder / _REST, name, rest.pieces[name], shape)
            for name, shape in shapes.items()
        }
    )


def remove_rest(folder: Path) -> None:
    """The model was put together."""
    if (folder / _REST).exists():
        shutil.rmtree(folder / _REST)
