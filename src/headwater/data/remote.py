"""Remote files: ``https://``, ``s3://``, ``gs://``, ``hf://`` and other URLs that fsspec opens, copied to a cache.

The cache is ``$HEADWATER_CACHE/data`` (see ``core.disk.cache_dir``). A file is copied again if its size, time or
checksum at the source has changed, as far as the source tells them: over HTTP that is the size and, if the server sends
one, the ETag. If the source of a file cannot be reached, an earlier copy is used. A pattern always needs its source.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headwater.core.disk import disk_full
from headwater.core.errors import DataError

logger = logging.getLogger(__name__)

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What opens a protocol that fsspec knows but does not open by itself."""
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created", "size")
"""What file systems tell about a file that changes with its contents."""


def fetch(url: str, folder: Path) -> tuple[Path, ...]:
    """Copies of the files that ``url`` names, which may be a pattern. ``folder`` is the cache."""
    system, path = _open(url)
    try:
        found = sorted(system.glob(path)) if glob.has_magic(urlsplit(url).path) else [path]
    except Exception as error:  # every file system has errors of its own
        raise _unreadable(url, error) from error
    if not found:
        raise DataError(f"data source {url!r}: no file matches; check the pattern")
    return tuple(_copy(system, str(each), url, folder) for each in found)


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        package = _PACKAGES.get(protocol, "the package of this protocol")
        raise DataError(f"data source {url!r}: {error}; pip install {package}") from error
    except ValueError as error:
        raise DataError(f"data source {url!r}: {error}; check what is before ://") from error


def _copy(system: Any, path: str, url: str, folder: Path) -> Path:
    name = Path(urlsplit(path).path).name
    home = folder / hashlib.blake2b(f"{url}\n{path}".encode(), digest_size=12).hexdigest()
    copy, note = home / name, home / "version.json"
    try:
        info = system.info(path)
    except Exception as error:  # every file system has errors of its own
        if copy.is_file() and not _is_missing(error):
            logger.warning("%s cannot be reached (%s); the copy in %s is used", url, error, home)
            return copy
        raise _unreadable(url, error) from error
    version = json.dumps({key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None})
    if copy.is_file() and note.is_file() and note.read_text(encoding="utf-8") == version:
        return copy
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / f".{os.getpid()}-{name}"
    try:
        with system.open(path, "rb") as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        temporary.replace(copy)
        note.write_text(version, encoding="utf-8")
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if (full := disk_full(error, copy, url)) is not None:
            raise full from error
        raise _unreadable(url, error) from error
    return copy


def _is_missing(error: Exception) -> bool:
    """Whether the source answered that there is no such file. For HTTP, fsspec also says so if nothing answered."""
    return isinstance(error, FileNotFoundError) and (error.__cause__ is None or hasattr(error.__cause__, "status"))


def _unreadable(url: str, error: Exception) -> DataError:
    if _is_missing(error):
        return DataError(f"data source {url!r}: no such file; check the address")
    return DataError(
        f"data source {url!r}: cannot be read ({type(error).__name__}: {error}); check the network and your "
        "credentials, or download it and name the file"
    )
