"""The sources that ``data.train`` and ``data.eval`` may name, and how each is opened.

data/*.parquet, rows.jsonl, rows.json    files
data/saved                               a folder that datasets.Dataset.save_to_disk wrote
arithmetic, reasoning_gym:chain_sum      a built-in task; some tasks take an argument after the colon
my_package.tasks:rows, tasks.py:rows     a custom task: rows(split, num_rows, seed, **options)
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.config.paths import is_saved_dataset
from headwater.core.errors import DataError
from headwater.core.registry import blaming, load_object, nearest
from headwater.data.row_store import JsonlRows, JsonRows, ListRows, ParquetRows, RowStore, SupportsRows, check_file
from headwater.data.tasks import TASKS, Split, Task, run_task

FILE_KINDS = {".parquet": ParquetRows, ".jsonl": JsonlRows, ".json": JsonRows}


@dataclass(frozen=True)
class FileSource:
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class TaskSource:
    label: str
    """The name in the config."""
    name: str
    """The name in uids: without the folder of a custom task's file."""
    task: Task
    argument: str | None = None


def is_task(text: str) -> bool:
    """Whether a source string names a task. Tasks have a held-out split; files do not."""
    is_file = Path(text).suffix in FILE_KINDS
    return not is_file and (":" in text or text in TASKS.names())


def parse_source(text: str) -> FileSource | TaskSource:
    """Parse a source string. Files are looked up and tasks are imported, but no rows are read or generated."""
    if Path(text).suffix in FILE_KINDS:
        return FileSource(_find_files(text))
    name, colon, argument = text.partition(":")
    if name in TASKS.names():
        if colon and not argument:
            raise DataError(f"data source {text!r}: nothing follows the colon; write '{name}:<argument>' or {name!r}")
        return TaskSource(label=text, name=text, task=TASKS.resolve(name), argument=argument if colon else None)
    if "://" in text:
        raise DataError(f"data source {text!r}: not read over the network; download it and name the file")
    folder = Path(text).expanduser()
    if folder.is_dir() and is_saved_dataset(folder):
        return FileSource((_one_split(folder),))
    if colon:
        module, _, function = text.rpartition(":")
        with blaming(f"data source {text!r}"):
            task = load_object(text)
        if not callable(task):
            raise DataError(f"data source {text!r}: is a {type(task).__name__}; name a function that returns rows")
        short = Path(module).stem if module.endswith(".py") else module
        return TaskSource(label=text, name=f"{short}:{function}", task=task)
    kinds = "/".join(FILE_KINDS)
    if Path(text).expanduser().exists():
        check_file(Path(text).expanduser())
        raise DataError(f"data source {text!r}: unknown kind of file; must end in {kinds}")
    raise DataError(
        f"data source {text!r}: neither a task nor a {kinds} file; tasks: {nearest(text, TASKS.names())}; "
        "or name a custom task as 'package.module:function'"
    )


def open_source(
    source: str | SupportsRows,
    *,
    split: Split,
    num_rows: int,
    seed: int,
    task_args: Mapping[str, Any],
    labels: set[str],
) -> list[RowStore]:
    """Open a source: one store per file, or one store for a task or a dataset object."""
    if not isinstance(source, str):
        return [_open_object(source)]
    parsed = parse_source(source)
    if isinstance(parsed, FileSource):
        return [_open_saved(path) if path.is_dir() else FILE_KINDS[path.suffix](path) for path in parsed.paths]
    options = _options_of(parsed, task_args, labels)
    rows = run_task(
        parsed.task,
        parsed.label,
        split=split,
        num_rows=num_rows,
        seed=seed,
        argument=parsed.argument,
        options=options,
    )
    return [ListRows(rows, name=parsed.name, label=f"task {parsed.label}")]


def task_labels(sources: Iterable[object]) -> set[str]:
    """The names under which ``data.task_args`` may hold options for a single task."""
    labels: set[str] = set()
    for source in sources:
        if isinstance(source, str) and is_task(source):
            labels |= {source, source.partition(":")[0]}
    return labels


def _options_of(source: TaskSource, task_args: Mapping[str, Any], labels: set[str]) -> dict[str, Any]:
    """Options for all tasks, updated with those under the name of this task."""
    options = {key: value for key, value in task_args.items() if key not in labels}
    for label in (source.label.partition(":")[0], source.label):
        own = task_args.get(label, {}) if label in labels else {}
        if not isinstance(own, Mapping):
            raise DataError(f"data.task_args.{label} = {own!r}: must be a mapping of that task's options")
        options.update(own)
    return options


def _open_object(source: SupportsRows) -> RowStore:
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        hint = "give a path, a task, or an object with len() and rows by number, such as a datasets.Dataset"
        raise DataError(f"data source of type {type(source).__name__}: cannot be read; {hint}")
    if isinstance(source, Mapping):
        hint = f"choose one, for example dataset[{next(iter(source), 'train')!r}]"
        raise DataError(f"data source of type {type(source).__name__}: holds several splits; {hint}")
    name = getattr(getattr(source, "info", None), "dataset_name", None) or "dataset"
    return ListRows(source, name=str(name), label=f"dataset {name!r}" if name != "dataset" else "dataset object")


def _one_split(folder: Path) -> Path:
    """The folder itself, unless it holds several splits, of which ``data.train`` must name one."""
    if not (folder / "dataset_dict.json").is_file():
        return folder
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    hint = f"name one, for example {str(folder / splits[0])!r}" if splits else "write it again with save_to_disk"
    raise DataError(f"data source {str(folder)!r}: holds the splits {', '.join(splits) or 'none'}; {hint}")


def _open_saved(folder: Path) -> RowStore:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{folder}: reading it needs the package datasets; pip install datasets") from error
    try:
        rows = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: not a readable dataset ({error}); write it again with save_to_disk") from error
    return ListRows(rows, name=folder.name, label=str(folder))


def _find_files(text: str) -> tuple[Path, ...]:
    if "://" in text:
        raise DataError(f"data source {text!r}: not read over the network; download it and name the file")
    path = Path(text).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return (path,)
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise DataError(f"data source {text!r}: no file matches (looked in {Path.cwd()}); check the pattern")
    return tuple(Path(match) for match in found)
