"""The processes that train one model together, and how a module is laid out over them.

One process holds everything. With several, FSDP2 gives each one a shard of every parameter. With context parallelism
the ranks form a mesh of two dimensions: neighbours compute the same rows together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headwater.config.schema import LearnerConfig
from headwater.core.disk import show_bytes
from headwater.core.errors import ConfigError, OtherRankFailed
from headwater.core.waits import COLLECTIVE_LIMIT_S
from headwater.learner.export import plain_name
from headwater.learner.fused_layers import use_fused_layers
from headwater.learner.joined_layers import join_projections, joined_weights
from headwater.learner.packed_module import PackedModule
from headwater.learner.wide_layers import widen_layers
from headwater.learner.working_copies import WorkingCopies
from headwater.models.device import free_bytes
from headwater.models.sharded_load import ShardReader

logger = logging.getLogger(__name__)

_GRADIENT_BYTES, _AVERAGES_BYTES = 4, 8
"""Of one trained weight."""
_LONGEST_LIMIT_S = 365 * 86400.0
"""Of a process group. ``learner.rank_timeout_s`` may be any number."""
_ROOM = 1.5
"""Free memory that converting all weights at once needs, as a multiple of what is certain to be allocated."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a learner. Every method must be called by all of them, in the same order."""

    index: int = 0
    count: int = 1
    num_context: int = 1
    """How many neighbouring ranks have the same rows and compute them together."""

    @classmethod
    def current(cls, num_context: int = 1) -> Ranks:
        """The ranks of the process group that a launcher has set up, or this process alone if there is none."""
        index, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if count % num_context:
            raise ConfigError(
                [
                    f"learner.context_parallel = {num_context}: the learner has {count} ranks, which must be divisible "
                    f"by it; start a multiple of {num_context} ranks, or use 1"
                ]
            )
        return cls(index, count, num_context)

    def mesh(self, device: torch.device) -> DeviceMesh:
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # a mesh of CUDA devices places this process on the current device
        if not dist.is_initialized():
            # FSDP needs a process group even for a single process.
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return init_device_mesh(device.type, (self.count,))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all rows, on every rank. Of ranks that have the same rows, only the first counts."""
        if self.count > 1:
            if self.index % self.num_context:
                values = torch.zeros_like(values)
            dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """The largest value of all ranks, on every rank."""
        if self.count == 1:
            return value
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        result = torch.tensor(value, device=device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return int(result)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each value over all ranks, on every rank."""
        if self.count > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        gathered: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the block raises on one rank, all ranks raise, so that none continues and waits for it forever."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised again below
            problem = error
        if self.max(int(problem is not None)):
            raise problem or OtherRankFailed("another rank has failed; see the error of that rank")

    def union(self, names: Iterable[str]) -> list[str]:
        """The names that any rank has, in the same order on every rank."""
        if self.count == 1:
            return list(names)
        return sorted({name for each in self.gather(list(names)) for name in each})


def allow_waits(limit_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Let a rank wait for the others as long as a call may take (``learner.rank_timeout_s``), if there are others.

    Ranks join before they know the config, with ``COLLECTIVE_LIMIT_S``. That remains if it is longer: a rank also waits
    for whoever reads the weights that it exports, and this time belongs to no call.
    """
    if dist.is_initialized():
        seconds = min(max(limit_s, COLLECTIVE_LIMIT_S), _LONGEST_LIMIT_S)
        _set_pg_timeout(timedelta(seconds=seconds), group)


@cache
def _context_mesh(device_type: str, count: int, num_context: int) -> DeviceMesh:
    """The ranks that have the same rows as this one. Cached, so that all models of a learner use the same groups."""
    return init_device_mesh(device_type, (count // num_context, num_context), mesh_dim_names=("rows", "context"))[
        "context"
    ]


def shard(
    module: PackedModule,
    ranks: Ranks,
    config: LearnerConfig,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    trains: bool,
    weights: ShardReader | None = None,
) -> None:
    """Prepare ``module`` in place, one decoder layer at a time.

    Weights keep their type (float32 for trained ones), layers compute in ``compute_dtype``, and gradients are summed in
    float32. A single process that computes in the type of its weights needs no sharding, and one that computes in
    another type converts all weights at once, unless ``learner.convert_at_once`` is off or a GPU has too little room.
    Parameters on the meta device are allocated and read from ``weights``, each rank only its shard.
    """
    uses_kernels = device.type == "cuda" and config.fused_layers and not config.compile
    if uses_kernels:
        use_fused_layers(module.model)
    # Checkpointed layers keep their inputs, and two tensors would be half as much again.
    has_wide_layers = widen_layers(
        module.model, compute_dtype, uses_kernels=uses_kernels, defers=not config.checkpoint_activations
    )
    layers = module.layers
    for index in range(len(layers)):
        if config.compile:
            # Not ``dynamic=True``: torch detects that only the number of tokens changes from pack to pack.
            layers[index].compile()
        if config.checkpoint_activations and trains:
            layers[index] = checkpoint_wrapper(layers[index])
    if config.checkpoint_activations and trains and module.trains_vision:
        _checkpoint_tower(module)
    if ranks.count == 1 and all(parameter.dtype == compute_dtype for parameter in module.parameters()):
        return
    is_alone = ranks.count == 1 and config.convert_at_once and weights is None
    if is_alone and has_room_for_copies(module, config, compute_dtype, device, trains=trains):
        # Only here: without working copies, the weights would have to be copied together in every pass.
        if uses_kernels and config.join_projections:
            join_projections(module.model, compute_dtype, uses_kernels=True)
        module.copies = WorkingCopies(module, compute_dtype, joined_weights(module))
        return
    mesh = ranks.mesh(device)
    if ranks.num_context > 1:
        from headwater.learner.context_parallel import ContextGroup  # only these runs need it

        neighbours = _context_mesh(device.type, ranks.count, ranks.num_context)
        allow_waits(config.rank_timeout_s, neighbours.get_group())
        module.context = ContextGroup(neighbours)
        module.context.check(module.model)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # FSDP would round the wide inputs of every layer.
        cast_forward_inputs=not has_wide_layers,
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)
    if weights is not None:
        _materialize(module, device, weights)


def _checkpoint_tower(module: PackedModule) -> None:
    """Recompute the blocks of a trained vision tower in the backward pass, one by one.

    They are not sharded one by one: a rank whose pass has no picture does not run them, and would not take part in
    gathering them. With the embedding they belong to the whole module, which every rank gathers once per pass.
    """
    for part in module.vision_modules:
        for blocks in [each for each in part.modules() if isinstance(each, nn.ModuleList)]:
            for index in range(len(blocks)):
                blocks[index] = checkpoint_wrapper(blocks[index])


def has_room_for_copies(
    module: PackedModule, config: LearnerConfig, compute_dtype: torch.dtype, device: torch.device, *, trains: bool
) -> bool:
    """Whether all weights can be converted at once, beside gradients and averages that are not allocated yet.

    Activations are not known here: half as much again is left for them. On a CPU nothing is checked.
    """
    if device.type == "cpu":
        return True
    needed = 0
    for weight in module.parameters():
        if weight.dtype != compute_dtype:
            is_trained = trains and weight.requires_grad
            averages = 0 if config.offload_optimizer else _AVERAGES_BYTES
            needed += weight.numel() * (compute_dtype.itemsize + is_trained * (_GRADIENT_BYTES + averages))
    free = free_bytes(device)
    has_room = free >= _ROOM * needed
    logger.info(
        "%s: gradients, averages and converted weights take %s, and %s are free",
        "all weights are converted at once" if has_room else "weights are converted one layer at a time",
        show_bytes(needed),
        show_bytes(free),
    )
    return has_room


def _materialize(module: PackedModule, device: torch.device, weights: ShardReader) -> None:
    """Allocate this rank's shard of every parameter that has no values yet, and read it."""
    empty = {name for name, parameter in module.model.named_parameters() if parameter.is_meta}
    # Like ``to_empty``, which would also discard the values of new heads and adapters.
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    parameters = dict(module.model.named_parameters())
    weights.read({plain_name(name): parameters[name] for name in empty}, dict(module.model.named_buffers()))


def reshard(module: PackedModule) -> None:
    """Free the copies in ``compute_dtype`` that passes leave behind.

    Until then the module's parameters are those copies, not the weights.
    """
    if module.copies is not None:
        module.copies.put_back()
    elif isinstance(module, FSDPModule):
        module.reshard()


def collect_gradients(module: PackedModule) -> None:
    """After a backward pass: have the gradients at the weights, where FSDP puts them by itself."""
    if module.copies is not None:
        module.copies.collect()
