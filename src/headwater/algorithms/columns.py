"""Columns that only some algorithms need."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headwater.core.errors import MissingColumn


def require(value: Tensor | None, column: str, needed_by: str, remedy: str) -> Tensor:
    """``value``, or an error that names the column, who needs it and what provides it."""
    if value is None:
        raise MissingColumn(f"{needed_by} needs the column {column!r}, which the batch does not have; {remedy}")
    return value


def required(columns: Mapping[str, Tensor], column: str, needed_by: str, remedy: str) -> Tensor:
    """The column of a batch, or the error of ``require``."""
    return require(columns.get(column, None), column, needed_by, remedy)


def check_shapes(shape: tuple[int, ...], **columns: Tensor | None) -> None:
    """Every column that is given must have ``shape``."""
    for name, value in columns.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the mask {shape}")
