"""Which rows an index means, and the order in which an epoch visits them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

RowIndex: TypeAlias = slice | Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""Any index that gives a batch: positions, or a mask of one boolean per row."""


def is_row_number(index: Any) -> bool:
    """Whether an index means one row: an integer, also numpy's, or an array or tensor without dimensions."""
    if isinstance(index, (np.ndarray, torch.Tensor)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer, np.bool_))


def row_number(index: Any, num_rows: int) -> int:
    """The row an integer means; negative ones count from the end."""
    is_bool = isinstance(index, (bool, np.bool_)) or getattr(index, "dtype", None) in (np.bool_, torch.bool)
    try:
        if is_bool:
            raise TypeError
        row = operator.index(index)
    except TypeError as error:
        raise TypeError(
            f"index {index!r} is no row number; use an integer, or a mask of {num_rows} booleans"
        ) from error
    if not -num_rows <= row < num_rows:
        raise IndexError(f"row {row} is out of range for a batch of {num_rows} rows")
    return row % num_rows


def row_positions(index: RowIndex, num_rows: int) -> torch.Tensor:
    """The rows an index means, in its order, as non-negative int64 positions on the CPU."""
    if isinstance(index, slice):
        return torch.arange(num_rows)[list(range(*index.indices(num_rows)))]
    array = _as_array(index)
    if array.ndim != 1:
        raise IndexError(f"an index of shape {array.shape} has {array.ndim} dimensions; rows are indexed by one")
    if array.dtype == np.bool_:
        if len(array) != num_rows:
            raise IndexError(f"a mask of {len(array)} booleans does not fit a batch of {num_rows} rows")
        return torch.from_numpy(np.flatnonzero(array))
    if array.dtype.kind not in "iu":
        raise TypeError(f"an index of dtype {array.dtype}; use integers or booleans")
    outside = array[(array < -num_rows) | (array >= num_rows)]
    if len(outside):
        raise IndexError(f"row {outside[0]} is out of range for a batch of {num_rows} rows")
    positions = array.astype(np.int64)
    return torch.from_numpy(np.where(positions < 0, positions + num_rows, positions))


def _as_array(index: Any) -> npt.NDArray[Any]:
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    if isinstance(index, np.ndarray):
        return index
    if not isinstance(index, (list, range)):
        remedy = (
            f"read a column with data.batch[{index!r}] or data.non_tensor_batch[{index!r}]"
            if isinstance(index, str)
            else "use an integer, a slice, or a list, array or tensor of one dimension"
        )
        raise TypeError(f"a DataProto is not indexed by {type(index).__name__}; {remedy}")
    # An empty list would become an array of floats.
    return np.asarray(index) if len(index) else np.empty(0, dtype=np.int64)


def epoch_order(num_rows: int, seed: int | None, epoch: int) -> torch.Tensor:
    """The positions of all rows in the order of one epoch; without a seed, their own order."""
    if seed is None:
        return torch.arange(num_rows)
    # RandomState, not default_rng: numpy freezes its stream, so a resumed run keeps its order after an upgrade.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return torch.from_numpy(np.random.RandomState(bits).permutation(num_rows))
