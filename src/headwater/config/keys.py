"""The known keys, derived from the dataclasses of the schema, and the nearest one to a mistyped key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Setting:
    """One field of the schema that holds a value."""

    key: str
    hint: Any
    owner: type
    field: Field[Any]

    def default(self) -> Any:
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return self.field.default


@cache
def hints(schema: type) -> dict[str, Any]:
    """Type hints by field name, with their constraints."""
    return get_type_hints(schema, include_extras=True)


@cache
def settings(schema: type) -> dict[str, Setting]:
    """Every setting by dotted key, in the order of the schema."""
    return {setting.key: setting for setting in _walk(schema, "")}


@cache
def sections(schema: type) -> frozenset[str]:
    """Dotted keys of the dataclasses; the root is the empty key."""
    keys = {""}
    for key in settings(schema):
        parts = key.split(".")
        keys.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(keys)


def value_at(config: Any, key: str) -> Any:
    """``config.rollout.top_k`` for ``rollout.top_k``."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def nearest_keys(unknown: str, schema: type) -> list[str]:
    """Keys the user may have meant: the same name in another section, then similar names, nearest section first."""
    known = list(settings(schema))
    section, _, name = unknown.rpartition(".")
    near_section = _alike(section, sorted(sections(schema) - {""}), 0.7)
    if near_section and f"{near_section[0]}.{name}" in known:
        return [f"{near_section[0]}.{name}"]
    own = {_name(key): key for key in known if key.rpartition(".")[0] == section}
    # A close name in the same section is more likely than the same name in another one.
    if close := _alike(name, list(own), 0.8):
        return [own[close[0]]]
    if elsewhere := [key for key in known if _name(key) == name]:
        return elsewhere[:3]
    if close := _alike(name, list(own), 0.6):
        return [own[close[0]]]
    close_names = _alike(name, sorted({_name(key) for key in known}), 0.75)
    return [key for key in known if close_names and _name(key) == close_names[0]][:3] or _alike(unknown, known, 0.75)


def nearest_section(unknown: str, schema: type) -> list[str]:
    return _alike(unknown, sorted(sections(schema) - {""}), 0.6)


def _walk(schema: type, prefix: str) -> Iterator[Setting]:
    for field in fields(schema):
        hint = hints(schema)[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{prefix}{field.name}.")
        else:
            yield Setting(prefix + field.name, hint, schema, field)


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _alike(word: str, known: list[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
