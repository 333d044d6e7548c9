"""The part of a vision model that turns pictures into embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from headwater.core.media import MediaContent
from headwater.models.vision.attention import use_window_attention
from headwater.models.vision.family import MediaFeatures
from headwater.models.vision.processor import VisionProcessor


class VisionTower:
    """The vision tower of a model, with its projector. It uses the model's own weights, whatever they are now.

    Gradients flow to the tower's parameters if they are enabled.
    """

    def __init__(self, model: Any, processor: VisionProcessor) -> None:
        use_window_attention(model)
        use_patch_projection(model)
        self._model = model
        self._processor = processor

    def __call__(self, contents: Sequence[MediaContent]) -> list[MediaFeatures]:
        """The features of each content, from one call of the model's tower. Equal contents are computed once."""
        if not contents:
            return []
        unique = {content.digest: content for content in contents}
        made = self.of_inputs([self._processor.inputs(content) for content in unique.values()])
        features = dict(zip(unique, made, strict=True))
        return [features[content.digest] for content in contents]

    def of_inputs(self, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        """The same for contents of which the processor has already made tensors."""
        return self._processor.family.features(self._model, inputs)

    def weights_changed(self) -> None:
        """Nothing is kept of the weights."""


class PatchProjection(nn.Conv3d):
    """The first layer of Qwen's towers, a convolution over patches as large as its kernel, as a product of matrices.

    The libraries that compute convolutions need many times longer for it in half precision, and round float32 numbers
    unless told not to. ``input`` is ``[patches, channels, frames, height, width]``. Names and shapes of the parameters
    are those of the convolution.
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
