"""Copies of host tensors to a device without waiting for it.

    places, lengths = upload([places, lengths], device)

A copy from ordinary memory makes the host wait until the device has finished everything that is queued on its stream.
The device is then idle until the host has launched the next kernels. A copy from page-locked memory is queued like a
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes. Every tensor starts at a multiple, as if it had been allocated separately."""


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors`` on ``device``. CUDA gets all of them in one copy, from page-locked memory.

    torch keeps the page-locked memory until the copy is done, and uses it again afterwards.
    """
    if device.type != "cuda" or any(each.device.type != "cpu" for each in tensors):
        return [each.to(device) for each in tensors]
    staged = torch.empty(num_bytes(tensors), dtype=torch.uint8, pin_memory=True)
    for place, tensor in zip(views(staged, tensors), tensors, strict=True):
        place.copy_(tensor)
    return views(staged.to(device, non_blocking=True), tensors)


def upload_into(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``tensors`` to ``memory``, which is bytes on a device, to where ``views`` finds them."""
    staged = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=memory.is_cuda)
    for place, tensor in zip(views(staged, tensors), tensors, strict=True):
        place.copy_(tensor)
    memory.copy_(staged, non_blocking=True)


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """The memory that ``views`` needs for ``tensors``."""
    return sum(_aligned(each.nbytes) for each in tensors)


def views(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of ``memory``, which is bytes, with the shapes and types of ``tensors``, one after the other."""
    result, start = [], 0
    for each in tensors:
        result.append(memory[start : start + each.nbytes].view(each.dtype).view(each.shape))
        start += _aligned(each.nbytes)
    return result


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
