"""Checks of ``data.sources``, and of objects that only the Python program has which started a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.config.checks import Check, Clash, Layers
from headwater.config.keys import settings, value_at
from headwater.config.paths import is_folder, is_hub_id
from headwater.config.schema import Config
from headwater.core.registry import NOT_HERE, PYTHON, PythonObject, nearest

SOURCE_KEYS = ("source", "subset", "split", "columns", "system_prompt", "data_source", "max_rows", "weight")
_TEXTS = ("source", "subset", "split", "system_prompt", "data_source")


def sources_are_complete(config: Config, layers: Layers) -> Iterator[Clash]:
    data = config.data
    for name, part in data.sources.items():
        key = f"data.sources.{name}"
        if name not in (*data.train, *data.eval):
            yield Clash((key,), "neither data.train nor data.eval has this name; add it to one, or remove this", part)
        for field, value in part.items():
            if field not in SOURCE_KEYS:
                yield Clash((f"{key}.{field}",), f"no such key; {nearest(field, list(SOURCE_KEYS))}", value)
            elif reason := _wrong(field, value):
                yield Clash((f"{key}.{field}",), reason, value)
        source = part.get("source", name)
        if isinstance(source, str):
            yield from _unread(config, name, source, part)


def _wrong(field: str, value: Any) -> str:
    if field in _TEXTS:
        return "" if isinstance(value, str) and value else "must be text, and not empty"
    if field == "columns":
        is_right = isinstance(value, Mapping) and all(isinstance(each, str) and each for each in value.values())
        return "" if is_right else "must be a mapping of names to columns, for example {prompt: question}"
    if field == "max_rows":
        return "" if type(value) is int and value >= 1 else "must be a whole number >= 1; remove it to use all rows"
    is_weight = type(value) in (int, float) and math.isfinite(value) and value > 0
    return "" if is_weight else "must be a number > 0; remove the source from data.train to leave it out"


def _unread(config: Config, name: str, source: str, part: Mapping[str, Any]) -> Iterator[Clash]:
    key = f"data.sources.{name}"
    for field in ("subset", "split"):
        if field in part and not (is_hub_id(source) or is_folder(source)):
            yield Clash(
                (f"{key}.{field}",), f"only a dataset of the hub or a folder has one, not {source}", part[field]
            )
    if "weight" in part and name not in config.data.train:
        yield Clash((f"{key}.weight",), "only data.train is mixed by weight; remove it", part["weight"])
    if config.data.dataset:
        yield Clash((key, "data.dataset"), "only RLHFDataset reads this; remove it, or data.dataset", dict(part))


def objects_are_here(config: Config, layers: Layers) -> Iterator[Clash]:
    for key in settings(Config):
        value = value_at(config, key)
        values = value if isinstance(value, tuple) else (value,)
        if key == "reward.functions":
            values = tuple(part.get("function") for part in value.values())
        for each in values:
            if isinstance(each, str) and each.startswith(PYTHON) and not isinstance(each, PythonObject):
                yield Clash((key,), NOT_HERE)


DATA_CHECKS: tuple[Check, ...] = (sources_are_complete, objects_are_here)
