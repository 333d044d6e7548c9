"""The part of a tensor that this process holds, and what it holds of an optimiser's state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def held_by(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of it if the tensor is not sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def hold(tensor: Tensor, storage: Tensor) -> None:
    """Make ``tensor``, the same object, hold ``storage``, which may be on another device."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = storage
    else:
        tensor.data = storage


def averages_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """AdamW's state except the step counts, whose device AdamW chooses."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                yield value
