"""The paths in a config. Relative ones start at the working directory; the config that a run keeps has absolute ones.

So a run can be resumed and evaluated from any folder. Paths inside the free-form arguments of your own code, such as
``rollout.workflow_args``, are not known here and stay as they are. ``folder`` in ``data.task_args``, ``corpus`` in
``tools.args``, ``folder`` and ``path`` in ``trainer.tracker_args``, and ``agent`` and ``python`` in
``rollout.workflow_args`` are paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Annotated, Any, get_args, get_origin

from headwater.config.constraints import Extension
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.core.registry import PythonObject, known_names

FILE_SUFFIXES = (".parquet", ".json", ".jsonl")


HUB = "hub:"
"""How the id of a dataset on the Hugging Face Hub begins, where a plain id would not be recognised."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_file(source: str) -> bool:
    """Whether a data source names a file, and not a task, a dataset of the hub or an object from Python."""
    return not isinstance(source, PythonObject) and PurePath(source).suffix in FILE_SUFFIXES


def is_hub_id(source: str) -> bool:
    """Whether a data source is a dataset of the hub: ``hub:openai/gsm8k``, or a plain id that is no path here."""
    if isinstance(source, PythonObject) or is_file(source):
        return False
    is_plain = bool(_HUB_ID.fullmatch(source)) and not source.endswith(".py") and not Path(source).exists()
    return source.startswith(HUB) or is_plain


def is_whole(source: str) -> bool:
    """Whether a data source has a fixed number of rows, unlike a task, which generates as many as requested."""
    if isinstance(source, PythonObject):
        return not callable(source.value)
    return is_file(source) or "://" in source or is_hub_id(source) or is_folder(source)


def is_folder(source: str) -> bool:
    """Whether a data source is a folder: of ``datasets.save_to_disk``, or with files of data. A task comes first."""
    is_task = source.partition(":")[0] in known_names("headwater.data.tasks")
    return not is_task and Path(source).expanduser().is_dir()


def looks_like_folder(path: str) -> bool:
    """Whether a model is a local folder and not a hub id such as ``org/name``."""
    separators = path.count("/") + (path.count(os.sep) if os.sep != "/" else 0)
    return path.startswith((".", "/", "~")) or separators > 1 or (path != "" and Path(path).is_dir())


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``datasets.save_to_disk`` wrote the folder: one dataset, or one for each split."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def with_absolute_paths(config: Config) -> Config:
    """The same config with every relative path joined to the working directory."""
    for key, setting in settings(Config).items():
        value = value_at(config, key)
        make = _EXACT.get(key) or (_extension if names_extensions(setting.hint) else None)
        if make is _source and config.data.dataset:
            make = _existing  # only that class knows what the names mean
        if make is not None and (made := _each(value, make)) != value:
            config = _with(config, key, made)
    task_args = _renamed(_folders(config.data.task_args, "folder"), _source)
    tools_args = _renamed(_folders(config.tools.args, "corpus"), _extension)
    workflow_args = {name: _agent(name, value) for name, value in config.rollout.workflow_args.items()}
    corrections_args = _renamed(config.algorithm.corrections_args, _extension)
    sources = {
        _source(name): {key: _each(value, _source) if key == "source" else value for key, value in part.items()}
        for name, part in config.data.sources.items()
    }
    tracker_args = _renamed(_folders(_folders(config.trainer.tracker_args, "folder"), "path"), _extension)
    functions = {
        name: {key: _each(value, _extension) if key == "function" else value for key, value in part.items()}
        for name, part in config.reward.functions.items()
    }
    config = replace(config, data=replace(config.data, task_args=task_args, sources=sources))
    config = replace(config, tools=replace(config.tools, args=tools_args))
    config = replace(config, rollout=replace(config.rollout, workflow_args=workflow_args))
    config = replace(config, reward=replace(config.reward, functions=functions))
    config = replace(config, trainer=replace(config.trainer, tracker_args=tracker_args))
    return replace(config, algorithm=replace(config.algorithm, corrections_args=corrections_args))


def _path(text: str) -> str:
    return os.path.abspath(Path(text).expanduser())


def _model(text: str) -> str:
    return _path(text) if looks_like_folder(text) else text


def _folder_or_url(text: str) -> str:
    return text if "://" in text else _path(text)


def _program(text: str) -> str:
    """A program with a path; the name of one on PATH stays as it is."""
    return _path(text) if "/" in text or os.sep in text else text


def _extension(text: str) -> str:
    """``path/to/file.py:Thing`` with the whole path; ``package.module:Thing`` and names stay as they are."""
    module, colon, thing = text.rpartition(":") if ":" in text else (text, "", "")
    return f"{_path(module)}{colon}{thing}" if module.endswith(".py") else text


def _source(text: str) -> str:
    if isinstance(text, PythonObject) or "://" in text or is_hub_id(text):
        return text
    if is_file(text) or is_folder(text):
        return _path(text)
    return _extension(text)


def _agent(name: str, value: Any) -> Any:
    """An argument of a workflow, with an absolute path if it names an agent or its interpreter."""
    if name == "agent":
        return _each(value, _extension)
    return _path(value) if name == "python" and isinstance(value, str) and "/" in value else value


def _existing(text: str) -> str:
    return _path(text) if Path(text).expanduser().exists() else text


def _template(text: str) -> str:
    """The names of built-in chat templates have neither dots nor slashes."""
    return _path(text) if "." in text or "/" in text else text


_EXACT: Mapping[str, Callable[[str], str]] = {
    "run.root": _path,
    "model.path": _model,
    "model.chat_template": _template,
    "critic.path": _model,
    "reference.path": _model,
    "trainer.checkpoint_dir": _folder_or_url,
    "reward.model": _model,
    "data.train": _source,
    "data.eval": _source,
    "data.dataset": _extension,
    "reward.function": _extension,
    "rollout.should_accept": _extension,
    "rollout.weight_folder": _path,
    "rollout.launch.python": _program,
    "tools.config": _path,
}


def names_extensions(hint: Any) -> bool:
    """Whether values of a type name files of a registry folder, or code elsewhere."""
    if get_origin(hint) is Annotated:
        return any(isinstance(part, Extension) for part in get_args(hint)[1:])
    return any(names_extensions(part) for part in get_args(hint))


def _each(value: Any, make: Callable[[str], str]) -> Any:
    """``make`` applied to a text or to every text of a list; an empty text means that there is none."""
    if isinstance(value, tuple):
        return tuple(_each(item, make) for item in value)
    return make(value) if isinstance(value, str) and value else value


def _folders(arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Arguments, which may be grouped by what they belong to, with the path that ``key`` names made absolute."""
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            made[name] = _folders(value, key)
        else:
            made[name] = _each(value, _path) if name == key else value
    return made


def _renamed(arguments: Mapping[str, Any], make: Callable[[str], str]) -> dict[str, Any]:
    """Arguments grouped by the name of an extension have its new name."""
    return {make(name) if isinstance(value, Mapping) else name: value for name, value in arguments.items()}


def _with(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(config, **{name: _with(getattr(config, name), rest, value) if rest else value})
