"""A run's settings with their explanations, and the difference between the settings of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any

from headwater.config.explain import explain
from headwater.config.keys import settings as known_settings
from headwater.config.load import LoadedConfig
from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError
from headwater.dashboard.plain_values import jsonable
from headwater.dashboard.runs import Run
from headwater.observe.evidence import recorded_config

_MOST_BYTES = 1 << 20
_NOT_COMPARED = ("run.name", "run.root")


def settings(run: Run) -> dict[str, Any]:
    """Every setting. If this version cannot read them, the file as it is."""
    file, problems = run.directory.config_file, []
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        run.check()
        text, problems = "", [f"{file.name} cannot be read ({error.strerror})."]
    loaded = _loaded(run, problems)
    explained = explain(loaded) if loaded is not None else []
    defaults = {key: setting.default() for key, setting in known_settings(Config).items()}
    sections = [
        {
            "name": name,
            "settings": [
                {
                    "key": each.key,
                    "value": plain(each.value),
                    "text": each.text,
                    "is_default": each.value == defaults[each.key],
                }
                for each in of_section
            ],
        }
        for name, of_section in groupby(explained, key=lambda each: each.key.partition(".")[0])
    ]
    return {"file": file.name, "sections": sections, "yaml": text, "problems": problems}


def difference(left: Run, right: Run) -> dict[str, Any]:
    problems: list[str] = []
    sides = [_loaded(run, problems) for run in (left, right)]
    found: list[dict[str, Any]] = []
    num_equal = 0
    if sides[0] is not None and sides[1] is not None:
        for mine, other in zip(explain(sides[0]), explain(sides[1]), strict=True):
            if mine.key in _NOT_COMPARED:
                continue
            if mine.value == other.value:
                num_equal += 1
            else:
                values = {"left": plain(mine.value), "right": plain(other.value)}
                found.append({"key": mine.key, **values, "text": mine.help})
    return {
        "left": left.name,
        "right": right.name,
        "differences": found,
        "num_equal": num_equal,
        "problems": problems,
    }


def _loaded(run: Run, problems: list[str]) -> LoadedConfig | None:
    file = run.directory.config_file
    try:
        found = file.stat()
        return recorded_config(file, found.st_mtime_ns, found.st_size)
    except (HeadwaterError, OSError, ValueError, RecursionError) as error:
        run.check()
        first = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        problems.append(f"The settings of {run.name} cannot be read by this version ({first}).")
        return None


def plain(value: Any) -> Any:
    """A setting as JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return jsonable(value) if isinstance(value, (str, int, float, bool, type(None))) else str(value)
