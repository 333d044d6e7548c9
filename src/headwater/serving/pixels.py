"""How many pixels a client may have decoded. A small file can announce a large picture, and a request can hold many."""

from __future__ import annotations

from headwater.core.errors import DataError
from headwater.data.pictures import check_size
from headwater.serving.reading import check_client

MAX_REQUEST_PIXELS = 1 << 30
"""1024 pictures of the default of ``data.max_image_pixels``."""
MAX_VIDEO_PIXELS = 1 << 28
"""256 frames of the same size. All frames of a video are in memory at once."""


class PixelBudget:
    """Is called with the size of every picture before it is decoded, and refuses the one that is too much."""

    def __init__(self, max_pixels: int, owner: str) -> None:
        """``owner`` is what the pictures belong to, for messages."""
        self._max_pixels = max_pixels
        self._owner = owner
        self._num_left = max_pixels

    def __call__(self, size: tuple[int, int], where: str) -> None:
        check_client()
        check_size(size, where)
        self._num_left -= size[0] * size[1]
        if self._num_left < 0:
            raise DataError(
                f"{where}: the pictures of {self._owner} have more than {self._max_pixels} pixels in total; send fewer "
                "or smaller ones"
            )
