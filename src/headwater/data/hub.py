"""Datasets of the Hugging Face Hub and folders of datasets, opened with the package ``datasets``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.config.paths import HUB, is_saved_dataset
from headwater.core.errors import DataError
from headwater.data.row_store import ListRows, RowStore
from headwater.data.tasks import Split

_EVAL_SPLITS = ("test", "validation")
"""What ``data.eval`` uses if no split is given: the first that the dataset has."""


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
            raise _unreadable(source, error) from error
    raise AssertionError("the last split is returned or raises")


def _downloaded(name: str) -> str:
    """The files of a dataset in the cache of the hub, where ``hf download`` puts them; empty if there are none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return ""


def _unreadable(source: str, error: Exception) -> DataError:
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
