"""Extensions by name: a file in a registry folder, or a dotted path.

A folder such as ``headwater/algorithms/advantages`` is a registry. The config name ``grpo`` refers to its file
``grpo.py``, and that file registers the function or class it offers:

    ADVANTAGES = Registry("advantage", "headwater.algorithms.advantages")

    @ADVANTAGES.register(AdvantageTraits(compares_groups=True))    # in headwater/algorithms/advantages/grpo.py
    def grpo(...): ...

    ADVANTAGES.resolve("grpo")
    ADVANTAGES.resolve("my_package.my_module:my_advantage")
    ADVANTAGES.resolve("path/to/file.py:my_advantage")

Nothing is imported before it is resolved. Names, and the traits given to ``register`` (``config/traits.py``), can
therefore be checked without loading torch.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from headwater.core.errors import HeadwaterError, UnknownName
from headwater.core.stand_ins import provide

PACKAGE_ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")

EXTENSION_PREFIX = "headwater_extension_"
"""Modules with such names were loaded from files."""

_MAIN = "engine"
"""The file of a registered folder that registers it."""

_REGISTERS = re.compile(r"^@\w+\.register\b", re.MULTILINE)


class Traits:
    """Base of the records that state, at a registration, what the config checks must know about an extension."""


PYTHON = "python:"
"""How the name of an object begins that a Python program passed instead of the name of an extension."""


NOT_HERE = (
    "is an object of the Python program that started the run; continue it there, with headwater.train(..., "
    "resume=RUN) and the same argument, or give a file here, such as path/to/file.py:function"
)


class PythonObject(str):
    """An object that a Python program passed, for example a reward function, as a config value.

    As text it is ``python:<name>``, which is what a run records. The object itself stays in the process: a copy that
    was pickled or written to a file is only the text, and ``load_object`` refuses it.
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> PythonObject:
        made = super().__new__(cls, f"{PYTHON}{name}")
        made.value = value
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def split_path(path: str) -> tuple[str, str]:
    """The module or file of an extension path, and the name in it. A notebook's function has neither."""
    module, _, attribute = path.rpartition(":")
    if isinstance(path, PythonObject):
        module = getattr(getattr(path.value, "__code__", None), "co_filename", "")
    return module, attribute


def is_path(name: str) -> bool:
    """Return whether a config value is an extension path (``module:Thing`` or ``file.py:Thing``)."""
    return ":" in name


def known_names(package: str) -> list[str]:
    """Return the names in a registry folder: its files that register something, found without importing them.

    A folder with a file ``engine.py`` that registers something is a name as well.
    """
    folder = PACKAGE_ROOT.joinpath(*package.split(".")[1:])
    files = {path.stem: path for path in folder.glob("*.py") if not path.stem.startswith("_")}
    files |= {path.parent.name: path for path in folder.glob(f"*/{_MAIN}.py")}
    return sorted(name for name, path in files.items() if _REGISTERS.search(path.read_text(encoding="utf-8")))


def registered_file(package: str, name: str) -> Path:
    """The file of a name in a registry folder, which need not exist."""
    path = PACKAGE_ROOT.joinpath(*package.split(".")[1:], f"{name}.py")
    return path if path.is_file() else path.with_suffix("") / f"{_MAIN}.py"


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the closest known name, then all of them."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


def similar_path(path: Path) -> str:
    """``; did you mean ...?`` with the entry of its folder that has the most similar name; empty if there is none."""
    folder = path.expanduser().parent
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name != path.name]
    except OSError:
        return ""
    matches = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / matches[0]}?" if matches else ""


def load_object(path: str) -> Any:
    """Import the object that ``package.module:Thing`` or ``path/to/file.py:Thing`` names."""
    provide()  # the code may be written for verl or AReaL
    if isinstance(path, PythonObject):
        return path.value
    if path.startswith(PYTHON):
        raise UnknownName(f"{path}: {NOT_HERE}")
    module_name, _, attribute = path.rpartition(":")
    if not module_name or not attribute:
        raise UnknownName(f"{path!r}: write an extension as 'package.module:Thing' or 'path/to/file.py:Thing'")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    if not hasattr(module, attribute):
        raise UnknownName(f"{module_name} has no {attribute!r}; {nearest(attribute, _offered(module))}")
    return getattr(module, attribute)


@contextmanager
def blaming(setting: str) -> Iterator[None]:
    """Prefix errors with the setting that named the extension: ``with blaming(f"reward.function = {name}")``."""
    try:
        yield
    except UnknownName as error:
        raise UnknownName(f"{setting}: {error}") from error
    except HeadwaterError as error:
        raise HeadwaterError(f"{setting}: {error}") from error


def _offered(module: ModuleType) -> list[str]:
    """Return the public functions and classes that the module defines, without those it imports."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnknownName(f"cannot import {name!r}: {error}; is it installed, or on PYTHONPATH?") from error
    except Exception as error:  # importing third-party code may raise anything
        raise HeadwaterError(f"{name}: failed to import: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UnknownName(f"{path}: no such file; give the path of an existing Python file")
    # Load a file as the same module each time; otherwise its classes would not compare equal.
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    name = f"{EXTENSION_PREFIX}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownName(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise HeadwaterError(f"{path}: failed to import: {type(error).__name__}: {error}") from error
    return module


class Registry:
    """Objects of one kind, named after the files of one folder."""

    def __init__(self, kind: str, package: str, prepare: Callable[[Any], Any] | None = None) -> None:
        """``prepare`` is applied to everything that is registered, for example to check the arguments of calls."""
        self.kind = kind
        self.package = package
        self._prepare = prepare
        self._objects: dict[str, Any] = {}

    @overload
    def register(self, thing: Traits) -> Callable[[T], T]: ...

    @overload
    def register(self, thing: T) -> T: ...

    def register(self, thing: Any) -> Any:
        """Register ``thing`` under the name of its file; use it as a decorator, with or without traits.

        A file outside the registry's folder is found by its path, so its objects are returned without being kept.
        """
        if isinstance(thing, Traits):
            return self.register
        if self._prepare is not None:
            thing = self._prepare(thing)
        package, _, name = str(thing.__module__).removesuffix(f".{_MAIN}").rpartition(".")
        if package == self.package:
            if name in self._objects and self._objects[name] is not thing:
                raise ValueError(f"{thing.__module__} registers two {self.kind}s; a file may register one")
            self._objects[name] = thing
        return thing

    def names(self) -> list[str]:
        return known_names(self.package)

    def resolve(self, name: str) -> Any:
        if is_path(name):
            return load_object(name)
        if name not in self._objects:
            if name not in self.names():
                raise UnknownName(f"unknown {self.kind} {name!r}; {nearest(name, self.names())}")
            is_folder = registered_file(self.package, name).stem != name
            importlib.import_module(f"{self.package}.{name}.{_MAIN}" if is_folder else f"{self.package}.{name}")
        if name not in self._objects:
            raise UnknownName(f"{self.package}.{name} registers no {self.kind}")
        return self._objects[name]
