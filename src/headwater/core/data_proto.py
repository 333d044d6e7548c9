"""DataProto, the batch container that passes between the steps of training.

This module imports torch; the other modules of ``headwater.core`` do not need it.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase

from headwater.core.batch_file import StoredBatch, read_batch, write_batch
from headwater.core.columns import (
    ObjectArray,
    RowIndex,
    also_accepts,
    check_joinable,
    check_known,
    check_names,
    check_object_column,
    check_tensor_column,
    compact,
    describe,
    epoch_order,
    is_row_number,
    merge_equal,
    merge_metrics,
    object_column,
    row_number,
    row_positions,
    values_equal,
)
from headwater.core.verl_operations import AUTO_PADDING_KEY, VerlOperations

Tensors: TypeAlias = Mapping[str, torch.Tensor]
ObjectValues: TypeAlias = Sequence[Any] | npt.NDArray[Any]
Objects: TypeAlias = Mapping[str, ObjectValues]
Meta: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataProtoItem:
    """One row of a DataProto."""

    tensors: dict[str, torch.Tensor]
    non_tensors: dict[str, Any]
    meta_info: dict[str, Any]


class DataProto(VerlOperations):
    """A batch of rows: tensor columns, object columns, and metadata about the batch as a whole.

        data = DataProto.from_dict(
            tensors={"input_ids": torch.zeros(4, 16, dtype=torch.long)},
            non_tensors={"uid": ["a", "b", "c", "d"], "turns": [[1], [1, 2], [], [3]]},
            meta_info={"temperature": 1.0},
        )
        len(data)                                         # 4
        data[0].non_tensors["uid"]                        # "a"
        data[[3, 0]], data[1:], data[mask]                # DataProtos
        prompts = data.pop(batch_keys=["input_ids"])      # leaves uid and turns behind
        data = data.union(prompts).repeat(8)              # rows a a a ... b b b ...
        data = data.with_columns(tensors={"rewards": torch.zeros(32)})
        for batch in data.minibatches(size=8, epochs=2, seed=0): ...

    ``batch`` is a TensorDict with one batch dimension, the rows. ``non_tensor_batch`` maps names to one-dimensional
    object arrays, so a row may hold anything: a string, a ragged list, a dict, an image. A name belongs to one column.

    Operations return new DataProtos and do not modify this one, except ``pop``. A new DataProto may share memory with
    the old one, as slices of tensors do, so do not write into tensors in place. After changing ``batch`` or
    ``non_tensor_batch`` directly, call ``check_consistency``. Every operation except ``pad_to_divisor`` accepts a
    batch of 0 rows. Code written for verl finds verl's names for operations and arguments.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, ObjectArray]
    meta_info: dict[str, Any]

    def __init__(
        self, batch: TensorDict | None = None, non_tensor_batch: Objects | None = None, meta_info: Meta | None = None
    ) -> None:
        if batch is not None and not isinstance(batch, TensorDictBase):
            raise TypeError(f"batch is a {type(batch).__name__}; pass a TensorDict, or use DataProto.from_dict")
        if batch is not None and len(batch.batch_size) != 1:
            raise ValueError(f"batch_size = {tuple(batch.batch_size)}: a DataProto has one dimension, the rows")
        tensors = {} if batch is None else dict(batch.items())
        num_rows = None if batch is None else batch.batch_size[0]
        self._set_columns(tensors, non_tensor_batch or {}, meta_info or {}, num_rows)

    def _set_columns(self, tensors: Tensors, non_tensors: Objects, meta_info: Meta, num_rows: int | None) -> None:
        check_names(tensors, non_tensors)
        for name, tensor in tensors.items():
            check_tensor_column(name, tensor, num_rows)
            num_rows = tensor.shape[0]
        arrays = {name: object_column(name, values) for name, values in non_tensors.items()}
        for name, array in arrays.items():
            num_rows = len(array) if num_rows is None else num_rows
            check_object_column(name, array, num_rows)
        self.batch = TensorDict(dict(tensors), batch_size=[num_rows or 0])
        self.non_tensor_batch = arrays
        self.meta_info = dict(meta_info)

    @classmethod
    def _of(cls, tensors: Tensors, non_tensors: Objects, meta_info: Meta, num_rows: int | None) -> DataProto:
        data = cls.__new__(cls)
        data._set_columns(tensors, non_tensors, meta_info, num_rows)
        return data

    @classmethod
    def from_dict(
        cls,
        tensors: Tensors | None = None,
        non_tensors: Objects | None = None,
        meta_info: Meta | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch from columns, which must all have the same number of rows.

        With ``auto_padding``, ``chunk`` accepts a number of rows that the chunks cannot share equally.
        """
        padding = {AUTO_PADDING_KEY: True} if auto_padding else {}
        return cls._of(tensors or {}, non_tensors or {}, {**(meta_info or {}), **padding}, None)

    @classmethod
    @also_accepts(data="columns")
    def from_single_dict(
        cls,
        columns: Mapping[str, torch.Tensor | ObjectValues],
        meta_info: Meta | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch from mixed columns, as a collate function returns them. Non-tensors become objects."""
        tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
        others = {name: column for name, column in columns.items() if not isinstance(column, torch.Tensor)}
        return cls.from_dict(tensors, others, meta_info, auto_padding)

    @classmethod
    @also_accepts(data="parts")
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all parts. Parts have the same columns; their ``meta_info`` must not conflict.

        Only ``meta_info["metrics"]`` may differ: the result has a list of the values of all parts for each metric.
        """
        if not parts:
            raise ValueError("concat got no parts, so the columns are unknown; pass at least one DataProto")
        first = parts[0]
        meta_info: dict[str, Any] = {}
        for number, part in enumerate(parts):
            check_joinable(first._columns(), part._columns(), f"part {number}")
            remedy = f"make part {number} agree with the parts before it, or drop the key with select(meta_keys=...)"
            entries = {key: value for key, value in part.meta_info.items() if key != "metrics"}
            meta_info = merge_equal(meta_info, entries, "concat: meta_info", remedy)
        if any(part.meta_info.get("metrics") is not None for part in parts):
            meta_info["metrics"] = merge_metrics([part.meta_info.get("metrics") for part in parts])
        tensors = {name: torch.cat([part.batch[name] for part in parts]) for name in first._tensors()}
        arrays = {
            name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch
        }
        return cls._of(tensors, arrays, meta_info, sum(map(len, parts)))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.batch.items())

    def _columns(self) -> dict[str, torch.Tensor | ObjectArray]:
        return {**self._tensors(), **self.non_tensor_batch}

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: RowIndex) -> DataProto: ...
    def __getitem__(self, index: int | RowIndex) -> DataProtoItem | DataProto:
        if is_row_number(index):
            row = row_number(index, len(self))
            return DataProtoItem(
                tensors={name: tensor[row] for name, tensor in self.batch.items()},
                non_tensors={name: array[row] for name, array in self.non_tensor_batch.items()},
                meta_info=dict(self.meta_info),
            )
        assert not isinstance(index, int)
        if isinstance(index, slice) and (index.step is None or index.step > 0):
            return self._take(index)
        return self._take(row_positions(index, len(self)))

    def _take(self, rows: slice | torch.Tensor) -> DataProto:
        array_rows: Any
        devices = {tensor.device for tensor in self.batch.values()}
        if isinstance(rows, slice):
            array_rows, num_rows = rows, len(range(*rows.indices(len(self))))
            on_device: dict[torch.device, slice | torch.Tensor] = dict.fromkeys(devices, rows)
        else:
            array_rows, num_rows = rows.numpy(), len(rows)
            on_device = {device: rows.to(device) for device in devices}  # otherwise copied for every column
        tensors = {name: tensor[on_device[tensor.device]] for name, tensor in self.batch.items()}
        arrays = {name: array[array_rows] for name, array in self.non_tensor_batch.items()}
        return self._of(tensors, arrays, self.meta_info, num_rows)

    def with_columns(
        self, tensors: Tensors | None = None, non_tensors: Objects | None = None, meta_info: Meta | None = None
    ) -> DataProto:
        """Add columns and ``meta_info`` entries, replacing those with the same name."""
        return self._of(
            {**self._tensors(), **(tensors or {})},
            {**self.non_tensor_batch, **(non_tensors or {})},
            {**self.meta_info, **(meta_info or {})},
            # An empty DataProto() has no rows to match yet; one whose columns were popped still has.
            len(self) if len(self) or self._columns() else None,
        )

    @also_accepts(non_tensor_batch_keys="non_tensor_keys", meta_info_keys="meta_keys")
    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_keys: Sequence[str] | None = None,
        meta_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Keep only the named columns and ``meta_info`` entries; ``None`` keeps all of that kind.

        With ``deepcopy`` the result shares no memory with this batch.
        """
        tensors = _subset(self._tensors(), batch_keys, "batch_keys")
        arrays = _subset(self.non_tensor_batch, non_tensor_keys, "non_tensor_keys")
        meta_info = _subset(self.meta_info, meta_keys, "meta_keys")
        if deepcopy:
            # copy.deepcopy fails on tensors that autograd computed; clone works.
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            arrays, meta_info = copy.deepcopy((arrays, meta_info))
        return self._of(tensors, arrays, meta_info, len(self))

    @also_accepts(non_tensor_batch_keys="non_tensor_keys", meta_info_keys="meta_keys")
    def pop(
        self, batch_keys: Sequence[str] = (), non_tensor_keys: Sequence[str] = (), meta_keys: Sequence[str] = ()
    ) -> DataProto:
        """Remove the named columns and ``meta_info`` entries from this batch and return them as a new one.

        This is the only operation that modifies its batch. An unknown name raises before anything is removed.
        """
        popped = self.select(batch_keys, non_tensor_keys, meta_keys)
        for name in popped.batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            del self.batch[name]
        for name in popped.non_tensor_batch:
            del self.non_tensor_batch[name]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Combine the columns and ``meta_info`` of both batches. Entries that both have must be equal."""
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows; both batches need the same rows")
        remedy = "pop or rename it on one side before the union"
        return self._of(
            merge_equal(self._tensors(), other._tensors(), "union: tensor column", remedy),
            merge_equal(self.non_tensor_batch, other.non_tensor_batch, "union: object column", remedy),
            merge_equal(self.meta_info, other.meta_info, "union: meta_info", remedy),
            len(self),
        )

    @also_accepts(old_keys="old", new_keys="new")
    def rename(self, old: str | Sequence[str], new: str | Sequence[str]) -> DataProto:
        """Rename one column of either kind, or several at once."""
        olds, news = ([names] if isinstance(names, str) else list(names) for names in (old, new))
        columns = self._columns()
        check_known(olds, columns, "rename")
        if len(olds) != len(news) or len(set(olds)) != len(olds):
            raise ValueError(f"rename {olds} to {news}: give one new name for each column")
        names = {**{name: name for name in columns}, **dict(zip(olds, news, strict=True))}
        if taken := [name for name in news if list(names.values()).count(name) > 1]:
            raise ValueError(f"rename {old!r} to {new!r}: column {taken[0]!r} already exists; pop it first")
        tensors = {names[name]: tensor for name, tensor in self.batch.items()}
        arrays = {names[name]: array for name, array in self.non_tensor_batch.items()}
        return self._of(tensors, arrays, self.meta_info, len(self))

    @also_accepts(repeat_times="times")
    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Repeat every row: ``a a b b`` if interleaved, else ``a b a b``. Objects are shared, not copied."""
        _check_positive("times", times)
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    @also_accepts(chunks="num_chunks")
    def chunk(self, num_chunks: int) -> list[DataProto]:
        """Split into ``num_chunks`` parts with the same number of rows.

        With ``auto_padding`` (see ``from_dict``), the first parts have one row more where the number does not divide.
        """
        _check_positive("num_chunks", num_chunks)
        size, remainder = divmod(len(self), num_chunks)
        if remainder and not self.is_padding_enabled():
            raise ValueError(
                f"num_chunks = {num_chunks}: does not divide {len(self)} rows; "
                f"call pad_to_divisor({num_chunks}) first and unpad the result, or use split"
            )
        starts = [part * size + min(part, remainder) for part in range(num_chunks + 1)]
        return [self[start:stop] for start, stop in itertools.pairwise(starts)]

    @also_accepts(split_size="size")
    def split(self, size: int) -> list[DataProto]:
        """Split into parts of ``size`` rows; the last may be shorter. A batch of 0 rows gives one empty part."""
        _check_positive("size", size)
        return [self[start : start + size] for start in range(0, max(len(self), 1), size)]

    def reorder(self, indices: RowIndex) -> DataProto:
        """Reorder the rows. ``indices`` must contain each row once; use ``data[indices]`` to select any rows."""
        positions = row_positions(indices, len(self))
        if not torch.equal(positions.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"reorder: {len(positions)} indices do not name each of {len(self)} rows once; use data[indices] "
                "to leave out or repeat rows"
            )
        return self._take(positions)

    @also_accepts(size_divisor="divisor")
    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Repeat rows from the start until ``divisor`` divides their number. Returns the batch and the number added."""
        _check_positive("divisor", divisor)
        if not len(self):
            raise ValueError(f"pad_to_divisor({divisor}): 0 rows leave nothing to pad with; skip empty batches")
        pad_size = -len(self) % divisor
        return self._take(torch.arange(len(self) + pad_size) % len(self)), pad_size

    def unpad(self, pad_size: int) -> DataProto:
        """Remove the last ``pad_size`` rows."""
        if not 0 <= pad_size <= len(self):
            raise ValueError(f"pad_size = {pad_size}: must be in 0..{len(self)}, the number of rows")
        return self[: len(self) - pad_size]

    def minibatches(
        self, size: int, epochs: int = 1, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[DataProto]:
        """Iterate ``epochs`` times over the rows in batches of ``size``; the last batch is shorter or dropped.

        With a seed, each pass shuffles the rows in an order that depends only on the seed, the pass and the number of
        rows. Without a seed, the rows keep their order.
        """
        _check_positive("size", size)
        _check_positive("epochs", epochs)
        if seed is not None and seed < 0:
            raise ValueError(f"seed = {seed}: must be >= 0; use None to keep the rows in order")
        stop = len(self) - len(self) % size if drop_last else len(self)
        return (
            self._take(order[start : start + size])
            for order in (epoch_order(len(self), seed, epoch) for epoch in range(epochs))
            for start in range(0, stop, size)
        )

    def to(self, device: torch.device | str | int) -> DataProto:
        """Move the tensor columns to ``device``."""
        tensors = {name: tensor.to(device) for name, tensor in self.batch.items()}
        return self._of(tensors, self.non_tensor_batch, self.meta_info, len(self))

    def save(self, path: str | os.PathLike[str], allow_pickle: bool = False) -> None:
        """Write the batch to one file, atomically; ``core/batch_file.py`` describes the format.

        Objects other than numbers, strings, containers, arrays and tensors raise an error, unless ``allow_pickle``
        allows them to be pickled.
        """
        write_batch(path, StoredBatch(len(self), self._tensors(), self.non_tensor_batch, self.meta_info), allow_pickle)

    @classmethod
    def load(cls, path: str | os.PathLike[str], allow_pickle: bool = False) -> DataProto:
        """Read a file written by ``save``, onto the CPU. ``allow_pickle`` runs code from the file."""
        stored = read_batch(path, allow_pickle)
        return cls._of(stored.tensors, stored.arrays, stored.meta_info, stored.num_rows)

    def check_consistency(self) -> None:
        """Raise unless every column has the right type, a unique name and the number of rows of the batch."""
        if len(self.batch.batch_size) != 1:
            raise ValueError(f"batch_size = {tuple(self.batch.batch_size)}: a DataProto has one dimension, the rows")
        check_names(self.batch.keys(), self.non_tensor_batch)
        for name, tensor in self.batch.items():
            check_tensor_column(name, tensor, len(self))
        for name, array in self.non_tensor_batch.items():
            check_object_column(name, array, len(self))

    def equals(self, other: DataProto) -> bool:
        """Return whether both have the same rows, columns, dtypes and ``meta_info``; devices and order are ignored."""
        return (
            len(self) == len(other)
            and values_equal(self._tensors(), other._tensors())
            and values_equal(self.non_tensor_batch, other.non_tensor_batch)
            and values_equal(self.meta_info, other.meta_info)
        )

    def __repr__(self) -> str:
        lines = [f"DataProto({len(self)} rows)"]
        lines += [f"  {describe(name, column)}" for name, column in self._columns().items()]
        lines.append(f"  meta_info: {', '.join(map(str, self.meta_info)) or 'none'}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        """Return plain columns without gradients. A slice of a batch pickles only its own rows."""
        return {
            "tensors": {name: compact(tensor) for name, tensor in self.batch.items()},
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
            "num_rows": len(self),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_columns(**state)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value}: must be >= 1")


def _subset(entries: Mapping[str, Any], keys: Sequence[str] | None, kind: str) -> dict[str, Any]:
    return dict(entries) if keys is None else {key: entries[key] for key in check_known(keys, entries, kind)}
