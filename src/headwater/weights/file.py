"""Weights for another process, in a file that only this user may read."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch

from headwater.observe.process import process_start
from headwater.weights.image import Image, NamedTensors, reserve

_PREFIX = "headwater-weights-"
_FOLDER = re.compile(re.escape(_PREFIX) + r"(?P<pid>\d+)-\w+")
_FILE = "model.safetensors"


class FileWeights:
    """A folder of its own that holds one version as ``model.safetensors``.

    Its name says whose it is, and while that process lives it holds a lock on the file: a process that is killed cannot
    remove its folder, and the next one does (``remove_leftovers``).
    """

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype) -> None:
        image = Image(tensors, dtype)
        size = image.size
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(self._descriptor)
            remedy = "free some room, or set TMPDIR to a folder that has it"
            reserve(self._descriptor, size, str(self._folder), remedy)
            with mmap.mmap(self._descriptor, size) as buffer:
                image.write(buffer)
        except BaseException:
            self.discard()
            raise

    @property
    def _path(self) -> Path:
        return self._folder / _FILE

    @property
    def source(self) -> dict[str, str]:
        return {"file": str(self._path)}

    def discard(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)


def remove_leftovers() -> list[Path]:
    """Remove the weights of processes that were killed; says which.

    Folders for temporary files are often shared with containers and machines whose processes cannot be seen from here.
    So a number that no process has is not enough: the lock must be free as well.
    """
    return [folder for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if _remove_if_left_over(folder)]


def _remove_if_left_over(folder: Path) -> bool:
    named = _FOLDER.fullmatch(folder.name)
    if named is None or process_start(int(named["pid"])) is not None:
        return False
    try:
        descriptor = os.open(folder / _FILE, os.O_RDWR)
    except OSError:  # another user's, or gone already
        return False
    try:
        if not _lock(descriptor):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
    return not folder.exists()


def _lock(descriptor: int) -> bool:
    """Whether the file is ours now. Where a file system has no locks it never is: nothing is taken for left over."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
