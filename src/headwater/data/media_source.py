"""Where the pixels of an image or video come from: bytes, a data URL, a file, a download, or decoded pixels."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from headwater.core.disk import cache_dir
from headwater.core.errors import DataError
from headwater.data.pictures import import_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FILE_BYTES = 1 << 30

MediaSource: TypeAlias = "bytes | Path | Image"
"""Encoded bytes, a file on this machine, or a picture that is decoded already."""


@dataclass(frozen=True)
class SourceRules:
    """What may be read for a value of the data."""

    folder: Path | None
    """Where relative paths start; the working directory if None."""
    allow_files: bool
    allow_remote: bool


def find_source(value: Any, where: str, rules: SourceRules, kind: str) -> MediaSource:
    """Where the pixels are: in encoded bytes, in a file, or decoded already."""
    import_pillow(where)
    from PIL import Image

    if isinstance(value, str) and value.startswith("data:"):
        return _decode_data_url(value, where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (str, Path)):
        return _existing_file(str(value), where, rules)
    if isinstance(value, Image.Image):
        return value
    if is_array(value):
        return _from_array(value, where)
    hint = "give a path, a data URL, {'bytes': ...}, {'path': ...} or a Pillow image"
    raise DataError(f"{where}: a {type(value).__name__} is not {'an image' if kind == 'image' else 'a video'}; {hint}")


def source_key(source: MediaSource, where: str) -> Hashable:
    """The key that identifies a source: path, size and time of a file, a hash of everything else."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).digest()
    if isinstance(source, Path):
        try:
            status = source.stat()
        except OSError as error:  # it was there when it was looked for
            raise _unreadable(source, where, error) from error
        return str(source), status.st_mtime_ns, status.st_size
    return source.mode, source.size, hashlib.sha256(source.tobytes()).digest()


def read_source(source: MediaSource, where: str) -> bytes | Image:
    if not isinstance(source, Path):
        return source
    try:
        if (size := source.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{where}: {source} has {size} bytes, more than {MAX_FILE_BYTES}; make the file smaller")
        return source.read_bytes()
    except OSError as error:
        raise _unreadable(source, where, error) from error


def _unreadable(path: Path, where: str, error: OSError) -> DataError:
    return DataError(f"{where}: {path} cannot be read ({error}); check the file")


def is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "shape")


def _from_array(value: Any, where: str) -> Image:
    from PIL import Image

    shape, kind = tuple(value.shape), str(value.dtype)
    if kind != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
        raise DataError(
            f"{where}: an array of {kind} with the shape {shape} is not an image; give uint8 values with the shape "
            "(height, width) or (height, width, 3)"
        )
    return Image.fromarray(value)


def _decode_data_url(url: str, where: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise DataError(f"{where}: {header[:40]!r} is not a data URL in base64; write 'data:image/png;base64,...'")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: the base64 text of the data URL is damaged ({error}); write it again") from error


def _existing_file(name: str, where: str, rules: SourceRules) -> Path:
    if "://" in name:
        url = urlsplit(name)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            return _fetched(name, where, rules)
        name = unquote(url.path)
    if not rules.allow_files:
        raise DataError(f"{where}: {name[:80]!r} is not read from the disk of this machine; send a data URL")
    tried: Sequence[Path] = [start / Path(name).expanduser() for start in (rules.folder, Path()) if start is not None]
    try:
        for path in tried:
            if path.is_file():
                return path
    except OSError as error:  # for example a name that is too long, because it is not a path
        raise DataError(
            f"{where}: {name[:80]!r} is not a path ({error.strerror}); give a path or a data URL"
        ) from error
    looked = " and ".join(str(path)[:200] for path in tried)
    raise DataError(f"{where}: no such file: {looked}; relative paths start at the data file's folder")


def _fetched(url: str, where: str, rules: SourceRules) -> Path:
    """A copy of a file elsewhere. The copy is looked up at its source once per process and URL."""
    if not rules.allow_remote or url.startswith("file:"):
        raise DataError(
            f"{where}: {url!r} is not read over the network; download it and give its path, or set "
            "data.allow_remote_media=true"
        )
    from headwater.data.remote import fetch_file  # most rows have local files

    with _fetching:  # one download of a URL, while other threads may download others
        lock = _locks.setdefault(url, threading.Lock())
    with lock:
        if url not in _copies or not _copies[url].is_file():
            try:
                _copies[url] = fetch_file(url, cache_dir() / "media")
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        return _copies[url]


_copies: dict[str, Path] = {}
_fetching = threading.Lock()
_locks: dict[str, threading.Lock] = {}
