"""The sources that ``data.train`` and ``data.eval`` may name, and how each is opened.

data/*.parquet, rows.jsonl, rows.json    files, also as URLs: s3://bucket/rows.parquet
openai/gsm8k, hub:openai/gsm8k/main      a dataset of the Hugging Face Hub
data/saved                               a folder that datasets.Dataset.save_to_disk wrote, or one with files of data
arithmetic, reasoning_gym:chain_sum      a built-in task; some tasks take an argument after the colon
my_package.tasks:rows, tasks.py:rows     a custom task: rows(split, num_rows, seed, **options)
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headwater.config.paths import is_file, is_whole
from headwater.config.schema import DataConfig
from headwater.core.disk import cache_dir
from headwater.core.errors import DataError
from headwater.core.registry import PYTHON, PythonObject, blaming, load_object, nearest
from headwater.data.row_store import JsonlRows, JsonRows, ListRows, ParquetRows, RowStore, SupportsRows, check_file
from headwater.data.tasks import TASKS, Split, Task, run_task

FILE_KINDS = {".parquet": ParquetRows, ".jsonl": JsonlRows, ".json": JsonRows}


@dataclass(frozen=True)
class SourceSettings:
    """One entry of ``data.train`` or ``data.eval``, with its settings in ``data.sources``."""

    source: str | SupportsRows
    name: str = ""
    """Its name in ``data.sources``; empty if it has no settings."""
    subset: str = ""
    split: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names that Headwater reads, and the columns that have their values."""
    system_prompt: str | None = None
    data_source: str = ""
    """The scorer of rows that name none."""
    max_rows: int = 0
    weight: float | None = None

    @classmethod
    def of(cls, source: str | SupportsRows, config: DataConfig) -> SourceSettings:
        part = config.sources.get(source) if isinstance(source, str) else None
        return cls(source) if part is None else cls(**{"source": source, "name": source, **part})


@dataclass(frozen=True)
class FileSource:
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the hub, or a folder."""

    text: str


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
    return not is_whole(text) and (":" in text or text in TASKS.names())


def parse_source(text: str) -> FileSource | DatasetSource | TaskSource:
    """Parse a source string. Files are looked up and tasks are imported, but no rows are read or generated."""
    if isinstance(text, PythonObject):
        return TaskSource(label=text, name=text.removeprefix(PYTHON), task=text.value)
    if "://" in text:
        return FileSource(_fetched(text))
    if is_file(text):
        return FileSource(_find_files(text))
    name, colon, argument = text.partition(":")
    if name in TASKS.names():
        if colon and not argument:
            raise DataError(f"data source {text!r}: nothing follows the colon; write '{name}:<argument>' or {name!r}")
        return TaskSource(label=text, name=text, task=TASKS.resolve(name), argument=argument if colon else None)
    if is_whole(text):
        return DatasetSource(text)
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
        "or name a custom task as 'package.module:function', or a dataset of the hub as 'hub:owner/name'"
    )


def open_source(
    source: str | SupportsRows | SourceSettings,
    *,
    split: Split,
    num_rows: int,
    seed: int,
    task_args: Mapping[str, Any],
    labels: set[str],
) -> list[RowStore]:
    """Open a source: one store per file, or one store for a task or a dataset object."""
    given = source if isinstance(source, SourceSettings) else SourceSettings(source)
    wanted = given.source
    if isinstance(wanted, PythonObject) and not callable(wanted.value):
        return [_open_object(wanted.value)]
    if not isinstance(wanted, str):
        return [_open_object(wanted)]
    parsed = parse_source(wanted)
    if isinstance(parsed, FileSource):
        return [FILE_KINDS[path.suffix](path) for path in parsed.paths]
    if isinstance(parsed, DatasetSource):
        from headwater.data.remote import open_dataset  # most runs have other sources

        return [open_dataset(parsed.text, split, subset=given.subset, wanted=given.split)]
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


def _fetched(url: str) -> tuple[Path, ...]:
    from headwater.data.remote import fetch  # most runs have local files

    if Path(urlsplit(url).path).suffix not in FILE_KINDS:
        raise DataError(f"data source {url!r}: unknown kind of file; must end in {'/'.join(FILE_KINDS)}")
    return fetch(url, cache_dir() / "data")


def _find_files(text: str) -> tuple[Path, ...]:
    path = Path(text).expanduser()
    if path.exists() or not glob.has_magic(str(path)):
        return (path,)
    found = sorted(glob.glob(str(path), recursive=True))
    if not found:
        raise DataError(f"data source {text!r}: no file matches (looked in {Path.cwd()}); check the pattern")
    return tuple(Path(match) for match in found)
