"""Which tokens of a batch of prompts stand for images and videos, and their rotary positions. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.core.media import Media, MediaContent, rotary_positions


@dataclass(frozen=True)
class MediaPart:
    """Features of one image or video, ``first`` and those that follow it, and the tokens of a batch that take them.

    A chunk may begin or end in the middle of a picture.
    """

    content: MediaContent
    first: int
    places: NDArray[np.int64]
    """Indices of tokens of the batch, ascending."""


@dataclass(frozen=True)
class BatchMedia:
    """What is special about a batch in which a prompt has media."""

    parts: tuple[MediaPart, ...]
    rotary: NDArray[np.int64] | None
    """``[3, tokens]``: time, height and width of every token. ``None`` if no media have a grid."""

    @classmethod
    def of(cls, chunks: Sequence[tuple[Media, int, int]]) -> BatchMedia:
        """``chunks`` are the media of a prompt, which may have none, the first token to compute, and how many."""
        parts: list[MediaPart] = []
        rotary: list[NDArray[np.int64]] = []
        num_packed, has_grid = 0, False
        for media, start, count in chunks:
            end = start + count
            for item in media:
                places = item.places()
                first, last = np.searchsorted(places, (start, end)).tolist()
                if last > first:
                    parts.append(MediaPart(item.content, first, places[first:last] - start + num_packed))
            whole = max([end, *(item.end for item in media)])
            rotary.append(rotary_positions(whole, media)[:, start:end])
            has_grid |= any(any(block.grid) for item in media for block in item.blocks)
            num_packed += count
        return cls(tuple(parts), np.concatenate(rotary, axis=1) if has_grid else None)
