"""Storing a DataProto as one safetensors file, which can be read without running code from it.

Layout: ``column/<name>`` is a tensor column, as any safetensors reader shows it. ``tree`` is JSON text (as bytes): row
count, column order, object columns and ``meta_info``. ``blob`` is the bytes of the arrays and tensors inside those. The
file's metadata holds a checksum over all of it.

JSON alone would turn tuples into lists and keys into strings, so a value that JSON does not hold exactly is written as
``{tag: payload}``. That covers None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, numpy arrays and
scalars, and tensors, with any nesting. Other objects are pickled only if both the writer and the reader pass
``allow_pickle=True``; otherwise they raise an error that names the column and row.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from headwater.core.columns import ObjectArray, compact, object_column
from headwater.core.errors import DataError

FORMAT = "headwater.DataProto/1"

PLAIN_NUMPY_KINDS = "biufcmMSU"
"""Kinds of numpy dtype that their bytes and ``dtype.str`` describe completely."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The content of a file."""

    num_rows: int
    tensors: Mapping[str, torch.Tensor]
    arrays: Mapping[str, ObjectArray]
    meta_info: Mapping[str, Any]


def write_batch(path: str | os.PathLike[str], batch: StoredBatch, allow_pickle: bool) -> None:
    """Write ``batch`` atomically: ``path`` holds either the whole batch or its previous content."""
    encoder = _Encoder(allow_pickle)
    tree = {
        "num_rows": batch.num_rows,
        "tensors": list(batch.tensors),
        "arrays": [
            [name, [encoder.encode_top(value, f"column {name!r} row {row}") for row, value in enumerate(column)]]
            for name, column in batch.arrays.items()
        ],
        "meta_info": [
            [key, encoder.encode_top(value, f"meta_info[{key!r}]")] for key, value in batch.meta_info.items()
        ],
    }
    entries = {f"column/{name}": compact(tensor).cpu() for name, tensor in batch.tensors.items()}
    for name, tensor in entries.items():
        if tensor.dtype == torch.complex128 or tensor.is_quantized:
            raise ValueError(f"{name}: safetensors cannot hold dtype {tensor.dtype}; convert the column before saving")
    # safetensors refuses tensors that share memory, as a column and its alias do.
    shared = {tensor.untyped_storage().data_ptr(): name for name, tensor in entries.items()}
    for name, tensor in entries.items():
        if shared[tensor.untyped_storage().data_ptr()] != name:
            entries[name] = tensor.clone()
    entries["tree"] = _bytes_tensor(json.dumps(tree).encode("ascii"))
    entries["blob"] = _bytes_tensor(bytes(encoder.blob))
    _replace_file(Path(path), safetensors.torch.save(entries, {"format": FORMAT, "blake2b": _checksum(entries)}))


def read_batch(path: str | os.PathLike[str], allow_pickle: bool) -> StoredBatch:
    """Read a file written by ``write_batch``. Raises ``DataError`` if it is missing or damaged."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the path of a file that DataProto.save wrote")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Tensors of an open file are views of it; copies stay valid when the file changes.
            entries = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path}: damaged, or not a file that DataProto.save wrote: {error}") from error
    if metadata.get("format") != FORMAT:
        raise DataError(
            f"{path}: format is {metadata.get('format')!r}, not {FORMAT!r}; save it again with DataProto.save"
        )
    if metadata.get("blake2b") != _checksum(entries):
        raise DataError(f"{path}: damaged: its checksum does not match its content; save it again with DataProto.save")
    tree = json.loads(entries["tree"].numpy().tobytes())
    decoder = _Decoder(path, entries["blob"].numpy().tobytes(), allow_pickle)
    return StoredBatch(
        num_rows=tree["num_rows"],
        tensors={name: entries[f"column/{name}"] for name in tree["tensors"]},
        arrays={name: object_column(name, decoder.decode(values)) for name, values in tree["arrays"]},
        meta_info={key: decoder.decode(value) for key, value in tree["meta_info"]},
    )


class _Encoder:
    """Encodes values as JSON and collects the bytes of arrays in ``blob``."""

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.blob = bytearray()

    def encode_top(self, value: Any, where: str) -> Any:
        """Encode the value of one row or of one entry of ``meta_info``."""
        try:
            return self.encode(value, where)
        except RecursionError as error:
            raise ValueError(
                f"{where} contains itself, or is nested too deeply to be stored; drop it before saving"
            ) from error

    def encode(self, value: Any, where: str) -> Any:
        # Compare exact types: a subclass may hold more than its base class, and np.float64 is a float.
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(item, where) for item in value]
        if kind in (tuple, set, frozenset):
            return {kind.__name__: [self.encode(item, where) for item in value]}
        if kind is dict:
            return {"dict": [[self.encode(key, where), self.encode(item, where)] for key, item in value.items()]}
        if kind is bytes:
            return {"bytes": self._store(value)}
        if kind is np.ndarray and value.dtype == object:
            return {"objects": [list(value.shape), [self.encode(item, where) for item in value.flat]]}
        if kind is np.ndarray and value.dtype.kind in PLAIN_NUMPY_KINDS:
            return {"array": [value.dtype.str, list(value.shape), self._store(value.tobytes())]}
        if isinstance(value, np.generic) and value.dtype.kind in PLAIN_NUMPY_KINDS:
            return {"scalar": [value.dtype.str, [], self._store(value.tobytes())]}
        if kind is torch.Tensor and value.layout is torch.strided and not (value.is_quantized or value.is_nested):
            dtype = str(value.dtype).removeprefix("torch.")
            return {"tensor": [dtype, list(value.shape), self._store(_tensor_bytes(value.detach().cpu()))]}
        return self._pickle(value, where)

    def _pickle(self, value: Any, where: str) -> Any:
        if not self.allow_pickle:
            raise ValueError(
                f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored; "
                "convert it to plain values or arrays, drop it, or save and load with allow_pickle=True"
            )
        return {"pickle": base64.b64encode(pickle.dumps(value)).decode("ascii")}

    def _store(self, content: bytes) -> list[int]:
        start = len(self.blob)
        self.blob += content
        return [start, len(content)]


class _Decoder:
    """The reverse of ``_Encoder``."""

    def __init__(self, path: Path, blob: bytes, allow_pickle: bool) -> None:
        self.path = path
        self.blob = blob
        self.allow_pickle = allow_pickle

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, payload),) = value.items()
        match tag:
            case "tuple" | "set" | "frozenset":
                container = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
                return container(self.decode(payload))
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in payload}
            case "bytes":
                return self._stored(payload)
            case "objects":
                return object_column("", self.decode(payload[1])).reshape(payload[0])
            case "array" | "scalar":
                array = np.ndarray(payload[1], np.dtype(payload[0]), buffer=self._stored(payload[2])).copy()
                return array if tag == "array" else array[()]
            case "tensor":
                tensor = torch.empty(payload[1], dtype=getattr(torch, payload[0]))
                tensor.view(-1).view(torch.uint8).copy_(_bytes_tensor(self._stored(payload[2])))
                return tensor
            case "pickle" if self.allow_pickle:
                return pickle.loads(base64.b64decode(payload))
            case "pickle":
                raise DataError(
                    f"{self.path}: holds pickled objects, and loading those runs code from the file; "
                    "pass allow_pickle=True if you trust where it comes from"
                )
        raise DataError(f"{self.path}: unknown tag {tag!r}; it was written by a newer version")

    def _stored(self, span: list[int]) -> bytes:
        start, length = span
        return self.blob[start : start + length]


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    # Empty numpy arrays have a stride of 0, which torch cannot view as bytes.
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _checksum(entries: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(entries):
        tensor = entries[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_tensor_bytes(tensor))
    return digest.hexdigest()


def _replace_file(path: Path, content: bytes) -> None:
    """Write to a temporary file and move it into place, so that no reader or crash sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
