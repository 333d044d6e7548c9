"""``Config``: all settings of a run, from recipes, dicts and keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headwater.config import schema
from headwater.config.builtin import split_arguments
from headwater.config.keys import settings, value_at
from headwater.config.load import load_config
from headwater.config.python_values import changed

Layer = str | os.PathLike[str] | Mapping[str, Any] | schema.Config
"""A recipe by name or path, ``key=value``, a dict of settings, or another config."""


class Config(schema.Config):
    """All settings of a run, checked together.

        Config("quickstart", trainer={"total_steps": 20})
        Config("quickstart", "dapo", "trainer.total_steps=20")
        Config({"model.path": "smollm2", "learner": {"learning_rate": 1e-5}})
        Config(base, rollout={"temperature": 0.7})

    Recipes are merged first, in order, then the other arguments in order, then the sections given by keyword. Where a
    recipe has the name of a function, a class or a source of data, the object itself may be given. ``ConfigError``
    reports all problems at once.
    """

    given: frozenset[str]
    """The settings that were given. All others have their defaults."""

    def __init__(self, *layers: Layer, **sections: Any) -> None:
        recipes: list[str] = []
        overrides: list[str | Mapping[str, Any]] = []
        for layer in layers:
            if isinstance(layer, Config):
                recipes += layer._recipes
                overrides += layer._overrides
            elif isinstance(layer, schema.Config):
                overrides.append(changed(layer))
            elif isinstance(layer, Mapping):
                overrides.append(layer)
            elif isinstance(layer, str):
                names, values = split_arguments([layer])
                recipes += names
                overrides += values
            else:
                recipes.append(os.fspath(layer))
        if sections:
            overrides.append(sections)
        loaded = load_config(recipes, overrides)
        values_of = {field.name: getattr(loaded.config, field.name) for field in fields(schema.Config)}
        given = loaded.given & settings(schema.Config).keys()
        for name, value in {**values_of, "given": given, "_recipes": recipes, "_overrides": overrides}.items():
            object.__setattr__(self, name, value)

    _recipes: list[str]
    _overrides: list[str | Mapping[str, Any]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recipes": [], "_overrides": [self.given_values]}  # without objects of this process

    @property
    def given_values(self) -> dict[str, Any]:
        """What was given, by dotted key."""
        return {key: value_at(self, key) for key in sorted(self.given)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value_at(self, key)!r}" for key in sorted(self.given))
        return f"Config({shown})"
