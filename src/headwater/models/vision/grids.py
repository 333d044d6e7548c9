"""Where the patches of a picture are, and which of them attend to one another, for Qwen's vision towers.

Everything here follows from the grid of a picture, so it is made once per grid, on the host. A tower that reads grids
from the device would wait for it several times in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""Groups of frames, and rows and columns of patches."""


@dataclass(frozen=True)
class GridShape:
    """What a tower does with grids."""

    merge_size: int
    """Side of the square of patches that become one token."""
    window_tokens: int = 0
    """Side of a window of attention in tokens; 0 for a tower without windows."""
    table_side: int = 0
    """Side of the square table of learned positions; 0 for a tower without one."""


@dataclass(frozen=True)
class PatchLayout:
    """The patches of one picture or of several, in the order in which the tower computes them, windows one by one."""

    order: NDArray[np.int64]
    """For each token, its number in the order of the picture."""
    places: NDArray[np.int64]
    """``[2, patches]``: row and column of each patch."""
    windows: NDArray[np.int64]
    """Patches of each window, or of each frame if there are no windows."""
    frames: NDArray[np.int64]
    """Patches of each frame."""
    taps: NDArray[np.int64]
    """``[patches, 4]``: the learned positions around each patch. No columns for a tower without them."""
    shares: NDArray[np.float32]
    """``[patches, 4]``: the weight of each of them."""

    @classmethod
    def of(cls, grids: Sequence[Grid], shape: GridShape) -> PatchLayout:
        """The layout of pictures one after the other."""
        parts = [_layout(grid, shape) for grid in grids]
        firsts = np.cumsum([0, *(len(each.order) for each in parts[:-1])])
        return cls(
            order=np.concatenate([part.order + first for part, first in zip(parts, firsts, strict=True)]),
            places=np.concatenate([each.places for each in parts], axis=1),
            windows=np.concatenate([each.windows for each in parts]),
            frames=np.concatenate([each.frames for each in parts]),
            taps=np.concatenate([each.taps for each in parts]),
            shares=np.concatenate([each.shares for each in parts]),
        )

    def patch_order(self, shape: GridShape) -> NDArray[np.int64]:
        """``order`` for patches. The patches of a token stay together."""
        size = shape.merge_size**2
        patches: NDArray[np.int64] = (self.order[:, None] * size + np.arange(size)).reshape(-1)
        return patches

    def token_places(self) -> NDArray[np.int64]:
        """The inverse of ``order``: for each token of the picture, where it is computed."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places


@lru_cache(maxsize=32)
def _layout(grid: Grid, shape: GridShape) -> PatchLayout:
    num_frames, height, width = grid
    merge = shape.merge_size
    by_token = (height // merge, merge, width // merge, merge)
    place = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"))
    place = place.reshape(2, *by_token).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    token_grid = num_frames, by_token[0], by_token[2]
    tokens = np.stack(np.meshgrid(*map(np.arange, token_grid), indexing="ij")).reshape(3, -1)
    frames = np.full(num_frames, height * width)
    order, windows = np.arange(tokens.shape[1]), frames
    if shape.window_tokens:
        side = shape.window_tokens
        rows, columns = (-(-size // side) for size in (by_token[0], by_token[2]))
        window = (tokens[0] * rows + tokens[1] // side) * columns + tokens[2] // side
        order = np.argsort(window, kind="stable")
        windows = np.bincount(window) * merge**2
    places = np.tile(place, num_frames).reshape(2, len(order), -1)[:, order].reshape(2, -1)
    taps, shares = _positions(place, (height, width), shape.table_side)
    return PatchLayout(order, places, windows, frames, np.tile(taps, (num_frames, 1)), np.tile(shares, (num_frames, 1)))


def _positions(
    place: NDArray[np.int64], size: tuple[int, int], side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Linear interpolation in a table of ``side`` by ``side`` positions, whose corners are those of the picture."""
    if not side:
        return np.zeros((place.shape[1], 0), np.int64), np.zeros((place.shape[1], 0), np.float32)
    taps, shares = [], []
    for axis in range(2):
        exact = place[axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size[axis] - 1, 1))
        low = np.floor(exact).astype(np.int64)
        taps.append(np.stack([low, np.minimum(low + 1, side - 1)], axis=1))
        part = (exact - low).astype(np.float32)
        shares.append(np.stack([1 - part, part], axis=1))
    both = taps[0][:, :, None] * side + taps[1][:, None, :]
    weight = shares[0][:, :, None] * shares[1][:, None, :]
    return both.reshape(-1, 4), weight.reshape(-1, 4)
