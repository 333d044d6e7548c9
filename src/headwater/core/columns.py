"""The columns of a DataProto: which values are allowed, when two columns are equal, and how rows are indexed.

A tensor column is a plain tensor whose first dimension is the rows. An object column is a one-dimensional numpy array
of dtype ``object``, whatever its rows hold: a column of equally long lists stays a column of lists.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

ObjectArray: TypeAlias = npt.NDArray[np.object_]
P = ParamSpec("P")
T = TypeVar("T")

RowIndex: TypeAlias = slice | Sequence[int] | npt.NDArray[Any] | torch.Tensor
"""An index that selects a batch: positions, or a mask with one boolean per row."""


def also_accepts(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function accept further names of its keyword arguments: ``@also_accepts(repeat_times="times")``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> T:
            for other in names.keys() & kwargs.keys():
                if names[other] in kwargs:
                    raise TypeError(f"{function.__name__} got {names[other]} and {other}, which are the same argument")
                kwargs[names[other]] = kwargs.pop(other)
            return function(*args, **kwargs)

        return renamed

    return decorate


def object_column(name: str, values: Any) -> ObjectArray:
    """Convert ``values`` to a one-dimensional object array. An array with more dimensions becomes one array per row."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ValueError(f"column {name!r}: a 0-d array has no rows; pass a list with one value per row")
        if values.ndim == 1 and values.dtype == object:
            return values
        # astype converts numbers and strings to Python values, but would turn nanosecond dates into integers.
        if values.ndim == 1 and values.dtype.kind in "biufcSU":
            return values.astype(object)
    elif isinstance(values, torch.Tensor):
        raise TypeError(f"column {name!r} is a tensor; pass it with the tensors, not with the non-tensors")
    elif isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"column {name!r} is a {type(values).__name__}; pass a list or array with one value per row")
    column = np.empty(len(values), dtype=object)
    # Assign row by row: given the whole list, numpy would treat equally long lists as a second dimension.
    for row, value in enumerate(values):
        column[row] = value
    return column


def check_tensor_column(name: str, value: Any, num_rows: int | None = None) -> None:
    """Raise unless ``value`` is a plain tensor with ``num_rows`` rows (any number where ``None``)."""
    if not isinstance(value, torch.Tensor):
        remedy = (
            "nested TensorDicts are not supported, flatten it into separate columns"
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
    """Raise if a name is not a string, or names both a tensor column and an object column."""
    tensor_names = list(tensors)
    array_names = list(arrays)
    for name in (*tensor_names, *array_names):
        if not isinstance(name, str):
            raise TypeError(f"column name {name!r} is a {type(name).__name__}; names are strings")
    if both := sorted(set(tensor_names) & set(array_names)):
        raise ValueError(f"column {both[0]!r} is both a tensor and an object column; rename one of them")


def check_known(keys: Sequence[str], known: Iterable[str], kind: str) -> list[str]:
    """Check that every key is one of ``known`` and return the keys without repeats."""
    if isinstance(keys, str):
        raise TypeError(f"{kind} = {keys!r}: pass a list of names, [{keys!r}]")
    known = list(known)
    for key in keys:
        if key not in known:
            raise KeyError(f"{kind}: no {key!r}; known: {', '.join(map(str, known)) or 'none'}")
    return list(dict.fromkeys(keys))


def check_joinable(first: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> None:
    """Raise unless two batches have the same columns. (torch.cat would widen dtypes and would not name the column.)"""
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
    """Return one line that describes the column: name, dtype, shape, and device or element types."""
    if isinstance(column, torch.Tensor):
        return f"{name}: {str(column.dtype).removeprefix('torch.')} {tuple(column.shape)} on {column.device}"
    types = sorted({type(value).__name__ for value in column})
    return f"{name}: object {column.shape} of {' | '.join(types) or 'nothing'}"


def merge_equal(left: Mapping[str, Any], right: Mapping[str, Any], kind: str, remedy: str) -> dict[str, Any]:
    """Merge two mappings. A key that both have must have equal values."""
    for key in right:
        if key in left and not values_equal(left[key], right[key]):
            difference = f"{reprlib.repr(left[key])} and {reprlib.repr(right[key])}"
            raise ValueError(f"{kind} {key!r} has two different values, {difference}; {remedy}")
    return {**left, **right}


def merge_metrics(parts: Sequence[Any]) -> dict[str, list[Any]]:
    """Return a list of values for each metric of the parts: mappings, lists of mappings, or None.

    A value that is a list counts as several values, so that the result does not depend on what was merged first.
    """
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for metrics in [] if part is None else part if isinstance(part, (list, tuple)) else [part]:
            if not isinstance(metrics, Mapping):
                raise TypeError(
                    f'meta_info["metrics"] is a {type(metrics).__name__}; must be a mapping or a list of them'
                )
            for name, value in metrics.items():
                merged.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return merged


def values_equal(left: Any, right: Any) -> bool:
    """Return whether both values have the same type and content. NaN equals NaN.

    Containers, arrays and dataclasses are compared element by element, also if they contain themselves. The device of a
    tensor is ignored.
    """
    pairs = [(left, right)]
    # A pair of containers is compared once: a container that contains itself would never end. The values are kept, so
    # that no other object gets the id of one that was freed.
    compared: dict[tuple[int, int], tuple[Any, Any]] = {}
    while pairs:
        pair = pairs.pop()
        if pair[0] is pair[1] or compared.get((id(pair[0]), id(pair[1]))) is not None:
            continue
        inner = _inner_pairs(*pair)
        if inner is None:
            return False
        if inner:
            compared[id(pair[0]), id(pair[1])] = pair
            pairs += inner
    return True


def _inner_pairs(left: Any, right: Any) -> list[tuple[Any, Any]] | None:
    """Return the pairs of values that must be equal for both to be equal; None if they are different."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if _tensors_equal(left, right) else None
    if type(left) is not type(right):
        return None
    if isinstance(left, np.ndarray):
        if left.dtype == right.dtype == object and left.shape == right.shape:
            return list(zip(left.flat, right.flat, strict=True))
        return [] if _arrays_equal(left, right) else None
    if isinstance(left, Mapping):
        return [(left[key], right[key]) for key in left] if left.keys() == right.keys() else None
    if isinstance(left, (list, tuple)):
        return list(zip(left, right, strict=True)) if len(left) == len(right) else None
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return [(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)]
    if isinstance(left, (float, complex, np.inexact)) and left != left:
        return [] if right != right else None
    try:
        return [] if left == right else None
    except RecursionError:  # the comparison of a type that is not known here, which contains itself
        return None


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
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous and with its own storage, because pickling a view writes the whole storage."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_row_number(index: Any) -> bool:
    """Return whether ``index`` selects one row: a Python or numpy integer, or an array or tensor without dimensions."""
    if isinstance(index, (np.ndarray, torch.Tensor)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer, np.bool_))


def row_number(index: Any, num_rows: int) -> int:
    """Return the row that ``index`` selects. Negative numbers count from the end."""
    is_bool = isinstance(index, (bool, np.bool_)) or getattr(index, "dtype", None) in (np.bool_, torch.bool)
    try:
        if is_bool:
            raise TypeError
        row = operator.index(index)
    except TypeError as error:
        raise TypeError(
            f"index {index!r} is not a row number; use an integer, or a mask of {num_rows} booleans"
        ) from error
    if not -num_rows <= row < num_rows:
        raise IndexError(f"row {row} is out of range for a batch of {num_rows} rows")
    return row % num_rows


def row_positions(index: RowIndex, num_rows: int) -> torch.Tensor:
    """Return the rows that ``index`` selects, in its order, as non-negative int64 positions on the CPU."""
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
    """Return the positions of all rows in the order of one epoch. Without a seed the rows keep their order."""
    if seed is None:
        return torch.arange(num_rows)
    # numpy guarantees the stream of RandomState across versions, so a resumed run keeps its order after an upgrade.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return torch.from_numpy(np.random.RandomState(bits).permutation(num_rows))
