"""Laying a module out over ranks: FSDP2, mixed precision, activation checkpointing, fusion and compilation."""

from __future__ import annotations

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headwater.config.schema import LearnerConfig
from headwater.learner.packed_module import PackedModule
from headwater.learner.ranks import Ranks
from headwater.models.fused_layers import use_fused_layers


def shard(
    module: PackedModule,
    ranks: Ranks,
    config: LearnerConfig,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    trains: bool,
) -> None:
    """Prepare ``module`` in place, one decoder layer at a time.

    The weights keep their own type (float32 for what is trained); layers compute in ``compute_dtype`` and gradients are
    summed in float32. A single process that computes in the type of its weights needs no sharding and gets none.
    """
    if device.type == "cuda" and config.fused_layers and not config.compile:
        use_fused_layers(module.model)
    layers = module.layers
    for index in range(len(layers)):
        if config.compile:
            # Not ``dynamic=True``: only the number of tokens changes from pack to pack, which torch finds out itself.
            layers[index].compile()
        if config.checkpoint_activations and trains:
            layers[index] = checkpoint_wrapper(layers[index])
    if ranks.count == 1 and all(parameter.dtype == compute_dtype for parameter in module.parameters()):
        return
    mesh = ranks.mesh(device)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def reshard(module: PackedModule) -> None:
    """Give up the copies in ``compute_dtype`` that a pass without a backward one leaves behind.

    Until then the module's parameters are those copies, not the weights.
    """
    if isinstance(module, FSDPModule):
        module.reshard()
