"""Weights that arrive in a worker process of vLLM without a file.

    arriving = SlotReader(rank, device, **order)        # through two slots of shared memory, on one machine
    arriving = GroupReader(group, device, **order)      # over a process group of torch, from any machine
    worker.reload_weights(weights_iterator=arriving.tensors())
    arriving.failure, arriving.checksum()

A stream that breaks ends early and sets ``failure``. It does not raise: vLLM would keep the layers that it has begun to
load aside, and mix them with the next update.

Headwater is not installed in that environment, so this file uses only Python and torch. ``Handover`` in
``headwater/backends/vllm/weights.py`` is the other end of ``SlotReader``, and describes the memory.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import fcntl
import hashlib
import logging
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

logger = logging.getLogger("vllm.headwater")  # below vLLM's own, which has a handler

NUM_SLOTS = 2
NUM_FILLED, END, NUM_TAKEN = 0, 1, 2
"""Places of the first words of the handover. From ``NUM_TAKEN`` on, every worker has one."""
OPEN, COMPLETE, ABANDONED = 0, 1, 2
"""Values of the word ``END``."""
FAILED = -1
"""What a worker that cannot take any more slots writes in place of their number."""
_POLL_S = 0.0005
_LOOK_S = 1.0
_SAY_S = 30.0
_CHUNK_BYTES = 8 * 2**20
_FOLD = 33


def table_of(slot: int, num_workers: int, num_names: int) -> int:
    """The word at which the table of a slot begins: how many tensors it has, then number and offset of each."""
    return NUM_TAKEN + num_workers + slot * (1 + 2 * num_names)


_first, _second = threading.Lock(), threading.Lock()


def in_order() -> None:
    """What this thread has read and written before this comes first for other processes, too.

    On processors such as Arm's, a counter may otherwise be seen before the weights that it announces. Releasing the
    first lock waits for what came before, and taking the second one holds back what follows.
    """
    with _first:
        pass
    with _second:
        pass


class Arriving:
    """Tensors on their way to the loaders of vLLM."""

    def __init__(self, device: torch.device, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: str) -> None:
        self.failure = ""
        """Why the stream ended early."""
        self._device = device
        self._named = [(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)]
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._sums = ReceivedSums()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, in memory of this process: a loader may keep some until the others of a layer have come."""
        num_left = len(self._named)
        try:
            for name, tensor in self._arrive():
                self._sums.add(name, tensor)
                num_left -= 1
                yield name, tensor
            if num_left:
                self.failure = f"{num_left} of {len(self._named)} tensors did not arrive"
        except (ArrivalError, OSError, RuntimeError, ValueError) as error:
            self.failure = str(error)

    def _arrive(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def checksum(self) -> str:
        """Of what has arrived, as the learner computes it."""
        return self._sums.text()


class ArrivalError(Exception):
    """The weights cannot arrive any more."""


class SlotReader(Arriving):
    """Takes every slot, as each of the other workers does, and says when it does not need it any more."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        *,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        handover: str,
        slots: str,
        slot_bytes: int,
        num_workers: int,
        limit_s: float,
        kept: LentMemory | None = None,
    ) -> None:
        """``handover`` and ``slots`` are names of shared memory, of which ``kept`` may have the second one mapped
        already. ``limit_s`` is how long the next slot may take."""
        super().__init__(device, names, shapes, dtype)
        self._taken = NUM_TAKEN + rank
        self._tables = [table_of(slot, num_workers, len(names)) for slot in range(NUM_SLOTS)]
        num_words = table_of(NUM_SLOTS, num_workers, len(names))
        self._slot_bytes = slot_bytes
        self._limit_s = limit_s
        self._handover = LentMemory(handover, 8 * num_words)
        self._words = memoryview(self._handover.buffer).cast("q")
        try:
            if kept is None or kept.name != slots:
                kept = LentMemory(slots, NUM_SLOTS * slot_bytes, device=device)
        except BaseException:
            self.give_up()  # the answer of this worker is seen only when all workers have ended
            raise
        self.memory = kept

    def _arrive(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for number in range(2**62):
                self._until(lambda: self._words[NUM_FILLED] > number or self._words[END] != OPEN)  # noqa: B023
                in_order()
                if self._words[END] == ABANDONED:
                    raise ArrivalError("the run has given up this update")
                if self._words[NUM_FILLED] <= number:
                    return
                tensors = self._take(number % NUM_SLOTS)
                in_order()
                self._words[self._taken] = number + 1
                yield from tensors
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The sender need not wait for this worker any more."""
        self._words[self._taken] = FAILED

    def _take(self, slot: int) -> list[tuple[str, torch.Tensor]]:
        """The tensors in a slot, as views of one copy on this worker's device."""
        table = self._tables[slot]
        numbers = self._words[table + 1 : table + 1 + 2 * self._words[table]].tolist()
        places = [(*self._named[number], offset) for number, offset in zip(numbers[::2], numbers[1::2], strict=True)]
        sizes = [math.prod(shape) * self._dtype.itemsize for _, shape, _ in places]
        num_bytes = max((place[2] + size for place, size in zip(places, sizes, strict=True)), default=0)
        if num_bytes > self._slot_bytes:
            raise ArrivalError(f"a slot of {self._slot_bytes} bytes cannot hold {num_bytes} bytes of weights")
        if not num_bytes:
            return [(name, torch.empty(shape, dtype=self._dtype, device=self._device)) for name, shape, _ in places]
        copy = self.memory.copy(slot * self._slot_bytes, num_bytes, self._device)
        return [
            (name, copy[offset : offset + size].view(self._dtype).view(shape))
            for (name, shape, offset), size in zip(places, sizes, strict=True)
        ]

    def _until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for the sender, which may be slow, or may have ended."""
        began = time.monotonic()
        looks_at, says_at = began + _LOOK_S, began + _SAY_S
        while not is_ready():
            now = time.monotonic()
            if now - began > self._limit_s:
                raise ArrivalError(f"no weights came within {self._limit_s:g} s; the run that sends them may hang")
            if now > looks_at:
                looks_at = now + _LOOK_S
                if self._handover.is_abandoned() and not is_ready():
                    raise ArrivalError("the process that sends the weights has ended")
            if now > says_at:
                says_at = now + _SAY_S
                logger.warning("still waiting after %.0f s: for the next weights of the run", now - began)
            time.sleep(_POLL_S)


class LentMemory:
    """Shared memory that another process owns. Its owner holds a lock on it while it lives."""

    def __init__(self, name: str, size: int, *, device: torch.device | None = None) -> None:
        """``device`` is where copies go, for which memory is pinned if it is a GPU."""
        self.name = name
        try:
            self._descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
            self.buffer = mmap.mmap(self._descriptor, size)
        except (OSError, ValueError) as error:
            raise ArrivalError(
                f"shared memory {name!r} of {size} bytes cannot be opened ({error}): the server must run on the "
                "machine of the run, as the same user and with the same /dev/shm; otherwise use "
                "rollout.weight_transfer=file or collective"
            ) from error
        self._bytes = torch.frombuffer(self.buffer, dtype=torch.uint8)
        self._is_pinned = device is not None and device.type == "cuda" and _pinned(self._bytes)

    def copy(self, start: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        part = self._bytes[start : start + num_bytes]
        return part.clone() if device.type == "cpu" else part.to(device)

    def is_abandoned(self) -> bool:
        """Whether its owner has ended, however it ended."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            with suppress(Exception):  # CUDA may have ended before
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _pinned(memory: torch.Tensor) -> bool:
    """Lock memory for fast copies to the GPU of this process. Without it copies are slower."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if status != 0:
        logger.warning("shared memory for weights is not pinned, so copies are slower: CUDA error %d", status)
        with suppress(RuntimeError):  # CUDA remembers the error, and the next kernel would report it as its own
            torch.ones(1, device="cuda")
    return status == 0


def join_group(address: str, port: int, name: str, rank: int, size: int, limit_s: float) -> Any:
    """Meet the sender, member 0, and the other workers in a group over gloo, named as ``torch.distributed`` does."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

    limit = timedelta(seconds=limit_s)
    store: Any = TCPStore(address, port, is_master=False, timeout=limit)
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address))]
    options._timeout = limit
    return ProcessGroupGloo(store, rank, size, options)


def _own_address(peer: str) -> str:
    """The address of this machine from which ``peer`` is reached."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


class GroupReader(Arriving):
    """Receives whole tensors in the order in which they were announced."""

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: str,
        limit_s: float,
    ) -> None:
        """``limit_s`` is how long the next tensor may take, which may be longer than joining the group."""
        super().__init__(device, names, shapes, dtype)
        self._group = group
        self._limit_s = limit_s

    def _arrive(self) -> Iterator[tuple[str, torch.Tensor]]:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._limit_s)
        for name, shape in self._named:
            tensor = torch.empty(shape, dtype=self._dtype)
            self._group.broadcast([tensor], options).wait()
            yield name, tensor.to(self._device)


class ReceivedSums:
    """The checksum of ``headwater/models/checksum.py``, of whole tensors."""

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._multipliers: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.reshape(-1)
        size = _CHUNK_BYTES // flat.element_size()
        chunks = [flat[start : start + size] for start in range(0, len(flat), size)]
        self._sums[f"{name} {dtype} {tuple(tensor.shape)}"] = [self._sum(chunk) for chunk in chunks]

    def _sum(self, chunk: torch.Tensor) -> torch.Tensor:
        num_bytes = chunk.nbytes
        if num_bytes % 8 or chunk.storage_offset() * chunk.element_size() % 8:
            padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=chunk.device)
            padded[:num_bytes] = chunk.view(torch.uint8)
            chunk = padded
        words = chunk.view(torch.int64)
        folded = words >> _FOLD
        folded &= 2 ** (64 - _FOLD) - 1
        folded ^= words
        folded *= self._factors(chunk.device)[: len(words)]
        return folded.sum()

    def _factors(self, device: torch.device) -> torch.Tensor:
        if self._multipliers is None:
            values = torch.arange(1, _CHUNK_BYTES // 8 + 1, dtype=torch.int64, device=device) * -7046029254386353131
            for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
                values ^= (values >> shift) & (2 ** (64 - shift) - 1)
                values *= factor
            values ^= (values >> 31) & (2**33 - 1)
            self._multipliers = values | 1
        return self._multipliers

    def text(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        totals = [total for _, sums in sorted(self._sums.items()) for total in sums]
        values = iter(torch.stack(totals).tolist() if totals else ())
        for header, sums in sorted(self._sums.items()):
            digest.update(f"{header}\n".encode())
            for _ in sums:
                digest.update(next(values).to_bytes(8, "little", signed=True))
        dtypes = {header.rsplit(" (", 1)[0].rsplit(" ", 1)[-1] for header in self._sums}
        return f"{next(iter(dtypes)) if len(dtypes) == 1 else 'mixed'}-{digest.hexdigest()}"
