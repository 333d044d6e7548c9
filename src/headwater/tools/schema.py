"""The OpenAI function schema of a tool, the check of a call's arguments against it, and which schemas a row offers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.core.errors import ConfigError, DataError
from headwater.core.registry import nearest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
SELECTION = "tool_selection"
"""Entry of a row's ``extra_info`` with the names of its tools; a row without it has all tools."""
_MAX_DEPTH = 64
"""Schemas may refer to themselves. What is nested more deeply is not checked."""


@dataclass(frozen=True)
class FunctionSchema:
    """Name, description and parameters (a JSON schema) of a tool, as the model reads them."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}


@dataclass(frozen=True)
class ToolSchema:
    """``{"type": "function", "function": {...}}`` with checked contents."""

    function: FunctionSchema
    type: str = "function"

    def __post_init__(self) -> None:
        given: Any = self.function
        if not isinstance(given, FunctionSchema):  # tools for verl construct it with their own records
            made = ToolSchema.read({"function": given.model_dump() if hasattr(given, "model_dump") else given}, "tool")
            object.__setattr__(self, "function", made.function)

    @classmethod
    def read(cls, value: Any, place: str) -> ToolSchema:
        """The schema from a dict, with or without the outer ``function``; ConfigError names ``place`` and the key."""
        if isinstance(value, ToolSchema):
            return value
        if hasattr(value, "model_dump"):
            value = value.model_dump()
        if not isinstance(value, Mapping):
            what = "has no tool_schema" if value is None else f"tool_schema = {value!r}: must be a mapping"
            raise ConfigError([f"{place}: {what}; give its name, description and parameters"])
        outer = _without_nones(value)
        kind = outer.get("type", "function") if "function" in outer else "function"
        if kind != "function":
            raise ConfigError([f"{place}: tool_schema.type = {kind!r}: must be 'function'"])
        inner, key = (outer["function"], "tool_schema.function") if "function" in outer else (outer, "tool_schema")
        if not isinstance(inner, Mapping):
            raise ConfigError([f"{place}: {key} = {inner!r}: must be a mapping"])
        problems = [f"{place}: {problem}" for problem in _problems(inner, key)]
        if problems:
            raise ConfigError(problems)
        parameters = {"type": "object", "properties": {}, **inner.get("parameters", {})}
        return cls(FunctionSchema(inner["name"], inner.get("description", ""), parameters))

    @classmethod
    def model_validate(cls, value: Any) -> ToolSchema:
        """``read``, under the name that it has in verl."""
        return cls.read(value, "tool_schema")

    @property
    def name(self) -> str:
        return self.function.name

    def as_dict(self) -> dict[str, Any]:
        """The schema as the chat template and the OpenAI API expect it."""
        return {"type": self.type, "function": self.function.as_dict()}

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """``as_dict``, under the name that it has in verl."""
        return self.as_dict()

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call with their values converted; ``WrongArguments`` lists what does not match.

        Some formats write every value as text. Text that is JSON of the right type is converted, so ``"3"`` is a valid
        integer. A number without a fraction, such as ``3.0``, is one as well.
        """
        parameters = self.function.parameters
        known: Mapping[str, Any] = parameters["properties"]
        allows_more = parameters.get("additionalProperties", False)
        problems, checked = [], {}
        for name, value in arguments.items():
            if name in known:
                try:
                    checked[name] = _Check(parameters).value(known[name], value, name)
                except WrongArguments as error:
                    problems.append(str(error))
            elif allows_more:
                checked[name] = value
            else:
                problems.append(f"there is no argument {name!r}; {nearest(name, list(known))}")
        missing = [name for name in parameters.get("required", ()) if name not in arguments]
        problems += [f"the argument {name!r} is missing" for name in missing]
        if problems:
            raise WrongArguments("; ".join(problems))
        return checked


@dataclass(frozen=True)
class OfferedTools:
    """The schemas of a run's tools. Unlike the tools themselves, they can be sent to another process."""

    schemas: Mapping[str, Mapping[str, Any]]
    """By the name of the tool, in the order of the settings."""

    def __call__(self, extra_info: Mapping[str, Any], tools_kwargs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The OpenAI function schemas of a row's tools."""
        return [self.schemas[name] for name in self.select(extra_info)]

    def select(self, extra_info: Mapping[str, Any]) -> list[str]:
        """The names of a row's tools."""
        selection = extra_info.get(SELECTION)
        if selection is None:
            return list(self.schemas)
        if not isinstance(selection, Sequence) or isinstance(selection, str):
            raise DataError(f"extra_info.{SELECTION} = {selection!r}: must be a list of tool names")
        for name in selection:
            if name not in self.schemas:
                raise DataError(f"extra_info.{SELECTION} has {name!r}; {nearest(str(name), list(self.schemas))}")
        return [name for name in self.schemas if name in selection]


class WrongArguments(Exception):
    """The arguments of a call do not match the schema; the text is for the model."""


def _without_nones(value: Any) -> Any:
    """Schemas from Parquet files and from pydantic have a null for every keyword that they do not use."""
    if isinstance(value, Mapping):
        return {str(key): _without_nones(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nones(entry) for entry in value]
    return value


def _problems(function: Mapping[str, Any], key: str) -> Iterator[str]:
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"{key}.name = {name!r}: must be 1 to 64 letters, digits or any of _ . -"
    if not isinstance(description, str):
        yield f"{key}.description = {description!r}: must be text"
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        yield f"{key}.parameters = {parameters!r}: must be a JSON schema of type object"
        return
    if parameters.get("type", "object") != "object":
        yield f"{key}.parameters.type = {parameters['type']!r}: must be 'object'"
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{key}.parameters.properties = {properties!r}: must map the name of each argument to its schema"
        return
    for argument, schema in properties.items():
        yield from _type_problems(schema, f"{key}.parameters.properties.{argument}")
    required = parameters.get("required", [])
    if not isinstance(required, Sequence) or isinstance(required, str):
        yield f"{key}.parameters.required = {required!r}: must be a list of argument names"
    elif unknown := [each for each in required if each not in properties]:
        yield f"{key}.parameters.required names {unknown}, which are not in properties"


def _type_problems(schema: Any, key: str) -> Iterator[str]:
    if isinstance(schema, bool):  # true allows every value
        return
    if not isinstance(schema, Mapping):
        yield f"{key} = {schema!r}: must be a JSON schema, for example {{type: string}}"
        return
    types = schema.get("type", [])
    for each in [types] if isinstance(types, str) else types:
        if each not in _TYPES:
            yield f"{key}.type = {each!r}: must be one of {', '.join(_TYPES)}"
    if not isinstance(schema.get("enum", []), list):
        yield f"{key}.enum = {schema['enum']!r}: must be a list"
    if "items" in schema:
        yield from _type_problems(schema["items"], f"{key}.items")
    nested = schema.get("properties", {})
    for name, entry in nested.items() if isinstance(nested, Mapping) else ():
        yield from _type_problems(entry, f"{key}.properties.{name}")


class _Check:
    """Checks values against the common keywords of JSON Schema. Keywords that it does not know are ignored."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._depth = 0

    def value(self, schema: Any, value: Any, path: str) -> Any:
        if not isinstance(schema, Mapping) or self._depth > _MAX_DEPTH:
            return value
        self._depth += 1
        try:
            return self._value(schema, value, path)
        finally:
            self._depth -= 1

    def _value(self, schema: Mapping[str, Any], value: Any, path: str) -> Any:
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), value, path)
        for part in schema.get("allOf", ()):
            value = self.value(part, value, path)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            value = self._any(options, value, path)
        value = self._typed(schema, value, path)
        self._check_choice(schema, value, path)
        self._check_range(schema, value, path)
        return self._children(schema, value, path)

    def _resolve(self, reference: Any) -> Any:
        found: Any = self._root
        if not str(reference).startswith("#"):
            return {}
        for part in str(reference).removeprefix("#").split("/")[1:]:
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        return found

    def _any(self, options: Sequence[Any], value: Any, path: str) -> Any:
        reasons = []
        for option in options:
            try:
                return self.value(option, value, path)
            except WrongArguments as error:
                reasons.append(str(error))
        raise WrongArguments(" or ".join(dict.fromkeys(reasons)))

    def _typed(self, schema: Mapping[str, Any], value: Any, path: str) -> Any:
        types = schema.get("type")
        if not types:
            return value
        allowed = [types] if isinstance(types, str) else list(types)
        for kind in allowed:
            if _is_type(kind, value):
                return int(value) if kind == "integer" else value
        if isinstance(value, str):
            parsed = _parsed(value)
            for kind in allowed:
                if _is_type(kind, parsed):
                    return int(parsed) if kind == "integer" else parsed
        raise WrongArguments(f"{path} must be of type {' or '.join(allowed)}, not {_shown(value)}")

    def _check_choice(self, schema: Mapping[str, Any], value: Any, path: str) -> None:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices is not None and value not in choices:
            raise WrongArguments(f"{path} must be one of {_shown(choices)}, not {_shown(value)}")

    def _check_range(self, schema: Mapping[str, Any], value: Any, path: str) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _compare(schema, value, path, _NUMBER_LIMITS, "")
        elif isinstance(value, str):
            _compare(schema, len(value), path, _TEXT_LIMITS, " characters")
        elif isinstance(value, list):
            _compare(schema, len(value), path, _LIST_LIMITS, " entries")

    def _children(self, schema: Mapping[str, Any], value: Any, path: str) -> Any:
        if isinstance(value, list) and "items" in schema:
            return [self.value(schema["items"], entry, f"{path}[{index}]") for index, entry in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                raise WrongArguments(f"{path}.{name} is missing")
        rest = schema.get("additionalProperties", True)
        for name in value:
            if rest is False and name not in properties:
                raise WrongArguments(f"{path} has no entry {name!r}; {nearest(str(name), list(properties))}")
        return {name: self.value(properties.get(name, rest), entry, f"{path}.{name}") for name, entry in value.items()}


_NUMBER_LIMITS = (("minimum", ">="), ("maximum", "<="), ("exclusiveMinimum", ">"), ("exclusiveMaximum", "<"))
_TEXT_LIMITS = (("minLength", ">="), ("maxLength", "<="))
_LIST_LIMITS = (("minItems", ">="), ("maxItems", "<="))


def _compare(schema: Mapping[str, Any], value: float, path: str, limits: Sequence[tuple[str, str]], unit: str) -> None:
    for keyword, sign in limits:
        limit = schema.get(keyword)
        if not isinstance(limit, (int, float)) or isinstance(limit, bool):
            continue
        holds = {">=": value >= limit, "<=": value <= limit, ">": value > limit, "<": value < limit}[sign]
        if not holds:
            raise WrongArguments(f"{path} must be {sign} {limit}{unit}, not {value}")


def _is_type(kind: Any, value: Any) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if kind in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, int):
            return True
        return math.isfinite(value) and (kind == "number" or value.is_integer())
    expected = {"boolean": bool, "array": list, "object": Mapping, "null": type(None)}.get(kind)
    return expected is not None and isinstance(value, expected)


def _parsed(text: str) -> Any:
    """The value of JSON text; text that is none stays as it is. ``True`` and ``False`` of Python are accepted too."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 100 else f"{text[:97]}..."
