"""The columns of a DataProto: what may be one, and when two hold the same values.

A tensor column is a plain tensor whose first dimension is the rows. An object column is a one-dimensional numpy array
of dtype ``object``, whatever its rows hold: a column of equally long lists stays a column of lists.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ObjectArray: TypeAlias = npt.NDArray[np.object_]


def object_column(name: str, values: Any) -> ObjectArray:
    """``values`` as a one-dimensional object array; arrays of more dimensions become one array per row."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ValueError(f"column {name!r}: a 0-d array has no rows; pass a list with one value per row")
        if values.ndim == 1 and values.dtype == object:
            return values
        # astype makes Python values of numbers and strings, but plain integers of nanosecond dates.
        if values.ndim == 1 and values.dtype.kind in "biufcSU":
            return values.astype(object)
    elif isinstance(values, torch.Tensor):
        raise TypeError(f"column {name!r} is a tensor; pass it with the tensors, not with the non-tensors")
    elif isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"column {name!r} is a {type(values).__name__}; pass a list or array with one value per row")
    column = np.empty(len(values), dtype=object)
    # Row by row: assigning the whole list would let numpy take equally long lists for a second dimension.
    for row, value in enumerate(values):
        column[row] = value
    return column


def check_tensor_column(name: str, value: Any, num_rows: int | None = None) -> None:
    """Raise unless ``value`` is a plain tensor with ``num_rows`` rows (any number where ``None``)."""
    if not isinstance(value, torch.Tensor):
        remedy = (
            "nested TensorDicts are not supported, flatten it into columns of its own"
            if isinstance(value, Mapping) or hasattr(value, "batch_size")
            else "convert it with torch.as_tensor, or pass it with the non-tensors"
        )
        raise TypeError(f"tensor column {name!r} is a {type(value).__name__}; {remedy}")
    if value.is_nested or value.layout is not torch.strided:
        raise TypeError(f"tensor column {name!r} is nested or sparse; pad it, or pass a list of tensors as non-tensors")
    if value.ndim == 0:
        raise ValueError(f"tensor column {name!r} is a scalar; it needs a first dimension of one entry per row")
    check_num_rows(name, value.shape[0], num_rows)


def check_object_column(name: str, value: Any, num_rows: int) -> None:
    """Raise unless ``value`` is a one-dimensional object array with ``num_rows`` rows."""
    if not isinstance(value, np.ndarray) or value.dtype != object or value.ndim != 1:
        found = f"{value.dtype} array of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"object column {name!r} is a {found}, not a 1-D object array; set columns with with_columns")
    check_num_rows(name, len(value), num_rows)


def check_num_rows(name: str, found: int, num_rows: int | None) -> None:
    if num_rows is not None and found != num_rows:
        raise ValueError(f"column {name!r} has {found} rows, the batch has {num_rows}; every column needs one per row")


def check_names(tensors: Iterable[Any], arrays: Iterable[Any]) -> None:
    """Raise where a name is no string, or names both a tensor and an object column."""
    tensor_names = list(tensors)
    array_names = list(arrays)
    for name in (*tensor_names, *array_names):
        if not isinstance(name, str):
            raise TypeError(f"column name {name!r} is a {type(name).__name__}; names are strings")
    if both := sorted(set(tensor_names) & set(array_names)):
        raise ValueError(f"column {both[0]!r} is both a tensor and an object column; rename one of them")


def check_known(keys: Sequence[str], known: Iterable[str], kind: str) -> list[str]:
    """``keys`` without repeats, after checking that each is one of ``known``."""
    if isinstance(keys, str):
        raise TypeError(f"{kind} = {keys!r}: pass a list of names, [{keys!r}]")
    known = list(known)
    for key in keys:
        if key not in known:
            raise KeyError(f"{kind}: no {key!r}; known: {', '.join(map(str, known)) or 'none'}")
    return list(dict.fromkeys(keys))


def check_joinable(first: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> None:
    """Raise unless two batches have the same columns. torch would widen dtypes, and would name no column."""
    if first.keys() != other.keys():
        lacks, adds = sorted(first.keys() - other.keys()), sorted(other.keys() - first.keys())
        raise ValueError(
            f"concat: {other_name} lacks columns {lacks} and adds {adds}, compared with part 0; select the common ones"
        )
    for name, column in first.items():
        ours, theirs = _row_type(column), _row_type(other[name])
        if ours != theirs:
            raise ValueError(
                f"concat: column {name!r} is {theirs} in {other_name} and {ours} in part 0; pad, convert or move it"
            )


def _row_type(column: torch.Tensor | ObjectArray) -> str:
    if isinstance(column, np.ndarray):
        return "objects"
    return f"{str(column.dtype).removeprefix('torch.')} {tuple(column.shape[1:])} per row on {column.device}"


def describe(name: str, column: torch.Tensor | ObjectArray) -> str:
    """One line for people: name, dtype, shape, and where or of what it is."""
    if isinstance(column, torch.Tensor):
        return f"{name}: {str(column.dtype).removeprefix('torch.')} {tuple(column.shape)} on {column.device}"
    types = sorted({type(value).__name__ for value in column})
    return f"{name}: object {column.shape} of {' | '.join(types) or 'nothing'}"


def merge_equal(left: Mapping[str, Any], right: Mapping[str, Any], kind: str, remedy: str) -> dict[str, Any]:
    """Both mappings as one. A key of both is fine where its values are equal and an error where they differ."""
    for key in right:
        if key in left and not values_equal(left[key], right[key]):
            difference = f"{reprlib.repr(left[key])} and {reprlib.repr(right[key])}"
            raise ValueError(f"{kind} {key!r} has two different values, {difference}; {remedy}")
    return {**left, **right}


def values_equal(left: Any, right: Any) -> bool:
    """Same type and same value, looking inside containers, arrays and dataclasses; NaN equals NaN.

    The device of a tensor is not compared.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _tensors_equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return _arrays_equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(values_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(values_equal, left, right))
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        names = [field.name for field in dataclasses.fields(left)]
        return all(values_equal(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, (float, complex, np.inexact)) and left != left:
        return bool(right != right)
    return bool(left == right)


def _tensors_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _arrays_equal(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(values_equal, left.flat, right.flat))
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and alone in its storage: pickling a view would write all that it is a view of."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
