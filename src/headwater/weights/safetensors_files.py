"""Opens safetensors files, alone or as the folder of a model, and maps their tensors."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket
from headwater.weights.memory import in_buckets

WHOLE = "model.safetensors"
"""The name of a file that holds a whole model."""
ADAPTERS = "adapter_model.safetensors"
"""The name that peft gives a file with adapters."""
_INDEX = "model.safetensors.index.json"
_LONGEST_INDEX = 2**28


@dataclass(frozen=True)
class OpenedFiles:
    """The tensors of one or more open safetensors files, as views of the mapped files."""

    files: tuple[tuple[Any, tuple[str, ...]], ...]
    """Each open file, with the names of the tensors to read from it."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for file, names in self.files for name in names}

    def buckets(self) -> Iterator[Bucket]:
        return in_buckets((name, file.get_tensor(name)) for file, names in self.files for name in names)


@contextmanager
def open_weights(path: str | Path) -> Iterator[OpenedFiles]:
    """Open a safetensors file or a folder of them.

    In a folder, the tensors that its index names are read; without an index ``model.safetensors``, or else all files.
    """
    location = Path(path)
    with ExitStack() as opened:
        files = _files_at(location)
        if files == [location / _INDEX]:
            yield _open_indexed(location / _INDEX, opened)
            return
        handles = [_open(file, opened) for file in files]
        yield OpenedFiles(tuple((handle, tuple(handle.keys())) for handle in handles))


def _files_at(location: Path) -> list[Path]:
    """The files to read: ``location`` itself, or of a folder its index, its one file, or all its files."""
    try:
        if not stat.S_ISDIR(os.stat(location).st_mode):
            return [location]
        for name in (_INDEX, WHOLE):
            if (location / name).exists():
                return [location / name]
        files = sorted(location.glob("*.safetensors"))
    except (OSError, ValueError) as error:  # for example a path that is too long, or that contains a null character
        raise _unreadable(location, error) from error
    if not files:
        raise WeightsError(f"{location}: contains no .safetensors file; save the model with save_pretrained")
    return files


def _open_indexed(index: Path, opened: ExitStack) -> OpenedFiles:
    files = []
    for file, names in _names_by_file(index).items():
        handle = _open(index.parent / file, opened)
        missing = set(names) - set(handle.keys())
        if missing:
            raise WeightsError(
                f"{index}: says that {file} contains {min(missing)}, which it does not; save the model again"
            )
        files.append((handle, tuple(names)))
    return OpenedFiles(tuple(files))


def _names_by_file(index: Path) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    try:
        with _regular(index) as opened:
            text = opened.read(_LONGEST_INDEX + 1)
        if len(text) > _LONGEST_INDEX:
            raise ValueError(f"longer than {_LONGEST_INDEX} bytes")
        for name, file in json.loads(text)["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file in the same folder")
            names.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index}: not a valid index of weights ({error}); the old weights stay in place") from error
    return names


def _open(file: Path, opened: ExitStack) -> Any:
    try:
        with _regular(file) as checked:
            # By its descriptor, so that the file that was checked is the one that is mapped.
            return opened.enter_context(safe_open(f"/dev/fd/{checked.fileno()}", framework="pt"))
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(file, error) from error


def _regular(file: Path) -> io.FileIO:
    """Open a regular file. A pipe or a device is refused: it could block the process forever, also at its end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    opened = io.FileIO(descriptor, closefd=True)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        opened.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return opened


def _unreadable(file: Path, error: Exception) -> WeightsError:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return WeightsError(f"{file}: cannot be read as safetensors ({reason}); the old weights stay in place")
