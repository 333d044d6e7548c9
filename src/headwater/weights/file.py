"""Weights through a safetensors file that only this user may read.

transport = FileTransport(torch.bfloat16)         # the sender, over the control calls of a channel
transport.send(update, channel, mode)

written = FileWeights(shapes, torch.bfloat16)     # the sender: the header is known before the first bucket
written.write(buckets)                            # the folder gets its final name when the file is complete
with open_weights(written.path) as source:        # the receiver: tensors are mapped, not loaded
    source.shapes
    for bucket in source.buckets(): ...
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.core.capabilities import UpdateMode
from headwater.core.errors import ConfigError, WeightsError
from headwater.core.processes import process_start
from headwater.core.protocols import Bucket, WeightFile, WeightUpdate
from headwater.weights import TRANSPORTS, Channel, ControlCall, answer
from headwater.weights.memory import as_announced, no_weights, not_finite
from headwater.weights.safetensors_files import ADAPTERS, WHOLE, open_weights

logger = logging.getLogger(__name__)

_PREFIX = "headwater-weights-"
_PARTIAL = ".partial"
_FOLDER = re.compile(re.escape(_PREFIX) + r"(?P<pid>\d+)-\w+(-v\d+|\.partial)?")
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class FileWeights:
    """A folder that holds one version as ``model.safetensors``, for example ``headwater-weights-4711-x8k2-v000012``.

    ``weights.adapter_files`` gives the file another ``name``, and puts ``texts`` beside it, by their names.

    It is written under another name and renamed when it is complete, so no reader finds a part of it. The name contains
    the process id, and the process holds a lock on the file while it lives. A process that is killed cannot remove its
    folder, so the next one does (``remove_leftovers``). Several engines may ``hold`` one file; it is removed when every
    one of them has discarded it.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        shared_folder: str = "",
        version: int = 0,
        *,
        name: str = WHOLE,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """In ``shared_folder``, other users and machines may read the file. Otherwise it is private and temporary."""
        self._version = version
        self._name = name
        self._holding = threading.Lock()
        self._num_holders = 1
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._dtype = dtype
        self._is_shared = bool(shared_folder)
        header, self._places = _layout(self._shapes, dtype)
        size = len(header) + sum(map(self._num_bytes, self._shapes))
        self._folder = _new_folder(shared_folder)
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644 if shared_folder else 0o600)
            if shared_folder:
                self._folder.chmod(0o755)
            _lock(self._descriptor)
            for each, text in (texts or {}).items():
                _write_text(self._folder / each, text, is_shared=self._is_shared)
            reserve(self._descriptor, size, str(self._folder), "free some space, or set TMPDIR to a folder with space")
            os.pwrite(self._descriptor, header, 0)
            self._size = size
        except BaseException:
            self.discard()
            raise

    @property
    def path(self) -> Path:
        return self._folder / self._name

    @torch.no_grad()
    def write(self, buckets: Iterable[Bucket]) -> None:
        """Write every bucket to its position. A tensor that is missing, unknown, of another shape or not finite is
        refused."""
        assert self._descriptor is not None, "discarded"
        # Receivers do not check the values: they would have to read the file twice.
        checked = as_announced(buckets, self._shapes, self._dtype, kept=", the old weights stay in place")
        with mmap.mmap(self._descriptor, self._size) as buffer:
            for bucket in checked:
                for name, tensor in bucket:
                    write_tensor(buffer, self._places[name], tensor, self._dtype)
            if self._is_shared:
                buffer.flush()
        if self._is_shared:  # other machines see what was written only after that
            os.fsync(self._descriptor)
        name = self._folder.name.removesuffix(_PARTIAL)
        self._folder = self._folder.rename(self._folder.with_name(f"{name}-v{self._version:06d}"))

    def hold(self) -> FileWeights:
        """Keep the file until one more ``discard``."""
        with self._holding:
            if not self._num_holders:
                raise WeightsError(f"{self.path}: was removed, because its update has ended; publish the weights again")
            self._num_holders += 1
        return self

    def discard(self) -> None:
        """Remove the file, unless someone else holds it. Discarding a removed file is allowed."""
        with self._holding:
            self._num_holders = max(0, self._num_holders - 1)
            if self._num_holders:
                return
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _num_bytes(self, name: str) -> int:
        return math.prod(self._shapes[name]) * self._dtype.itemsize


def _write_text(path: Path, text: str, *, is_shared: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if is_shared else 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if is_shared:  # other machines see what was written only after that
            file.flush()
            os.fsync(descriptor)


def _new_folder(shared_folder: str) -> Path:
    prefix = f"{_PREFIX}{os.getpid()}-"
    if not shared_folder:
        return Path(tempfile.mkdtemp(_PARTIAL, prefix))
    try:
        Path(shared_folder).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(_PARTIAL, prefix, shared_folder))
    except OSError as error:
        raise ConfigError([f"rollout.weight_folder = {shared_folder}: cannot be written to ({error})"]) from error


def written_file(update: WeightUpdate, dtype: torch.dtype, shared_folder: str = "") -> WeightFile:
    """The file with the weights of an update: written now, or before for several engines. Discard it later."""
    if update.file is not None:
        return update.file.hold()
    clear_leftovers(shared_folder)
    written = FileWeights(update.shapes, dtype, shared_folder, update.version)
    try:
        written.write(update.buckets)
    except BaseException:
        written.discard()
        raise
    return written


@TRANSPORTS.register
class FileTransport:
    """The sender. The newest file is kept until the next version, because a new process of the engine reads it."""

    survives_restart = True

    def __init__(self, dtype: torch.dtype, shared_folder: str = "") -> None:
        """``shared_folder`` is ``rollout.weight_folder``; empty means the system's folder for temporary files."""
        self._dtype = dtype
        self._shared_folder = shared_folder
        self._newest: WeightFile | None = None

    def send(self, update: WeightUpdate, channel: Channel, mode: UpdateMode | None) -> None:
        written = written_file(update, self._dtype, self._shared_folder)
        body = {
            "version": update.version,
            "source": {"file": str(written.path), "is_checked": True, "adapters_alone": update.adapters_alone},
            "mode": mode,
            "limit_s": channel.limit_s,
        }
        path = "/control/update_weights"
        try:
            answer(channel, ControlCall(path, body), update.version)
            # A new process does not have the weights that adapters belong to, so the learner must send them.
            again = None if update.adapters_alone else ControlCall(path, {**body, "mode": None})
            channel.accepted(again)
        except BaseException:
            written.discard()
            raise
        self.close()
        self._newest = written

    def close(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.discard()


def write_tensor(
    buffer: mmap.mmap | memoryview, offset: int, tensor: Tensor, dtype: torch.dtype, *, is_pinned: bool = False
) -> None:
    """Convert a tensor to ``dtype`` and copy it from its device to a position in memory.

    A copy to pinned memory has only been queued when this returns: synchronise the current stream before it is read.
    """
    num_bytes = tensor.numel() * dtype.itemsize
    if num_bytes:
        target = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=offset)
        # Convert on the device: a copy between devices that also converts does so on the CPU, 70 times slower.
        source = tensor if tensor.device.type == "cpu" else tensor.to(dtype)
        target.view(dtype).view(tensor.shape).copy_(source, non_blocking=is_pinned)


def reserve(descriptor: int, size: int, where: str, remedy: str) -> None:
    """Allocate the space now: a process that writes to mapped memory without space behind it is killed."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise WeightsError(
            f"{size / 2**30:.2f} GiB for weights do not fit {where} ({error.strerror}); {remedy}"
        ) from error


def _layout(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where each tensor starts in the file."""
    entries: dict[str, Any] = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # align the numbers
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}


def remove_leftovers(folder: str = "") -> list[Path]:
    """Remove the weights of processes that were killed from ``folder``, and return what was removed.

    A folder for temporary files may be shared with containers and machines whose processes are not visible here.
    Therefore it is not enough that no process has the id: the lock must be free as well.
    """
    found = Path(folder or tempfile.gettempdir()).glob(f"{_PREFIX}*")
    return [each for each in found if _remove_if_left_over(each)]


def clear_leftovers(shared_folder: str) -> None:
    """Remove what killed processes have left in a folder, before this process first writes to it."""
    _clear_once(shared_folder or tempfile.gettempdir())


@cache
def _clear_once(folder: str) -> None:
    for each in remove_leftovers(folder):
        logger.info("removed %s, which a killed process had left behind", each)


def _remove_if_left_over(folder: Path) -> bool:
    named = _FOLDER.fullmatch(folder.name)
    if named is None or process_start(int(named["pid"])) is not None:
        return False
    name = ADAPTERS if (folder / ADAPTERS).exists() else WHOLE
    try:
        descriptor = os.open(folder / name, os.O_RDWR)
    except OSError:  # it belongs to another user, or is gone already
        return False
    try:
        if not _lock(descriptor):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
    return not folder.exists()


def _lock(descriptor: int) -> bool:
    """Whether this process holds the file's lock now. On a file system without locks it never does."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextmanager
def file_update(
    path: str | Path, version: int, dtype: torch.dtype, *, is_checked: bool = False, adapters_alone: bool = False
) -> Iterator[WeightUpdate]:
    """The weights of a file or folder as an update, after all of its values were checked.

    An engine can therefore only refuse it before it changes a weight. ``dtype`` is the engine's number type. A file
    that its writer has checked is read only once.
    """
    with open_weights(path) as source:
        for bucket in () if is_checked else source.buckets():
            problems = no_weights(bucket) or not_finite(bucket, dtype)
            if problems:
                raise WeightsError(f"{path}: refused, the old weights stay in place: {problems[0]}")
        yield WeightUpdate(version, source.shapes, source.buckets(), adapters_alone=adapters_alone)
