"""Data from elsewhere: datasets of the Hugging Face Hub, folders of datasets, and files at URLs.

The package ``datasets`` opens the first two. Files at ``https://``, ``s3://``, ``gs://``, ``hf://`` and other URLs that
fsspec opens are copied to a cache, ``$HEADWATER_CACHE/data`` (see ``core.disk.cache_dir``). A file is copied again if
its size, time or checksum at the source has changed, as far as the source tells them: over HTTP that is the size and,
if the server sends one, the ETag. If the source of a file cannot be reached, an earlier copy is used. A pattern always
needs its source.
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

from headwater.config.paths import HUB, is_saved_dataset
from headwater.core.disk import disk_full
from headwater.core.errors import DataError
from headwater.data.row_store import ListRows, RowStore
from headwater.data.tasks import Split

logger = logging.getLogger(__name__)

_EVAL_SPLITS = ("test", "validation")
"""What ``data.eval`` uses if no split is given: the first that the dataset has."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What opens a protocol that fsspec knows but does not open by itself."""
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created", "size")
"""What file systems tell about a file that changes with its contents."""


def open_dataset(source: str, split: Split, *, subset: str = "", wanted: str = "") -> RowStore:
    """``wanted`` is the split of the dataset; empty means train for ``data.train``, test or validation for
    ``data.eval``. ``hub:openai/gsm8k/main`` names the subset as well."""
    folder = Path(source).expanduser()
    if not source.startswith(HUB) and folder.is_dir():
        if is_saved_dataset(folder):
            return _open_saved(folder, wanted)
        return ListRows(_load(str(folder), source, split, subset, wanted), folder.name, f"folder {folder}")
    parts = source.removeprefix(HUB).split("/")
    if len(parts) == 3 and not subset:
        *parts, subset = parts
    if len(parts) not in (1, 2) or not all(parts):
        raise DataError(f"data source {source!r}: write it as hub:owner/name, or hub:owner/name/subset")
    name = "/".join(parts)
    return ListRows(_load(name, source, split, subset, wanted), parts[-1], f"dataset {name}")


def _load(path: str, source: str, split: Split, subset: str, wanted: str) -> Any:
    datasets = _package(source)
    splits = (wanted,) if wanted else ("train",) if split == "train" else _EVAL_SPLITS
    for last, name in enumerate(splits, start=1 - len(splits)):
        try:
            return datasets.load_dataset(path, subset or None, split=name)
        except Exception as error:  # the package raises errors of many kinds
            if isinstance(error, ConnectionError) and (snapshot := _downloaded(path)):
                return _load(snapshot, source, split, subset, wanted)
            if last < 0 and isinstance(error, ValueError) and "split" in str(error).lower():
                continue
            raise _not_loaded(source, error) from error
    raise AssertionError("the last split is returned or raises")


def _downloaded(name: str) -> str:
    """The files of a dataset in the cache of the hub, where ``hf download`` puts them; empty if there are none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return ""


def _not_loaded(source: str, error: Exception) -> DataError:
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, KeyError)) and not isinstance(error, FileNotFoundError):
        remedy = "name the subset and the split: data.sources.NAME = {source: ..., subset: ..., split: ...}"
        return DataError(f"data source {source!r}: {text[:500]}; {remedy}")
    return DataError(
        f"data source {source!r}: cannot be loaded ({type(error).__name__}: {text[:500]}); check its id and the "
        "network. Without internet, download it elsewhere (hf download ID --repo-type dataset --local-dir FOLDER), "
        "copy the folder here, and name the folder in data.train"
    )


def _open_saved(folder: Path, wanted: str) -> RowStore:
    """A folder of ``save_to_disk``; if it holds several splits, one of them must be named."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        if wanted not in splits:
            hint = f"name one, for example {str(folder / splits[0])!r}" if splits else "write it again"
            raise DataError(f"data source {str(folder)!r}: holds the splits {', '.join(splits) or 'none'}; {hint}")
        folder = folder / wanted
    elif wanted:
        raise DataError(f"data source {str(folder)!r}: holds one split without a name; remove split = {wanted!r}")
    datasets = _package(str(folder))
    try:
        rows = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: not a readable dataset ({error}); write it again with save_to_disk") from error
    return ListRows(rows, name=folder.name, label=str(folder))


def _package(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{source}: reading it needs the package datasets; pip install datasets") from error
    return datasets


def fetch(url: str, folder: Path) -> tuple[Path, ...]:
    """Copies of the files that ``url`` names, which may be a pattern. ``folder`` is the cache."""
    system, path = _open(url)
    try:
        found = sorted(system.glob(path)) if glob.has_magic(urlsplit(url).path) else [path]
    except Exception as error:  # every file system has its own errors
        raise _unreadable(url, error) from error
    if not found:
        raise DataError(f"data source {url!r}: no file matches; check the pattern")
    return tuple(_copy(system, str(each), url, folder) for each in found)


def fetch_file(url: str, folder: Path) -> Path:
    """A copy of the one file that ``url`` names. Signs such as ``[`` and ``?`` in it have no meaning."""
    system, path = _open(url)
    return _copy(system, str(path), url, folder)


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
    name = Path(urlsplit(path).path).name or "file"
    home = folder / hashlib.blake2b(f"{url}\n{path}".encode(), digest_size=12).hexdigest()
    copy, note = home / name, home / "version.json"
    try:
        info = system.info(path)
    except Exception as error:  # every file system has its own errors
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
