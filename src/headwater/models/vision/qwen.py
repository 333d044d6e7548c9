"""Qwen2.5-VL: the pixels of its vision tower, the tokens of a picture, and their rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.core.media import MediaContent, MediaKind
from headwater.models.vision.family import BlockShape, MediaFeatures

_TOKENS: dict[MediaKind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


class QwenFamily:
    """A picture is cut into patches. The tower merges squares of them into one token each."""

    def __init__(self, image_processor: Any, config: Any) -> None:
        self.image_processor = image_processor
        self._merge_size = int(config.vision_config.spatial_merge_size)

    def placeholder(self, kind: MediaKind) -> str:
        return _TOKENS[kind] if kind == "image" else ""

    def token(self, kind: MediaKind) -> str:
        return _TOKENS[kind]

    def pieces(self, content: MediaContent) -> Sequence[str | BlockShape]:
        time, height, width = self.inputs(content)["image_grid_thw"][0].tolist()
        grid = (time, height // self._merge_size, width // self._merge_size)
        return [BlockShape(grid[0] * grid[1] * grid[2], grid)]

    def inputs(self, content: MediaContent) -> dict[str, Tensor]:
        return dict(self.image_processor(content.images(), return_tensors="pt"))

    def features(self, model: Any, inputs: Sequence[Mapping[str, Tensor]]) -> list[MediaFeatures]:
        pixels = torch.cat([each["pixel_values"] for each in inputs])
        grids = torch.cat([each["image_grid_thw"] for each in inputs])
        output = model.get_image_features(pixels, grids, return_dict=True)
        return [MediaFeatures(embeddings) for embeddings in output.pooler_output]
