"""Converts a tree of values to frozen dataclasses, strictly by their type hints."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from headwater.config.constraints import Constraint
from headwater.config.foreign_keys import foreign_key
from headwater.config.keys import hints, nearest_keys, nearest_section, settings
from headwater.config.tree import Branch, Leaf, Origin, Tree, leaves, plain, show, where
from headwater.core.registry import PythonObject, nearest


class WrongValue(Exception):
    """The rule a value breaks and the remedy; becomes one line of a ConfigError."""


class Converter:
    """Builds ``schema`` from a tree.

    A wrong value adds a line to ``problems`` and is replaced by the default, so that the rest can be read. Its key, or
    the key that was probably meant, is added to ``doubtful``.
    """

    def __init__(self, schema: type) -> None:
        self.problems: list[str] = []
        self.doubtful: set[str] = set()
        self._schema = schema

    def build(self, tree: Branch) -> Any:
        return self._section(self._schema, tree, "")

    def _section(self, schema: type, tree: Branch, prefix: str) -> Any:
        known = {field.name for field in fields(schema)}
        values: dict[str, Any] = {}
        for name, child in tree.children.items():
            key = prefix + name
            if name not in known:
                self._unknown(key, child, inside=prefix[:-1])
                continue
            hint = hints(schema)[name]
            try:
                if not is_dataclass(hint):
                    values[name] = convert(hint, child)
                elif isinstance(child, Branch):
                    assert isinstance(hint, type)
                    values[name] = self._section(hint, child, f"{key}.")
                elif child.value is not None:
                    raise WrongValue("this is a section; give its keys below it, such as " + _example(hint, key))
            except WrongValue as error:
                self.problems.append(f"{key} = {show(plain(child))} ({where(child)}): {error}")
                self.doubtful.add(key)
        return schema(**values)

    def _unknown(self, key: str, tree: Tree, inside: str) -> None:
        below = list(leaves(tree, key))
        is_foreign = any(foreign_key(leaf_key) for leaf_key, _ in below)
        if inside and not is_foreign:
            below = [(key, tree)]
        meant = nearest_section(key, self._schema) if isinstance(tree, Branch) and not is_foreign else []
        if meant and len(below) > 1:
            self.problems.append(f"{key} ({where(tree)}): no such section; did you mean {meant[0]}?")
            self.doubtful.update(name for name in settings(self._schema) if name.startswith(f"{meant[0]}."))
            return
        for leaf_key, leaf in below:
            foreign = foreign_key(leaf_key)
            near = foreign.keys if foreign else nearest_keys(leaf_key, self._schema)
            self.doubtful.update(near)
            hint = foreign.hint if foreign else self._hint(near, inside)
            self.problems.append(f"{leaf_key} ({where(leaf)}): no such key; {hint}")

    def _hint(self, near: Sequence[str], inside: str) -> str:
        if near:
            return f"did you mean {' or '.join(near)}?"
        depth = len(inside) + 1 if inside else 0
        siblings = [key[depth:] for key in settings(self._schema) if key.startswith(inside)]
        names = dict.fromkeys(name.partition(".")[0] for name in siblings)
        return f"known {'keys of ' + inside if inside else 'sections'}: {', '.join(names)}"


def convert(hint: Any, tree: Tree) -> Any:
    """The value of ``tree`` converted to ``hint``; raises WrongValue if it does not fit."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *constraints = get_args(hint)
        value = convert(inner, tree)
        for constraint in constraints:
            broken = constraint.broken_by(value) if isinstance(constraint, Constraint) and value is not None else None
            if broken:
                raise WrongValue(broken)
        return value
    if origin in (Union, types.UnionType):
        return _optional(hint, tree)
    if origin in (tuple, list, Sequence):
        return _tuple(get_args(hint)[0], tree)
    if origin is Mapping or origin is dict:
        return _mapping(get_args(hint)[1], tree)
    if hint is Any:
        return plain(tree)
    if origin is Literal:
        return _choice(get_args(hint), tree)
    return _scalar(hint, tree)


def convert_value(hint: Any, value: Any) -> Any:
    """As ``convert``, for an argument of an extension: a type that settings do not have is not checked."""
    if isinstance(value, Mapping) or not _is_known(hint):
        return value
    return convert(hint, Leaf(value, Origin("", 0)))


def _is_known(hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _is_known(inner[0])
    if origin in (Union, types.UnionType):
        options = [option for option in inner if option is not type(None)]
        return len(options) == 1 < len(inner) and _is_known(options[0])
    if origin in (tuple, list, Sequence):
        return _is_known(inner[0]) and (origin is not tuple or inner[1:] == (...,))
    return origin is Literal or hint in (str, int, float, bool)


def allowed(hint: Any) -> str:
    """The values that ``hint`` allows, in a few words; empty where its type says all."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [part.rule for part in inner[1:] if isinstance(part, Constraint)]
        return " and ".join([*filter(None, [allowed(inner[0])]), *rules])
    if origin in (Union, types.UnionType):
        return " | ".join(allowed(option) or "a value" for option in inner if option is not type(None)) + " | null"
    if origin in (tuple, list, Sequence):
        return f"each {rule}" if (rule := allowed(inner[0])) else ""
    return " | ".join(str(choice) for choice in inner) if origin is Literal else ""


def _optional(hint: Any, tree: Tree) -> Any:
    inner = [option for option in get_args(hint) if option is not type(None)]
    assert len(inner) == 1 < len(get_args(hint)), f"a setting of type {hint} is not supported; use 'X | None'"
    return None if isinstance(tree, Leaf) and tree.value is None else convert(inner[0], tree)


def _tuple(item_hint: Any, tree: Tree) -> tuple[Any, ...]:
    if isinstance(tree, Branch) or tree.value is None:
        raise WrongValue(f"must be a list; {_instead_of(tree, '[]')}")
    if tree.value == "":
        raise WrongValue("must be a list; use [] for none")
    # A single item is a list of one: data.train=arithmetic.
    items = tree.value if isinstance(tree.value, list) else [tree.value]
    return tuple(convert(item_hint, Leaf(item, tree.origin)) for item in items)


def _mapping(value_hint: Any, tree: Tree) -> dict[str, Any]:
    if isinstance(tree, Leaf):
        raise WrongValue(f"must be a mapping; {_instead_of(tree, '{}')}")
    converted = {}
    for name, child in tree.children.items():
        try:
            converted[name] = convert(value_hint, child)
        except WrongValue as error:
            raise WrongValue(f"{name}: {error}") from None
    return converted


def _instead_of(tree: Tree, empty: str) -> str:
    if isinstance(tree, Leaf) and tree.value is None:
        return f"use {empty} for none, or remove it for the default"
    return "write it as {key: value}" if empty == "{}" else "write it as [first, second]"


def _choice(choices: tuple[Any, ...], tree: Tree) -> Any:
    value = plain(tree)
    for choice in choices:
        # True == 1, so the types must agree as well.
        if type(choice) is type(value) and choice == value:
            return choice
    raise WrongValue(f"no such choice; {nearest(str(value), [str(choice) for choice in choices])}")


def _scalar(hint: Any, tree: Tree) -> Any:
    value = plain(tree)
    if hint is float:
        return _float(value)
    rules = {str: _str_rule, int: _int_rule, bool: _bool_rule}
    assert hint in rules, f"a setting of type {hint} is not supported"
    # bool is a subclass of int, so isinstance would accept true as 1.
    if type(value) is hint or (hint is str and isinstance(value, PythonObject)):
        return value
    raise WrongValue(rules[hint](value))


def _float(value: Any) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            raise WrongValue("is too large") from None
        if math.isnan(number):
            raise WrongValue("must be a finite number, not NaN")
        return number
    rule = "must be a finite number" if _is_not_finite(value) else "must be a number"
    raise WrongValue(_join(rule, _numeric_remedy(value)))


def _int_rule(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"must be a whole number; write {int(value)}"
    return _join("must be a whole number", _numeric_remedy(value))


def _bool_rule(value: Any) -> str:
    word = str(value).lower()
    if word in ("yes", "on", "1", "true", "y"):
        return "must be true or false; write true"
    if word in ("no", "off", "0", "false", "n"):
        return "must be true or false; write false"
    return _join("must be true or false", _null_remedy(value))


def _str_rule(value: Any) -> str:
    if value is None:
        return "must be text; use '' for empty text, or remove it for the default"
    if isinstance(value, (dict, list)):
        return "must be text; put all of it in quotes"
    return f"""must be text; put it in quotes, and on the command line in two kinds of quotes: '"{show(value)}"'"""


def _is_not_finite(value: Any) -> bool:
    """Whether ``value`` is a word such as nan or inf, which YAML reads as text."""
    try:
        return isinstance(value, str) and not math.isfinite(float(value))
    except ValueError:
        return False


def _numeric_remedy(value: Any) -> str:
    if _is_not_finite(value):
        return ""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "write it without underscores" if "_" in value else "remove the quotes"
    return _null_remedy(value)


def _null_remedy(value: Any) -> str:
    return "remove it for the default" if value is None else ""


def _join(rule: str, remedy: str) -> str:
    return f"{rule}; {remedy}" if remedy else rule


def _example(hint: Any, key: str) -> str:
    return f"{key}.{fields(hint)[0].name}"
