"""A config for people: every value with its origin, its explanation and what it may be, and the resolved recipe."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from headwater.config import yaml12
from headwater.config.convert import allowed
from headwater.config.declared import Declared, read_declared
from headwater.config.keys import settings, value_at
from headwater.config.load import LoadedConfig
from headwater.config.schema import AlgorithmConfig, Config
from headwater.config.traits import AdvantageTraits, CorrectionTraits, LossTraits


@dataclass(frozen=True)
class Explained:
    """One setting; ``help`` is what the schema says under its field."""

    key: str
    value: Any
    origin: str
    help: str
    limits: str
    """A sentence on the allowed values, or on the arguments that the chosen algorithm takes; empty if any will do."""

    @property
    def text(self) -> str:
        return f"{self.help} {self.limits}".strip()


def explain(loaded: LoadedConfig) -> list[Explained]:
    """Every setting, in the order of the schema."""
    taken = _arguments(loaded.config.algorithm)
    return [
        Explained(
            key,
            value_at(loaded.config, key),
            loaded.origins[key],
            explanation(key),
            taken.get(key) or _sentence("Allowed: ", allowed(setting.hint)),
        )
        for key, setting in settings(Config).items()
    ]


def explanation(key: str) -> str:
    """The line under the field of ``key``; empty if the schema has none."""
    setting = settings(Config)[key]
    return _field_texts(setting.owner).get(setting.field.name, "")


def _arguments(algorithm: AlgorithmConfig) -> dict[str, str]:
    """What the chosen algorithms take, by the key of their arguments."""
    chosen: dict[str, list[Declared[Any] | None]] = {
        "algorithm.advantage_args": [read_declared(AdvantageTraits, algorithm.advantage)],
        "algorithm.policy_loss_args": [read_declared(LossTraits, algorithm.policy_loss)],
        "algorithm.corrections_args": [
            read_declared(CorrectionTraits, name) for name in dict.fromkeys(algorithm.corrections)
        ],
    }
    return {key: " ".join(_sentence("", each.describe()) for each in found if each) for key, found in chosen.items()}


def _sentence(start: str, text: str) -> str:
    return f"{start}{text}." if text else ""


def to_yaml(config: Config, section: str = "") -> str:
    """The resolved recipe: every key, defaults too, so that it stays the same run when defaults change.

    Loading it gives an equal config. ``section`` keeps only that one.
    """
    values = _plain(config)
    return yaml12.dump({section: values[section]} if section else values)


def changed_settings(config: Config, leave_out: Sequence[str] = ()) -> str:
    """The settings that differ from their defaults, as a recipe. Sections in ``leave_out`` are not shown."""
    changed: dict[str, Any] = {}
    for key, setting in settings(Config).items():
        section, _, rest = key.partition(".")
        value = value_at(config, key)
        if section in leave_out or value == setting.default():
            continue
        *inner, name = rest.split(".")
        place = changed.setdefault(section, {})
        for each in inner:
            place = place.setdefault(each, {})
        place[name] = _plain(value)
    return yaml12.dump(changed)


@cache
def _field_texts(schema: type) -> dict[str, str]:
    """Field name → the string literal below it. Python discards these literals, so they are read from the source."""
    (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            texts[statement.target.id] = " ".join(below.value.value.split())
    return texts


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
