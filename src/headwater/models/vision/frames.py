"""The size to which pictures and frames are scaled, and frames as patches. Nothing here needs torchvision."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from headwater.core.media import MediaContent

DEFAULT_FRAMES_PER_S = 2.0
"""Of a video that does not tell. Qwen's models are trained on two frames per second."""

_MAX_ASPECT_RATIO = 200


def frame_rate(content: MediaContent) -> float:
    return content.frames_per_s if content.frames_per_s > 0 else DEFAULT_FRAMES_PER_S


def size_of(content: MediaContent) -> tuple[int, int]:
    """Height and width of the first frame. Only the header of the file is read."""
    with Image.open(io.BytesIO(content.frames[0])) as image:
        return image.height, image.width


def fitted_size(
    size: tuple[int, int], *, factor: int, min_pixels: int, max_pixels: int, num_frames: int = 1, group: int = 1
) -> tuple[int, int]:
    """Height and width, both multiples of ``factor``, whose product is within the limits, in about the same proportion.

    The limits count the pixels of all frames together. ``group`` is the number of frames that the tower reads at once.
    """
    height, width = size
    if max(size) > _MAX_ASPECT_RATIO * min(size):
        raise ValueError(f"a picture of {width}×{height} pixels is too narrow: the longer side may be 200 times longer")
    rows, columns = round(height / factor), round(width / factor)
    num_pixels = rows * columns * factor**2 * round(num_frames / group) * group
    if num_pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in size)
    elif num_pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in size)
    return rows * factor, columns * factor


def grouped_patches(
    image_processor: Any, frames: Sequence[Image.Image], size: tuple[int, int], **options: Any
) -> tuple[Tensor, int]:
    """``[patches, values]`` of a video for a tower that reads several frames at once, and the number of groups.

    ``options`` are settings of the image processor that differ for videos.
    The image processor repeats a picture as often as the tower reads frames at once. Each repetition but one is
    replaced by the frame that belongs there. The last frame is repeated to fill its group.
    """
    group = int(image_processor.temporal_patch_size)
    scaled = [frame.resize((size[1], size[0]), image_processor.resample) for frame in frames]
    made = image_processor(scaled, do_resize=False, return_tensors="pt", **options)["pixel_values"]
    patches = made.view(len(frames), -1, 3, group, int(image_processor.patch_size) ** 2)[:, :, :, 0]
    missing = -len(frames) % group
    patches = torch.cat([patches, patches[-1:].expand(missing, -1, -1, -1)])
    num_groups = len(patches) // group
    together = patches.view(num_groups, group, *patches.shape[1:]).permute(0, 2, 3, 1, 4)
    return together.reshape(num_groups * together.shape[1], -1).contiguous(), num_groups
