"""Settings held against what is on the disk. For a run that is about to start: to read or show a recipe, its files need
not be there."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.config.checks import is_file
from headwater.config.clash import Check, Clash, Layers
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.config.tree import show


def files_exist(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.data.dataset:
        return  # what the names mean is for that class to say
    for key in ("data.train", "data.eval"):
        for name in value_at(config, key):
            if is_file(name) and "://" not in name and not _find(name):
                yield Clash((key,), f"no such file: {name} (looked in {Path.cwd()}); check the path, or name a task")


def fits_checkpoint(before: Config, checkpoint: Path) -> Check:
    """What ``checkpoint``, made by a run with the settings ``before``, has decided for good."""
    start = [key for key in settings(Config) if key.startswith("warm_start.")]

    def check(config: Config, layers: Layers) -> Iterator[Clash]:
        for key in (*_DECIDED, *start):
            was, now = value_at(before, key), value_at(config, key)
            if was != now and not _is_gone(was):
                why = _DECIDED.get(key, "the supervised start is behind it")
                yield Clash(
                    (key,),
                    f"{checkpoint} was made with {show(was)}, and {why}; leave this out, or start a new run from its "
                    f"model: headwater train RECIPE model.path={checkpoint / 'model'}",
                )

    return check


_DATA = "its place in the data, and what it holds of unfinished rollouts, are of those rows"
_DECIDED = {
    "run.seed": "its place in the order of the data goes with it",
    "model.path": "its weights are of that model",
    "lora.rank": "its adapters are of that size",
    "lora.alpha": "its adapters were trained at that scale",
    "lora.targets": "its adapters are of those layers",
    "critic.enabled": "its critic is kept or missing accordingly",
    "critic.path": "its critic's weights are of that model",
    "data.train": _DATA,
    "data.task_args": _DATA,
    "data.dataset": _DATA,
    "data.num_train_rows": _DATA,
    "data.shuffle": "its place in the order of the data goes with it",
}


def _find(name: str) -> list[str]:
    path = Path(name).expanduser()
    return [str(path)] if path.exists() else glob.glob(str(path), recursive=True)


def _is_gone(value: Any) -> bool:
    """Whether a path is no longer there: what was moved has to be named anew."""
    names = value if isinstance(value, tuple) else (value,)
    return any(_is_path(name) and not _find(name) for name in names)


def _is_path(name: Any) -> bool:
    return isinstance(name, str) and (is_file(name) or name.startswith((".", "/", "~")) or name.count("/") > 1)
