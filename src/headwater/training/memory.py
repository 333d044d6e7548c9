"""Moving tensors between a device and main memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")


@torch.no_grad()
def relocate(tensor: Tensor, device: torch.device) -> None:
    """Move what ``tensor`` holds; the tensor stays the same object.

    In main memory it is pinned, so that it travels at full speed both ways and without holding up the device.
    """
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data
    if device.type == "cpu" and held.is_cuda:
        moved = torch.empty(held.shape, dtype=held.dtype, pin_memory=True).copy_(held, non_blocking=True)
    else:
        moved = held.to(device, non_blocking=True)
    if isinstance(tensor, DTensor):
        tensor._local_tensor = moved
    else:
        tensor.data = moved
