"""A setting that is valid alone but not with others, and how checks find those that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.config.tree import DEFAULT, show

Layers = Mapping[str, int]
"""The layer that decided each given key; a key that is missing has its default."""


@dataclass(frozen=True)
class Clash:
    keys: tuple[str, ...]
    """The key to blame, then those it clashes with."""
    reason: str
    """What is wrong, and the remedy."""
    argument: Any = None
    """The value, if the first key is an argument inside a free-form mapping."""

    def line(self, config: Config, origins: Mapping[str, str]) -> str:
        key = self.keys[0]
        value = value_at(config, key) if key in settings(Config) else self.argument
        return f"{key} = {show(value)} ({_origin(key, origins)}): {self.reason}"


Check = Callable[[Config, Layers], Iterator[Clash]]


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Where a key, or the mapping it is in, was written."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, DEFAULT)


def unread(keys: Iterable[str], switches: tuple[str, ...], why: str, layers: Layers) -> Iterator[Clash]:
    """Those of ``keys`` that were given for a feature that is off, unless it was turned off in the same layer or later.

    The command line may turn off what the recipe sets up, but it may not configure what the recipe has turned off. One
    file may do both, as resolved recipes do.
    """
    switched_off = max(layers.get(key, -1) for key in switches)
    for key in keys:
        if key not in switches and layers.get(key, -1) > switched_off:
            yield Clash((key, *switches), f"nothing reads this, because {why}, or remove this")


def is_resolved(layers: Layers) -> bool:
    """Whether this is the recipe of a run, which gives every key and must load again."""
    return len(layers) == len(settings(Config))


def is_contradicted(key: str, by: str, layers: Layers) -> bool:
    """Whether ``key`` was given with ``by``, which decides what it says, or after it.

    The command line may contradict the recipe, but neither of them may contradict itself.
    """
    if key not in layers or layers[key] < layers.get(by, -1):
        return False
    return not is_resolved(layers) or layers[key] > min(layers.values())


def given_in(section: str, layers: Layers) -> list[str]:
    """The keys of a section that were given."""
    return [key for key in layers if key.startswith(f"{section}.")]
