"""The first layer of Qwen's vision towers as a product of matrices.

A patch is as large as the kernel of the convolution that reads it, so the convolution is a linear layer. The libraries
that compute convolutions need many times longer for it in half precision, and round float32 numbers unless told not to.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class PatchProjection(nn.Conv3d):
    """A convolution over ``[patches, channels, frames, height, width]``, all of which are as large as its kernel.

    Names and shapes of its parameters are those of the convolution.
    """

    def forward(self, input: Tensor) -> Tensor:
        product = F.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def use_patch_projection(model: Any) -> None:
    """Replace the convolution over patches in the vision tower of ``model``. Other towers keep theirs."""
    for name, module in model.named_modules():
        # A class instead of a new module: parameters, hooks and whatever refers to the layer stay as they are.
        if name.endswith("visual.patch_embed.proj") and type(module) is nn.Conv3d:
            module.__class__ = PatchProjection
