"""The size to which pictures and frames are scaled, and frames as patches. Nothing here needs torchvision."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.core.media import MediaContent

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_FRAMES_PER_S = 2.0
"""Of a video that does not tell. Qwen's models are trained on two frames per second."""

_MAX_ASPECT_RATIO = 200


def frame_rate(content: MediaContent) -> float:
    return content.frames_per_s if content.frames_per_s > 0 else DEFAULT_FRAMES_PER_S


def size_of(content: MediaContent) -> tuple[int, int]:
    """Height and width of the first frame. Only the header of the file is read."""
    from PIL import Image  # only vision models need it

    with Image.open(io.BytesIO(content.frames[0])) as image:
        return image.height, image.width


def num_pixels(content: MediaContent) -> int:
    """Pixels of all frames. Only the headers of the files are read."""
    from PIL import Image

    total = 0
    for frame in content.frames:
        with Image.open(io.BytesIO(frame)) as image:
            total += image.height * image.width
    return total


def of_one_size(frames: Iterable[Image.Image]) -> Iterator[Image.Image]:
    """The frames of a video one by one. ``ValueError`` for one of another size, which would be stretched."""
    first: tuple[int, int] | None = None
    for number, frame in enumerate(frames):
        first = first or frame.size
        if frame.size != first:
            (width, height), (first_width, first_height) = frame.size, first
            raise ValueError(
                f"frame {number} of a video has {width}×{height} pixels, and frame 0 has {first_width}×{first_height}: "
                "all frames must have the same size"
            )
        yield frame


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


class PatchMaker:
    """The patches of pictures and videos for a tower that reads several frames at once, as Qwen's.

    The image processor of transformers does the same for pictures, in twice the time: it computes with floating-point
    numbers where a table of the 256 values of a pixel is enough. The table is made with the image processor itself.
    """

    def __init__(self, image_processor: Any, **options: Any) -> None:
        """``options`` are settings that differ from those of the image processor."""
        from PIL import Image  # only vision models need it

        self.group = int(image_processor.temporal_patch_size)
        self._patch, self._merge = int(image_processor.patch_size), int(image_processor.merge_size)
        self._resample = image_processor.resample
        side = self._patch * self._merge * math.ceil(16 / (self._patch * self._merge))  # at least 256 pixels
        levels = (np.arange(side * side) % 256).astype(np.uint8).reshape(side, side, 1).repeat(3, axis=2)
        made = image_processor([Image.fromarray(levels)], do_resize=False, return_tensors="np", **options)
        order = self._cut(levels[None], 1)
        values = made["pixel_values"].reshape(*order.shape[:-3], self.group, *order.shape[-2:])
        table = np.empty((3, 256), np.float32)
        for channel in range(3):
            table[channel, order[..., channel, 0, :, :]] = values[..., channel, 0, :, :]
        self.table = torch.from_numpy(table)
        """What the image processor makes of the 256 values of each colour."""

    def __call__(self, frames: Iterable[Image.Image], size: tuple[int, int]) -> tuple[Tensor, tuple[int, int, int]]:
        """``[patches, values]``, and the number of groups of frames, of rows and of columns of patches.

        The last frame is repeated to fill its group. So is a picture, which is a single frame. Frames are taken one by
        one, so that they are not all in memory in full size.
        """
        levels, grid = self.levels(frames, size)
        return self.values(levels, self.table), grid

    def levels(self, frames: Iterable[Image.Image], size: tuple[int, int]) -> tuple[Tensor, tuple[int, int, int]]:
        """The same in bytes, before the table is applied. A picture is not repeated."""
        scaled = np.stack(
            [np.asarray(frame.resize((size[1], size[0]), self._resample)) for frame in of_one_size(frames)]
        )
        is_video = len(scaled) > 1
        if is_video:
            scaled = np.concatenate([scaled, scaled[-1:].repeat(-len(scaled) % self.group, axis=0)])
        cut = self._cut(scaled, self.group if is_video else 1)
        grid = (cut.shape[0], size[0] // self._patch, size[1] // self._patch)
        return torch.from_numpy(cut.reshape(math.prod(grid), -1)), grid

    def values(self, levels: Tensor, table: Tensor) -> Tensor:
        """``[patches, values]`` of ``levels``, in the type of ``table``, which is on the same device."""
        by_colour = levels.view(len(levels), 3, -1, self._patch**2)
        first = torch.arange(0, table.numel(), 256, dtype=torch.int32, device=levels.device)
        index = by_colour.int() + first[:, None, None]
        values = table.flatten().index_select(0, index.flatten()).view(by_colour.shape)
        return values.expand(-1, -1, self.group, -1).reshape(len(levels), -1)

    def _cut(self, frames: NDArray[np.uint8], group: int) -> NDArray[np.uint8]:
        """``[groups, rows, columns, rows of a token, columns of a token, 3, frames of a group, height, width]``."""
        height, width = (side // (self._patch * self._merge) for side in frames.shape[1:3])
        cut = frames.reshape(
            len(frames) // group, group, height, self._merge, self._patch, width, self._merge, self._patch, 3
        )
        return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
