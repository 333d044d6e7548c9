"""One rank of a learner as a Ray actor: holds a shard of the learner and executes its calls."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headwater.cluster.ray_actor import ActorPlace, ActorProcess, SentError
from headwater.core.errors import OtherRankFailed
from headwater.core.waits import COLLECTIVE_LIMIT_S

if TYPE_CHECKING:
    from headwater.learner.build import LearnerSpec
    from headwater.learner.learner import LocalLearner

logger = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
"""Linux: asks for the address of a network interface."""


@dataclass(frozen=True)
class RankResult:
    """What one rank returns of a call."""

    value: Any = None
    error: SentError | None = None


class LearnerRank(ActorProcess):
    """The actor of one rank. Its methods run one at a time, except those of ``ActorProcess``."""

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        super().__init__(name)
        self._rank = rank
        self._num_ranks = num_ranks
        self._store: TCPStore | None = None
        self._learner: LocalLearner | None = None
        self._items: Iterator[Any] = iter(())
        self._advanced = RankResult()

    def open_store(self) -> tuple[str, int]:
        """On rank 0: the address at which the others join."""
        address = ActorPlace.here().address
        self._store = TCPStore(address, 0, self._num_ranks, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def join(self, store_address: tuple[str, int]) -> RankResult:
        """Join the process group of the rank that has opened a store there. Returns where this rank runs."""
        return self._attempt("join", lambda: self._join(*store_address))

    def _join(self, address: str, port: int) -> ActorPlace:
        place = ActorPlace.here()
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows an actor only its own GPU
        if interface := _interface_of(place.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = self._store or TCPStore(address, port, self._num_ranks, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._num_ranks, timeout=limit)
        return place

    def build(self, builder: Callable[[LearnerSpec], LocalLearner], spec: LearnerSpec) -> RankResult:
        def make() -> None:
            self._learner = builder(spec)

        return self._attempt("build", make)

    def call(self, name: str, *arguments: Any) -> RankResult:
        def execute() -> Any:
            result = getattr(self._learner, name)(*arguments)
            return _drained(result) if isinstance(result, Iterator) else result

        return self._attempt(name, execute)

    def begin(self, name: str, *arguments: Any) -> RankResult:
        """On rank 0: start an iterator, whose items ``advance`` returns."""

        def make() -> None:
            self._items = getattr(self._learner, name)(*arguments)

        self._items = iter(())
        self._advanced = self._attempt(name, make)
        return self._advanced

    def advance(self) -> RankResult:
        """The next item as arrays, which need no copy to be read; None after the last one."""
        self._advanced = self._attempt("export", lambda: pack(next(self._items, None)))
        return self._advanced

    def finish(self) -> RankResult:
        """Iterate to the end, because the other ranks do. An iterator that has failed fails here again."""
        if self._advanced.error is not None:
            return self._advanced
        return self._attempt("export", lambda: _drained(self._items))

    def auto_dtype(self, device: str) -> str:
        """The number type that ``model.dtype: auto`` means on the device of this rank."""
        from headwater.models.device import resolve_dtype

        return str(resolve_dtype("auto", device)).removeprefix("torch.")

    def _attempt(self, name: str, function: Callable[[], Any]) -> RankResult:
        try:
            return RankResult(function())
        except Exception as error:
            if not isinstance(error, OtherRankFailed):
                logger.error("rank %d failed in %s", self._rank, name, exc_info=True)  # to the log of this rank
            return RankResult(error=SentError.of(error))


def pack(bucket: Any) -> Any:
    """A bucket as arrays, which the object store shares without copies. Tensors would be copied on arrival."""
    if bucket is None:
        return None
    packed = []
    for name, tensor in bucket:
        flat = tensor.detach().contiguous().cpu()
        packed.append(
            (name, str(flat.dtype).removeprefix("torch."), tuple(flat.shape), flat.view(-1).view(torch.uint8).numpy())
        )
    return packed


def unpack(packed: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the arrays cannot be written to, and are not
        return [
            (name, torch.from_numpy(array).view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, array in packed
        ]


def _drained(items: Iterator[Any]) -> Any:
    for _ in items:
        pass
    return None


def _interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; empty if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
