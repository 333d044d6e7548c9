"""The values of recipes and the command line, as a tree that records where each value was written.

Trees are stacked with ``merge``: the later one wins, mappings join by key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.config import yaml12

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """A place where a value was written. A higher layer was merged later and takes precedence."""

    source: str
    layer: int
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Leaf:
    """A scalar or a list."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Branch:
    """A mapping."""

    children: Mapping[str, Leaf | Branch]
    origin: Origin


Tree = Leaf | Branch


def merge(base: Tree, top: Tree, sections: frozenset[str], key: str = "") -> Tree:
    """``top`` over ``base``; ``sections`` are the dotted keys at which an empty mapping or null adds nothing.

    Elsewhere an explicit ``{}`` starts over, which is how a recipe drops the free-form arguments of the one it extends.
    """
    if key in sections and isinstance(top, Leaf) and top.value is None:
        return base
    if isinstance(base, Leaf) or isinstance(top, Leaf) or (not top.children and key not in sections):
        return top
    children = dict(base.children)
    for name, child in top.children.items():
        child_key = f"{key}.{name}" if key else name
        children[name] = merge(children[name], child, sections, child_key) if name in children else child
    return Branch(children, top.origin)


def plain(tree: Tree) -> Any:
    """A deep copy of the value, without its origins."""
    if isinstance(tree, Branch):
        return {name: plain(child) for name, child in tree.children.items()}
    return _copy(tree.value)


def leaves(tree: Tree, key: str) -> Iterator[tuple[str, Tree]]:
    """The dotted key of every leaf (an empty mapping counts as one)."""
    if isinstance(tree, Branch) and tree.children:
        for name, child in tree.children.items():
            yield from leaves(child, f"{key}.{name}")
    else:
        yield key, tree


def origins(tree: Tree) -> list[Origin]:
    """Where the parts of a value were written, without duplicates, in the order of merging."""
    if isinstance(tree, Leaf) or not tree.children:
        return [tree.origin]
    found = {origin for child in tree.children.values() for origin in origins(child)}
    return sorted(found, key=lambda origin: (origin.layer, origin.line or 0))


def where(tree: Tree) -> str:
    return ", ".join(str(origin) for origin in origins(tree))


def show(value: Any) -> str:
    """A value for a message: quoted text, or YAML on one line; long values are shortened."""
    text = repr(value) if isinstance(value, str) else yaml12.dump(value, flow=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value
