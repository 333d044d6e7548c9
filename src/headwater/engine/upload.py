"""Small host tensors on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``. A CPU reads them where they are."""
    if device.type == "cuda":
        # Pinned memory makes the copy asynchronous; a plain one would wait for all queued steps.
        return values.pin_memory().to(device, non_blocking=True)
    return values
