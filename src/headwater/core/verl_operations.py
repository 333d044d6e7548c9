"""Operations of a DataProto under the names that code written for verl uses.

Every method here is a combination of the operations in ``data_proto.py``. ``docs/coming-from-verl.md`` lists them,
together with the operations that modify their batch in verl and return a new one here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from headwater.core.columns import ObjectArray, RowIndex, check_known, describe

AUTO_PADDING_KEY = "auto_padding"
"""The entry of ``meta_info`` with which ``chunk`` accepts a number of rows that the chunks cannot share equally."""


class VerlOperations:
    """A mixin: the methods of verl's DataProto that have another name or no counterpart in ``DataProto``."""

    batch: TensorDict
    non_tensor_batch: dict[str, ObjectArray]
    meta_info: dict[str, Any]

    if TYPE_CHECKING:

        def __len__(self) -> int: ...
        def __getitem__(self, index: Any) -> Any: ...
        @classmethod
        def _of(cls, tensors: Any, non_tensors: Any, meta_info: Any, num_rows: int | None) -> Any: ...
        def minibatches(self, size: int, epochs: int = 1, seed: int | None = None, drop_last: bool = False) -> Any: ...
        def save(self, path: Any, allow_pickle: bool = False) -> None: ...
        @classmethod
        def load(cls, path: Any, allow_pickle: bool = False) -> Any: ...

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Select rows by position or by mask, as ``data[idxs]`` does."""
        selected: Self = self[idxs]
        return selected

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Select the rows of ``data[start:end:step]``."""
        selected: Self = self[slice(start, end, step)]
        return selected

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray[Any, Any]) -> Self:
        """Repeat row ``i`` ``repeat_times[i]`` times. A row that is repeated 0 times is left out."""
        counts = torch.as_tensor(repeat_times).cpu()
        if counts.ndim != 1 or len(counts) != len(self):
            raise ValueError(
                f"repeat_times has the shape {tuple(counts.shape)}: must hold one count for each of {len(self)} rows"
            )
        if len(counts) and (counts.is_floating_point() or counts.dtype == torch.bool or int(counts.min()) < 0):
            raise ValueError(f"repeat_times = {counts.tolist()}: must be whole numbers >= 0")
        repeated: Self = self[torch.arange(len(self)).repeat_interleave(counts.long())]
        return repeated

    def padding(self, padding_size: int, padding_candidate: str = "first") -> Self:
        """Append ``padding_size`` copies of the ``first`` or the ``last`` row."""
        if padding_candidate not in ("first", "last"):
            raise ValueError(f"padding_candidate = {padding_candidate!r}: must be 'first' or 'last'")
        if padding_size < 0 or (padding_size and not len(self)):
            raise ValueError(f"padding_size = {padding_size}: must be >= 0, and 0 for a batch of 0 rows")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded: Self = self[torch.cat([torch.arange(len(self)), torch.full((padding_size,), row)])]
        return padded

    def union_or_override(self, other: Self) -> Self:
        """Combine the columns and ``meta_info`` of both batches. Where both have an entry, take that of ``other``."""
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows; both batches need the same rows")
        # A column of other may replace one of the other kind.
        replaced = {*other.batch.keys(), *other.non_tensor_batch}
        tensors = {name: tensor for name, tensor in self.batch.items() if name not in replaced}
        arrays = {name: array for name, array in self.non_tensor_batch.items() if name not in replaced}
        union: Self = self._of(
            {**tensors, **dict(other.batch.items())},
            {**arrays, **other.non_tensor_batch},
            {**self.meta_info, **other.meta_info},
            len(self),
        )
        return union

    def is_padding_enabled(self) -> bool:
        """Return whether the batch was built with ``auto_padding``, so that ``chunk`` may return unequal parts."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Split every row into ``n_split`` rows.

        The second dimension of the columns ``split_keys`` is split into ``n_split`` equal chunks, one for each new
        row; ``None`` means every tensor column with a second dimension. Other columns are repeated.
        """
        if n_split < 1:
            raise ValueError(f"n_split = {n_split}: must be >= 1")
        known = {**dict(self.batch.items()), **self.non_tensor_batch}
        keys = None if split_keys is None else check_known(split_keys, known, "split_keys")
        rows = torch.arange(len(self)).repeat_interleave(n_split)
        tensors = {}
        for name, tensor in self.batch.items():
            if name in keys if keys is not None else tensor.ndim > 1:
                tensors[name] = _split_columns(name, tensor, n_split)
            else:
                tensors[name] = tensor[rows]
        arrays = {}
        for name, array in self.non_tensor_batch.items():
            arrays[name] = _split_cells(name, array, n_split) if keys and name in keys else array[rows.numpy()]
        unfolded: Self = self._of(tensors, arrays, self.meta_info, len(rows))
        return unfolded

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches that all have ``mini_batch_size`` rows, which must divide the number of rows.

        ``dataloader_kwargs`` may set ``shuffle`` and ``drop_last``. Shuffling needs a seed, and without it the seed
        has no effect, as in verl. ``minibatches`` accepts any number of rows.
        """
        options = dict(dataloader_kwargs or {})
        shuffle, drop_last = bool(options.pop("shuffle", False)), bool(options.pop("drop_last", False))
        if options:
            raise ValueError(f"dataloader_kwargs: no {next(iter(options))!r}; known: shuffle, drop_last")
        if shuffle and seed is None:
            raise ValueError("dataloader_kwargs: shuffle needs a seed; pass seed=...")
        if mini_batch_size < 1 or (len(self) % mini_batch_size and not drop_last):
            raise ValueError(
                f"mini_batch_size = {mini_batch_size}: does not divide {len(self)} rows; use minibatches, or drop_last"
            )
        iterator: Iterator[Self] = self.minibatches(mini_batch_size, epochs, seed if shuffle else None, drop_last)
        return iterator

    def to_tensordict(self) -> TensorDict:
        """Return all columns and ``meta_info`` as one TensorDict.

        An object column becomes a ``NonTensorStack``, an entry of ``meta_info`` a ``NonTensorData``.
        """
        entries: dict[str, Any] = dict(self.batch.items())
        for name, array in self.non_tensor_batch.items():
            if not len(array):
                raise ValueError(f"to_tensordict: object column {name!r} has 0 rows, which a TensorDict cannot hold")
            entries[name] = NonTensorStack(*[NonTensorData(value) for value in array])
        for key, value in self.meta_info.items():
            if not isinstance(key, str) or key in entries:
                raise ValueError(f"to_tensordict: meta_info {key!r} must be a string that no column is called; pop it")
            entries[key] = NonTensorData(value, batch_size=[len(self)])
        return TensorDict(entries, batch_size=[len(self)])

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> Self:
        """Build a batch from a TensorDict with one batch dimension; the inverse of ``to_tensordict``.

        Values that differ by row (``NonTensorStack``) become object columns; a value for the whole batch
        (``NonTensorData``) becomes an entry of ``meta_info``. Entries of the argument ``meta_info`` replace it.
        """
        if len(tensor_dict.batch_size) != 1:
            raise ValueError(f"batch_size = {tuple(tensor_dict.batch_size)}: a DataProto has one dimension, the rows")
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        entries: dict[str, Any] = {}
        for name in tensor_dict.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
            value = tensor_dict.get(name)
            if isinstance(value, NonTensorStack):
                arrays[name] = [item.data for item in value.tensordicts]
            elif isinstance(value, NonTensorData):
                entries[name] = value.data
            else:
                tensors[name] = value
        data: Self = cls._of(tensors, arrays, {**entries, **(meta_info or {})}, int(tensor_dict.batch_size[0]))
        return data

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write the batch to one file. Unlike in verl, it is not a pickle; see ``save``, which can allow pickles."""
        self.save(filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read a file written by ``save_to_disk`` or ``save``."""
        data: Self = cls.load(filepath)
        return data

    def get_data_info(self) -> str:
        """Return one line per column: name, dtype or element types, shape and device; and the types in meta_info."""
        columns = {**dict(self.batch.items()), **self.non_tensor_batch}
        lines = [describe(name, column) for name, column in columns.items()]
        lines += [f"meta_info {key}: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Print the memory that the columns use. For object columns only the references are counted."""
        tensors = sum(tensor.element_size() * tensor.numel() for _, tensor in self.batch.items())
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values())
        start = f"{prefix}, " if prefix else ""
        sizes = f"tensors {tensors / 2**30:.6g} GiB, object references {arrays / 2**30:.6g} GiB"
        print(f"{start}{len(self)} rows: {sizes}")  # noqa: T201 - printing is what it is for


def _split_columns(name: str, tensor: torch.Tensor, n_split: int) -> torch.Tensor:
    if tensor.ndim < 2 or tensor.shape[1] % n_split:
        raise ValueError(
            f"unfold_column_chunks: column {name!r} has the shape {tuple(tensor.shape)}; its second dimension cannot "
            f"be split into {n_split} equal chunks"
        )
    return tensor.reshape(tensor.shape[0] * n_split, tensor.shape[1] // n_split, *tensor.shape[2:])


def _split_cells(name: str, array: ObjectArray, n_split: int) -> list[Any]:
    cells = []
    for row, cell in enumerate(array):
        if not isinstance(cell, (list, tuple, np.ndarray)) or len(cell) % n_split:
            raise ValueError(
                f"unfold_column_chunks: column {name!r}, row {row} is not a list that can be split into {n_split} "
                "equal chunks"
            )
        size = len(cell) // n_split
        cells += [cell[part * size : (part + 1) * size] for part in range(n_split)]
    return cells
