"""Plain functions as tools: their schema is made from the type hints and the docstring.

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    '''
    return a + b
"""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from headwater.core.errors import ConfigError
from headwater.tools.base import BaseTool

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(args|arguments|parameters|returns?|raises|yields?|examples?|notes?)\s*:?\s*$", re.IGNORECASE)
_ENTRY = re.compile(r"^\s*(?::param\s+(?:[\w\[\], .]+\s)?)?(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class FunctionTool(BaseTool):
    """A function that is called with the arguments of each call. It has no state for episodes."""

    def __init__(self, function: Callable[..., Any], tool_schema: Any = None) -> None:
        super().__init__(tool_schema=tool_schema if tool_schema is not None else schema_of(function))
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self.execute = self._execute_async if self._is_async else self._execute  # type: ignore[method-assign,assignment]

    def _execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        return self._function(**parameters)

    async def _execute_async(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        return await self._function(**parameters)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The OpenAI function schema of a typed function; ConfigError says what is missing."""
    name = getattr(function, "__name__", type(function).__name__)
    place = f"tool {name}"
    description, argument_texts = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(
            [f"{place}: has no docstring; write one, because the model reads it to learn what the tool does"]
        )
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations may be any expression
        raise ConfigError([f"{place}: its type hints cannot be read ({type(error).__name__}: {error})"]) from error
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError([f"{place}: argument {parameter}: a tool can only have arguments with names; remove it"])
        if parameter.name not in hints:
            raise ConfigError(
                [f"{place}: argument {parameter.name} has no type hint; add one, for example {parameter.name}: str"]
            )
        schema = _schema(hints[parameter.name], f"{place}: argument {parameter.name}")
        if parameter.name in argument_texts:
            schema = {**schema, "description": argument_texts[parameter.name]}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema(hint: Any, place: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Annotated:
        texts = [each for each in inner[1:] if isinstance(each, str)]
        return {**_schema(inner[0], place), **({"description": texts[0]} if texts else {})}
    if origin is Literal:
        return _choices(list(inner))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        raise ConfigError([f"{place}: an Enum; use Literal[...] with its values, which is what the function receives"])
    if origin in (Union, types.UnionType):
        return _union([_schema(each, place) for each in inner])
    if hint in (list, tuple, set) or origin in (list, Sequence):
        return {"type": "array", **({"items": _schema(inner[0], place)} if inner else {})}
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": _schema(inner[1], place)} if inner else {})}
    raise ConfigError(
        [f"{place}: type {hint!r} has no JSON schema; use str, int, float, bool, list, dict, Literal or | None"]
    )


def _choices(values: list[Any]) -> dict[str, Any]:
    kinds = {_SCALARS.get(type(value)) for value in values}
    kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
    return {**kind, "enum": values}


def _union(options: list[dict[str, Any]]) -> dict[str, Any]:
    plain = [each["type"] for each in options if each.keys() == {"type"} and isinstance(each["type"], str)]
    return {"type": plain} if len(plain) == len(options) else {"anyOf": options}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description and the texts of the arguments, from an ``Args:`` section or from ``:param name:`` lines."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(":param"):
            section = "args"
        elif stripped.startswith((":return", ":raise", ":rtype")):
            section = "other"
        elif match := _SECTION.match(stripped):
            section, indent = ("args" if match[1].lower() in ("args", "arguments", "parameters") else "other"), 0
            continue
        if not section:
            description.append(stripped)
        elif section == "args" and stripped:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.match(line) if depth <= indent else None
            if entry:
                current = entry[1]
                arguments[current] = entry[2].strip()
            elif current:
                arguments[current] = f"{arguments[current]} {stripped}".strip()
    return "\n".join(description).strip(), arguments
