"""Settings from Python code: keyword arguments, dicts, and objects such as a reward function or a list of rows.

A function or class that other processes can import becomes its path, ``package.module:function``. Any other object is
kept as it is (``PythonObject``): it works in this process only, and a run records its name.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

from headwater.config.keys import settings, value_at
from headwater.config.recipe import in_full
from headwater.config.schema import Config
from headwater.config.tree import Branch, Leaf, Origin, Tree
from headwater.core.registry import PythonObject

PYTHON_CODE = "Python"
_SOURCES = ("data.train", "data.eval")
_PLAIN = (str, int, float, bool, type(None))


def tree_of(values: Mapping[str, Any], layer: int, problems: list[str], source: str = PYTHON_CODE) -> Branch:
    """``{"trainer": {"total_steps": 20}, "learner.learning_rate": 1e-4}`` as a tree."""
    return in_full(_Reader(Origin(source, layer), problems).branch(values, ""))


def named(value: Any) -> str:
    """The path of a function or class that other processes can import; otherwise the object itself."""
    name = getattr(value, "__qualname__", "")
    if (inspect.isfunction(value) or inspect.isclass(value)) and name.isidentifier():
        module = sys.modules.get(value.__module__)
        if module is not None and getattr(module, name, None) is value and (path := _path_of(module)):
            return f"{path}:{name}"
    return PythonObject(getattr(value, "__name__", type(value).__name__), value)


def _path_of(module: ModuleType) -> str:
    """How another process imports a module; empty if it cannot."""
    if module.__name__ != "__main__":
        return module.__name__
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if not file or not Path(file).is_file() or not _is_guarded(Path(file)):
        return ""  # a notebook or an interactive session, or a script that would start its run again
    return str(spec.name) if spec is not None else os.path.abspath(file)


def _is_guarded(script: Path) -> bool:
    """Whether the statement of the script that runs now is below ``if __name__ == "__main__"``."""
    frame, line = inspect.currentframe(), 0
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    try:
        statements = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    guards = (each for each in statements if isinstance(each, ast.If) and "__name__" in ast.unparse(each.test))
    return any(each.lineno <= line <= (each.end_lineno or 0) for each in guards)


class _Reader:
    def __init__(self, origin: Origin, problems: list[str]) -> None:
        self._origin = origin
        self._problems = problems

    def branch(self, values: Mapping[Any, Any], prefix: str) -> Branch:
        children: dict[str, Tree] = {}
        for key, value in values.items():
            first, _, rest = str(key).partition(".")
            # Inside free-form arguments a dot is part of the name.
            if rest and not self._is_free(prefix[:-1]):
                value = {rest: value}
            else:
                first = str(key)
            made = self._tree(value, prefix + first)
            before = children.get(first)
            if isinstance(before, Branch) and isinstance(made, Branch):
                made = Branch({**before.children, **made.children}, self._origin)
            children[first] = made
        return Branch(children, self._origin)

    def _tree(self, value: Any, key: str) -> Tree:
        if is_dataclass(value) and not isinstance(value, type):
            value = changed(value)
        if key in _SOURCES:
            return Leaf(sources(value), self._origin)
        if isinstance(value, Mapping):
            return self.branch(value, f"{key}.")
        return Leaf(self._value(value, key), self._origin)

    def _value(self, value: Any, key: str) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._value(each, key) for each in value]
        if isinstance(value, Mapping):
            return {str(name): self._value(each, key) for name, each in value.items()}
        if hasattr(value, "item") and not callable(value):  # a number of numpy or torch
            return value.item()
        if self._is_free(key):
            self._problems.append(
                f"{key} = {value!r} ({PYTHON_CODE}): must be a plain value, because a run records it; bind the object "
                "to the function or class itself, for example with functools.partial"
            )
            return None
        return named(value)

    @staticmethod
    def _is_free(key: str) -> bool:
        """Whether the key is inside the free-form arguments of an extension."""
        names = key.split(".")
        for depth in range(1, len(names) + 1):
            setting = settings(Config).get(".".join(names[:depth]))
            if setting is not None and get_origin(setting.hint) is Mapping:
                return not (setting.key == "reward.functions" and names[-1] in ("function", "functions"))
        return False


def sources(value: Any) -> list[str]:
    """``data.train`` or ``data.eval`` from Python: one source or a list of them.

    A source is the text of a recipe, a function ``rows(split, num_rows, seed)``, or rows: a list of dicts, a
    ``datasets.Dataset``, a pandas ``DataFrame``.
    """
    if isinstance(value, (str, os.PathLike)):
        return [value if isinstance(value, str) else os.fspath(value)]
    if isinstance(value, (list, tuple)) and not all(isinstance(each, Mapping) for each in value):
        return [source for each in value for source in sources(each)]
    if isinstance(value, (list, tuple)) and not value:
        return []
    if callable(value):
        return [named(value)]
    if hasattr(value, "iterrows"):
        value = value.to_dict("records")
    return [PythonObject("rows", value)]


def changed(section: Any) -> dict[str, Any]:
    """The values of a config dataclass that differ from its defaults."""
    found: dict[str, Any] = {}
    default = type(section)() if not isinstance(section, Config) else Config()
    for field in fields(default):
        value, usual = getattr(section, field.name), getattr(default, field.name)
        if is_dataclass(usual):
            value = changed(value)
            usual = {}
        if value != usual:
            found[field.name] = value
    return found


def python_objects(config: Config) -> dict[str, Any]:
    """The settings that have objects of this process, by dotted key."""
    found: dict[str, Any] = {}
    for key in settings(Config):
        value = value_at(config, key)
        if key == "reward.functions":
            parts = {name: {"function": part["function"]} for name, part in value.items() if _has(part.get("function"))}
            found |= {key: parts} if parts else {}
        elif _has(value):
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def _has(value: Any) -> bool:
    return isinstance(value, PythonObject) or (isinstance(value, tuple) and any(map(_has, value)))
