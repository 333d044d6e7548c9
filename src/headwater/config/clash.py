"""What a check of settings finds: keys that do not go together, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from headwater.config.keys import value_at
from headwater.config.schema import Config
from headwater.config.tree import DEFAULT, show

Layers = Mapping[str, int]
"""Given key → the layer that had the last word on it; a key that is not in it has its default."""


@dataclass(frozen=True)
class Clash:
    """``keys[0]`` is the one to blame; the others are those it clashes with."""

    keys: tuple[str, ...]
    reason: str

    def line(self, config: Config, origins: Mapping[str, str]) -> str:
        key = self.keys[0]
        return f"{key} = {show(value_at(config, key))} ({origins.get(key, DEFAULT)}): {self.reason}"


Check = Callable[[Config, Layers], Iterator[Clash]]


def unread(keys: Iterable[str], switches: tuple[str, ...], why: str, layers: Layers) -> Iterator[Clash]:
    """Those of ``keys`` that were given for a part that is off, unless it was switched off in the same place or later.

    Switching a part off on the command line is fine although the recipe sets it up; asking on the command line for
    what the recipe has off is not. One file may say both, as resolved recipes do.
    """
    switched_off = max(layers.get(key, -1) for key in switches)
    for key in keys:
        if key not in switches and layers.get(key, -1) > switched_off:
            yield Clash((key, *switches), f"nothing reads this, because {why}, or remove this")


def given_in(section: str, layers: Layers) -> list[str]:
    """The keys of a section that were given."""
    return [key for key in layers if key.startswith(f"{section}.")]
