"""What an algorithm declares about itself, read from its source text: nothing is imported, not even torch.

    declared = read_declared(AdvantageTraits, "gae")                       # a built-in name
    declared = read_declared(LossTraits, "path/to/file.py:my_loss")       # or an extension path
    declared.traits.needs_all_samples
    declared.problems({"clip_low": -1})    # [("clip_low", "must be >= 0")]

Traits and constraints must be literals. A type that cannot be read without importing is not checked here but when the
algorithm is built.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Generic, Literal, TypeVar, Union

from headwater.config import constraints
from headwater.config.arguments import broken_rules
from headwater.config.constraints import Constraint
from headwater.config.convert import allowed
from headwater.config.traits import (
    AdvantageTraits,
    BackendTraits,
    CorrectionTraits,
    LossTraits,
    ScorerTraits,
    Switch,
    WorkflowTraits,
)
from headwater.config.tree import show
from headwater.core.registry import is_path, nearest, registered_file, split_path

T = TypeVar("T", AdvantageTraits, LossTraits, CorrectionTraits, WorkflowTraits, BackendTraits, ScorerTraits)

_SIMPLE = {"float": float, "int": int, "bool": bool, "str": str}
_SEQUENCES: dict[str, type] = {"Sequence": Sequence, "list": list, "tuple": tuple}
_CONSTRAINTS = {
    name: thing
    for name, thing in vars(constraints).items()
    if isinstance(thing, type) and issubclass(thing, Constraint)
}


class WrongDeclaration(Exception):
    """What is wrong with a declaration, where, and the remedy."""


@dataclass(frozen=True)
class Parameter:
    """A keyword-only argument of an algorithm."""

    name: str
    hint: Any
    """Its type with constraints; Any where only an import could tell."""
    default: Any
    """None where it has none, or one that is not a literal."""


@dataclass(frozen=True)
class Declared(Generic[T]):
    """The traits and arguments of one algorithm."""

    name: str
    traits: T
    parameters: Mapping[str, Parameter]
    takes_any: bool
    """Whether it accepts arguments that it does not name."""

    def is_on(self, switch: Switch, arguments: Mapping[str, Any]) -> bool:
        """Whether a trait applies with these arguments."""
        return self.value(switch, arguments) is True if isinstance(switch, str) else switch

    def value(self, argument: str, arguments: Mapping[str, Any]) -> Any:
        """The given value of an argument, or its default."""
        if argument in arguments or argument not in self.parameters:
            return arguments.get(argument)
        return self.parameters[argument].default

    def problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Each wrong argument, with the rule it breaks and the remedy."""
        for name in arguments:
            if name not in self.parameters and not self.takes_any:
                takes = ", ".join(self.parameters) or "no arguments"
                yield name, f"no such argument; {self.traits.kind} {self.name!r} takes {takes}"
        hints = {name: parameter.hint for name, parameter in self.parameters.items()}
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        yield from broken_rules(hints, defaults, arguments)

    def describe(self) -> str:
        """The arguments with their defaults and what they may be, on one line."""
        if not self.parameters:
            return f"{self.name} takes no arguments"
        shown = [_describe(parameter) for parameter in self.parameters.values()]
        return f"{self.name} takes {', '.join(shown)}"


def _describe(parameter: Parameter) -> str:
    default = "null" if parameter.default is None else show(parameter.default)
    rule = allowed(parameter.hint)
    return f"{parameter.name} = {default}" + (f" ({rule})" if rule else "")


def read_declared(traits: type[T], name: str) -> Declared[T] | None:
    """What the algorithm ``name`` of this kind declares; None if its source cannot be found.

    WrongDeclaration says what is wrong with the source.
    """
    kind: Any = traits  # mypy does not take a type with a variable for hashable
    if not is_path(name):
        path = registered_file(traits.package, name)
        if not path.is_file():
            return None
        source = _source(path)
        return _read(kind, source, name, _registered(source) or name)
    module, attribute = split_path(name)
    found = Path(module).expanduser().resolve() if module.endswith(".py") else module_file(module)
    if found is None or not found.is_file():
        return None
    return _read(kind, _source(found), name, attribute)


@dataclass(frozen=True, eq=False)
class Source:
    """The parsed text of one version of a file; equal only to itself, so that what is read from it can be cached."""

    path: Path
    bindings: Mapping[str, ast.stmt]
    """The last top-level statement that binds each name."""

    def located(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"

    def imported(self, statement: ast.ImportFrom, name: str) -> tuple[Source, str] | None:
        """Where ``from module import name`` leads; None if that is not a source file."""
        original = next((each.name for each in statement.names if name in (each.asname, each.name)), name)
        if statement.level:
            folder = self.path.parents[statement.level - 1]
            parts = (statement.module or "").split(".") if statement.module else []
            path: Path | None = folder.joinpath(*parts, "__init__.py")
            if parts and path is not None and not path.is_file():
                path = folder.joinpath(*parts[:-1], f"{parts[-1]}.py")
        else:
            path = module_file(statement.module or "")
        if path is None or not path.is_file():
            return None
        source = _source(path)
        return (source, original) if original in source.bindings else None


def _registered(source: Source) -> str | None:
    """The name of the function or class that a file of a registry folder registers."""
    for name, statement in source.bindings.items():
        for decorator in getattr(statement, "decorator_list", ()):
            if _last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "register":
                return name
    return None


def _source(path: Path) -> Source:
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _parse(path: Path, changed_ns: int, size: int) -> Source:
    """The times are part of the key, so that an edited file is read again."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise WrongDeclaration(f"{path}{line}: not valid Python: {error}; fix the file") from error
    bindings: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bindings[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            bindings.update({alias.asname or alias.name: statement for alias in statement.names})
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            bindings.update({target.id: statement for target in targets if isinstance(target, ast.Name)})
    return Source(path, bindings)


def module_file(module: str) -> Path | None:
    """The file of a module, found as an import would find it, but without running its packages."""
    loaded = sys.modules.get(module or "builtins")  # an object of a notebook has none
    if loaded is not None:
        file: str | None = getattr(loaded, "__file__", None)
        return Path(file) if file and file.endswith(".py") else None
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


@lru_cache(maxsize=256)
def _read(traits: type[Any], source: Source, name: str, attribute: str) -> Declared[Any] | None:
    found = _definition(source, attribute)
    if found is None:
        return None
    source, definition = found
    function = definition
    if isinstance(definition, ast.ClassDef):
        init = [each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        function = init[0] if init else definition
    if isinstance(function, ast.ClassDef):
        return Declared(name, _traits(traits, source, definition), {}, takes_any=True)
    parameters = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        hint = Any if argument.annotation is None else _hint(argument.annotation, source)
        parameters[argument.arg] = Parameter(argument.arg, hint, _literal_or_none(default))
    declared = _traits(traits, source, definition)
    _check_switches(declared, parameters, source, definition)
    return Declared(name, declared, parameters, takes_any=function.args.kwarg is not None)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definition(source: Source, name: str) -> tuple[Source, Definition] | None:
    """The function or class behind a name, also where a file only imports it."""
    for _ in range(8):
        statement = source.bindings.get(name)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return source, statement
        followed = source.imported(statement, name) if isinstance(statement, ast.ImportFrom) else None
        if followed is None:
            return None
        source, name = followed
    return None


def _traits(traits: type[T], source: Source, definition: Definition) -> T:
    for decorator in definition.decorator_list:
        if not isinstance(decorator, ast.Call) or _last_name(decorator.func) != "register":
            continue
        if not _names_an_agent_loop(decorator):
            return _from_call(traits, source, decorator)
    return traits()


def _names_an_agent_loop(decorator: ast.Call) -> bool:
    """Whether this is verl's ``@register("name")``, which declares nothing."""
    return isinstance(decorator.func, ast.Name) and all(isinstance(each, ast.Constant) for each in decorator.args)


def _from_call(traits: type[T], source: Source, decorator: ast.Call) -> T:
    where, example = source.located(decorator), f"register({traits.__name__}(...))"
    given = decorator.args[0] if len(decorator.args) == 1 and not decorator.keywords else None
    if not isinstance(given, ast.Call):
        raise WrongDeclaration(f"{where}: traits are read without importing the file; write them as {example}")
    if _last_name(given.func) != traits.__name__:
        raise WrongDeclaration(
            f"{where}: is registered with {_last_name(given.func)}, and {traits.key} needs {traits.__name__}"
        )
    known = {field.name: field.default for field in fields(traits)}
    values: dict[str, Any] = {}
    for keyword in given.keywords:
        if keyword.arg not in known:
            reason = nearest(str(keyword.arg), list(known)) if keyword.arg else "write each trait as a keyword"
            raise WrongDeclaration(f"{where}: no such trait {keyword.arg!r}; {reason}")
        value = _literal(keyword.value, source, f"the trait {keyword.arg}")
        text_allowed = isinstance(known[keyword.arg], str) or keyword.arg in _switches(traits)
        if not (isinstance(value, str) and text_allowed) and type(value) is not type(known[keyword.arg]):
            kind = {bool: "true or false", tuple: "a tuple of names"}.get(type(known[keyword.arg]), "text")
            raise WrongDeclaration(f"{where}: the trait {keyword.arg} = {value!r} must be {kind}")
        values[keyword.arg] = value
    if given.args:
        raise WrongDeclaration(f"{where}: write each trait as a keyword, such as {next(iter(known))}=...")
    return traits(**values)


def _switches(traits: type[Any]) -> list[str]:
    return [field.name for field in fields(traits) if field.type in ("Switch", Switch)]


def _check_switches(traits: Any, parameters: Mapping[str, Parameter], source: Source, definition: Definition) -> None:
    named = [*_switches(type(traits)), *(["discount"] if isinstance(traits, AdvantageTraits) else [])]
    for trait in named:
        value = getattr(traits, trait)
        if isinstance(value, str) and value and value not in parameters:
            raise WrongDeclaration(
                f"{source.located(definition)}: the trait {trait} names the argument {value!r}, which "
                f"{definition.name} does not take; {nearest(value, list(parameters))}"
            )


def _hint(node: ast.expr, source: Source) -> Any:
    """The type of an annotation; Any if settings cannot have this type."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            try:
                return _hint(ast.parse(node.value, mode="eval").body, source)
            except SyntaxError:
                return Any
        return type(None) if node.value is None else Any
    if isinstance(node, ast.Name):
        return _SIMPLE[node.id] if node.id in _SIMPLE else _alias(node.id, source)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_hint(node.left, source), _hint(node.right, source)])
    if isinstance(node, ast.Subscript):
        return _subscript(node, source)
    return Any


def _subscript(node: ast.Subscript, source: Source) -> Any:
    base, inside = _last_name(node.value), node.slice
    items = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if base == "Literal":
        return Literal[tuple(_literal(item, source, "a choice") for item in items)]
    if base == "Annotated":
        hint = _hint(items[0], source)
        found = [made for item in items[1:] if (made := _constraint(item, source)) is not None]
        return Annotated[(hint, *found)] if found and hint is not Any else hint
    if base == "Optional":
        return _union([_hint(items[0], source), type(None)])
    if base in _SEQUENCES:
        given = tuple(... if _is_ellipsis(item) else _hint(item, source) for item in items)
        return Any if Any in given else GenericAlias(_SEQUENCES[base], given)
    return Any


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _union(options: list[Any]) -> Any:
    real = [option for option in options if option is not type(None)]
    if Any in real or len(real) != 1:
        return Any
    return Union[real[0], None] if len(options) > 1 else real[0]  # noqa: UP007 - a value, not an annotation


def _alias(name: str, source: Source) -> Any:
    """A type that the file, or one it imports from, gives a name: ``Level = Literal["token", "sequence"]``."""
    for _ in range(8):
        statement = source.bindings.get(name)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            return _hint(statement.value, source)
        followed = source.imported(statement, name) if isinstance(statement, ast.ImportFrom) else None
        if followed is None:
            return Any
        source, name = followed
    return Any


def _constraint(node: ast.expr, source: Source) -> Constraint | None:
    """None for a note that is not one of our constraints."""
    if not isinstance(node, ast.Call) or _last_name(node.func) not in _CONSTRAINTS:
        return None
    name = _last_name(node.func)
    arguments = [_literal(each, source, f"an argument of {name}") for each in node.args]
    keywords = {each.arg or "": _literal(each.value, source, f"an argument of {name}") for each in node.keywords}
    try:
        return _CONSTRAINTS[name](*arguments, **keywords)
    except TypeError as error:
        raise WrongDeclaration(f"{source.located(node)}: {error}") from error


def _literal(node: ast.expr, source: Source, what: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise WrongDeclaration(
            f"{source.located(node)}: {what} is not a literal ({ast.unparse(node)}); it is read without importing the "
            "file, so write the value itself"
        ) from None


def _literal_or_none(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
