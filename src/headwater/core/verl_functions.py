"""Functions on a DataProto under the names that code written for verl imports from ``verl.protocol``."""

from __future__ import annotations

from headwater.core.data_proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """``data.pad_to_divisor`` under verl's name."""
    return data.pad_to_divisor(size_divisor)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """``data.unpad`` under verl's name."""
    return data.unpad(pad_size)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Group the rows into ``new_batch_size`` rows of equally many: a tensor (6, 5) folded to 2 rows is (2, 3, 5).

    A row of an object column becomes an array of the objects that it groups.
    """
    if new_batch_size < 1:
        raise ValueError(f"new_batch_size = {new_batch_size}: must be >= 1")
    size, remainder = divmod(len(data), new_batch_size)
    if remainder:
        raise ValueError(f"new_batch_size = {new_batch_size}: does not divide {len(data)} rows")
    tensors = {name: column.reshape(new_batch_size, size, *column.shape[1:]) for name, column in data.batch.items()}
    arrays = {name: list(column.reshape(new_batch_size, size)) for name, column in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first ``batch_dims`` dimensions of every tensor into the rows; the inverse of ``fold_batch_dim``.

    A row of an object column must be an array or list of the objects of its new rows.
    """
    if batch_dims != 2:
        raise ValueError(f"batch_dims = {batch_dims}: must be 2; unfold more dimensions one after the other")
    if flat := [name for name, column in data.batch.items() if column.ndim < 2]:
        raise ValueError(f"unfold_batch_dim: tensor column {flat[0]!r} has no second dimension")
    tensors = {name: column.flatten(0, 1) for name, column in data.batch.items()}
    arrays = {name: [cell for row in column for cell in row] for name, column in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, data.meta_info)
