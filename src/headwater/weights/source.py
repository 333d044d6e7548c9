"""Weights from elsewhere: a file, a Hugging Face folder, or memory that another process shares."""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headwater.core.errors import WeightsError

NamedTensors = list[tuple[str, Tensor]]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names that a safetensors header gives them."""


def read_file(path: str) -> NamedTensors:
    """All tensors of a safetensors file or of a folder.

    Of a folder those that its index names; without an index those of ``model.safetensors``, or else of all files.
    """
    location = Path(path)
    if not location.is_dir():
        return list(_load(location).items())
    if (location / _INDEX).is_file():
        return _read_indexed(location / _INDEX)
    whole = location / _WHOLE
    files = [whole] if whole.is_file() else sorted(location.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{location}: holds no .safetensors file; save the model with save_pretrained")
    return [named for file in files for named in _load(file).items()]


def _read_indexed(index: Path) -> NamedTensors:
    tensors: NamedTensors = []
    for file, names in _names_by_file(index).items():
        loaded = _load(index.parent / file)
        for name in names:
            if name not in loaded:
                raise WeightsError(f"{index}: says that {file} holds {name}, which it does not; save the model again")
            tensors.append((name, loaded[name]))
    return tensors


def _names_by_file(index: Path) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            names.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index}: is no index of weights ({error}); the old weights stay in place") from error
    return names


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file}: cannot be read as safetensors ({error}); the old weights stay in place") from error


@contextmanager
def shared_tensors(name: str) -> Iterator[NamedTensors]:
    """Tensors of the shared-memory segment ``name``, which another process filled with ``write_shared``.

    They are views of the segment. Whoever keeps one keeps the segment mapped, also after its owner has removed it.
    """
    tensors = _views(_mapped(name), name)
    try:
        yield tensors
    finally:
        tensors.clear()


def write_shared(image: bytes) -> shared_memory.SharedMemory:
    """A segment that holds a safetensors image (``safetensors.torch.save``); the caller closes and unlinks it."""
    segment = shared_memory.SharedMemory(create=True, size=len(image))
    assert segment.buf is not None, "an open segment has its memory"
    segment.buf[: len(image)] = image
    return segment


def _mapped(name: str) -> mmap.mmap:
    """The memory of a segment, mapped for as long as somebody refers to it."""
    try:
        # ``SharedMemory`` would sign the segment up for removal when this process ends, although it is another's, and
        # signing it off again does the same to an owner that shares our resource tracker.
        descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
        try:
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"shared memory {name!r}: cannot be opened ({error}); it must exist until the update has ended"
        ) from error


def _views(image: mmap.mmap, name: str) -> NamedTensors:
    try:
        return _parse(image)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise WeightsError(
            f"shared memory {name!r}: holds no safetensors image ({error}); the old weights stay in place"
        ) from error


def _parse(image: mmap.mmap) -> NamedTensors:
    """Views of all tensors of a safetensors image. More may follow it: a segment is rounded up to whole pages."""
    start = 8 + int.from_bytes(image[:8], "little")
    if start > len(image):
        raise ValueError(f"a header of {start - 8} bytes in {len(image)}")
    header = json.loads(image[8:start])
    header.pop("__metadata__", None)
    entries = [_Entry.read(name, fields) for name, fields in header.items()]
    if not entries:
        raise ValueError("it names no tensor")
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise ValueError(f"{entry.name} begins at byte {entry.begin} and what is before it ends at {end}")
        end = entry.end
    if start + end > len(image):
        raise ValueError(f"{start + end} bytes are announced and {len(image)} are there")
    return [(entry.name, entry.view(image, start)) for entry in entries]


@dataclass(frozen=True)
class _Entry:
    """What a header says of one tensor: it lies at ``begin`` to ``end`` of the bytes after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def read(cls, name: str, fields: Any) -> _Entry:
        dtype, shape, (begin, end) = _DTYPES[fields["dtype"]], tuple(fields["shape"]), fields["data_offsets"]
        if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
            raise ValueError(f"{name} has shape {list(shape)} at {[begin, end]}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has shape {list(shape)} of {dtype} in {end - begin} bytes")
        return cls(name, dtype, shape, begin, end)

    def view(self, image: mmap.mmap, start: int) -> Tensor:
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=self.dtype)
        place, count = start + self.begin, self.end - self.begin
        # It refers to ``image``, so the memory stays mapped as long as the tensor is there.
        flat = torch.frombuffer(image, dtype=torch.uint8, count=count, offset=place)
        if place % self.dtype.itemsize:
            flat = flat.clone()  # not where a number of this size may lie
        return flat.view(self.dtype).view(self.shape)


def in_thread(action: Callable[[], None]) -> Future[None]:
    """Run ``action`` beside everything else: reading a large file must not hold generation up."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # it begins now; cancelling would neither stop it nor leave it a result to set

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  the error belongs to the caller, who waits on the future
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="headwater-weights", daemon=True).start()
    return done
