"""The processes that train one model together: one, or many that each hold a shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Ranks:
    """Data-parallel ranks. Every method is called by all of them, in the same order."""

    index: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Those of the process group that a launcher has set up; this process alone where there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    def mesh(self, device: torch.device) -> DeviceMesh:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where a mesh of CUDA devices places this process
        if not dist.is_initialized():
            # Sharding wants a process group even where there is nothing to share.
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return init_device_mesh(device.type, (self.count,))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        if self.count == 1:
            return value
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        result = torch.tensor(value, device=device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return int(result)

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that any rank has, in the same order on all."""
        if self.count == 1:
            return list(names)
        gathered: list[list[str]] = [[] for _ in range(self.count)]
        dist.all_gather_object(gathered, list(names))
        return sorted({name for each in gathered for name in each})
