"""Schemas of tools: reading them, making them from functions, and checking calls against them."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import ConfigError
from headwater.tools.function import schema_of
from headwater.tools.schema import ToolSchema, WrongArguments

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "near": {"type": ["number", "null"]},
                "hours": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                "options": {
                    "type": "object",
                    "properties": {"wind": {"type": "boolean"}},
                    "required": ["wind"],
                    "additionalProperties": False,
                },
                "place": {"$ref": "#/$defs/Place"},
                "when": {"anyOf": [{"type": "integer"}, {"enum": ["now"]}]},
            },
            "required": ["city"],
            "$defs": {"Place": {"type": "object", "properties": {"inside": {"$ref": "#/$defs/Place"}}}},
        },
    },
}


def test_arguments_are_checked_and_converted():
    schema = ToolSchema.read(WEATHER, "test")
    for arguments, expected in (
        ({"city": "Oslo"}, {"city": "Oslo"}),
        ({"city": "Oslo", "days": "3"}, {"city": "Oslo", "days": 3}),
        ({"city": "Oslo", "days": 3.0}, {"city": "Oslo", "days": 3}),
        ({"city": "7", "near": "null"}, {"city": "7", "near": None}),
        ({"city": "Oslo", "hours": "[1, 2]"}, {"city": "Oslo", "hours": [1, 2]}),
        ({"city": "Oslo", "options": {"wind": "True"}}, {"city": "Oslo", "options": {"wind": True}}),
        ({"city": "Oslo", "when": "now"}, {"city": "Oslo", "when": "now"}),
        ({"city": "Oslo", "place": {"inside": {"inside": {}}}}, {"city": "Oslo", "place": {"inside": {"inside": {}}}}),
    ):
        assert schema.check(arguments) == expected
    for arguments, expected in (
        ({}, "the argument 'city' is missing"),
        ({"town": "Oslo"}, "there is no argument 'town'; .*known: city, days.*; the argument 'city' is missing"),
        ({"city": ["Oslo"]}, r'city must be of type string, not \["Oslo"\]'),
        ({"city": ""}, "city must be >= 1 characters, not 0"),
        ({"city": "Oslo", "days": 8}, "days must be <= 7, not 8"),
        ({"city": "Oslo", "days": 1.5}, "days must be of type integer, not 1.5"),
        ({"city": "Oslo", "days": True}, "days must be of type integer, not true"),
        ({"city": "Oslo", "unit": "K"}, r'unit must be one of \["C", "F"\], not "K"'),
        ({"city": "Oslo", "near": "x"}, 'near must be of type number or null, not "x"'),
        ({"city": "Oslo", "hours": [1, "x"]}, r"hours\[1\] must be of type integer"),
        ({"city": "Oslo", "hours": [1, 2, 3, 4]}, "hours must be <= 3 entries, not 4"),
        ({"city": "Oslo", "options": {}}, "options.wind is missing"),
        ({"city": "Oslo", "options": {"wind": True, "rain": 1}}, "options has no entry 'rain'"),
        ({"city": "Oslo", "place": {"inside": 3}}, "place.inside must be of type object"),
        ({"city": "Oslo", "when": "later"}, r'when must be of type integer.* or when must be one of \["now"\]'),
    ):
        with pytest.raises(WrongArguments, match=expected):
            schema.check(arguments)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*WEATHER["function"]["parameters"]["properties"], "other"]) | st.text(max_size=4)  # type: ignore[index]


@given(st.dictionaries(names, values, max_size=5))
def test_any_arguments_are_converted_or_refused(arguments):
    schema = ToolSchema.read(WEATHER, "test")
    try:
        checked = schema.check(arguments)
    except WrongArguments:
        return
    assert checked.keys() == arguments.keys()
    assert schema.check(checked) == checked  # a second check changes nothing


def test_wrong_schemas_are_explained():
    def parameters(**keywords: Any) -> dict[str, Any]:
        return {"name": "f", "parameters": {"type": "object", **keywords}}

    for value, expected in (
        (None, "has no tool_schema"),
        ([1], "must be a mapping"),
        ({"type": "web_search", "function": {}}, "tool_schema.type = 'web_search': must be 'function'"),
        ({"function": {"description": "x"}}, "tool_schema.function.name = None: must be 1 to 64 letters"),
        ({"name": "a b"}, "tool_schema.name = 'a b'"),
        ({"name": "f", "description": 3}, "description = 3: must be text"),
        ({"name": "f", "parameters": []}, r"parameters = \[\]: must be a JSON schema"),
        ({"name": "f", "parameters": {"type": "array"}}, "parameters.type = 'array': must be 'object'"),
        (parameters(properties={"a": {"type": "int"}}), "properties.a.type = 'int': must be one of string"),
        (parameters(properties={"a": {"enum": "x"}}), "properties.a.enum = 'x': must be a list"),
        (parameters(properties={"a": {"items": {"type": "x"}}}), "properties.a.items.type = 'x'"),
        (parameters(properties={"a": "string"}), "properties.a = 'string': must be a JSON schema"),
        (parameters(required=["b"]), r"required names \['b'\], which are not in properties"),
    ):
        with pytest.raises(ConfigError, match=f"the place: .*{expected}"):
            ToolSchema.read(value, "the place")


def test_schemas_of_pydantic_models_and_of_parquet_files_have_nulls():
    class Model:
        def model_dump(self) -> dict[str, Any]:
            properties = {"a": {"type": "string", "enum": None, "description": None}}
            return {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": properties}, "strict": None},
            }

    schema = ToolSchema.read(Model(), "test")
    assert schema.as_dict()["function"]["parameters"]["properties"] == {"a": {"type": "string"}}
    assert schema.model_dump(exclude_unset=True) == schema.as_dict()
    assert schema.function.name == schema.name == "f"


def test_the_schema_of_a_function():
    def book(
        city: str,
        nights: int = 1,
        price: float | None = None,
        rooms: list[Literal["single", "double"]] = [],  # noqa: B006 - never called
        extras: Annotated[dict[str, bool], "Breakfast and so on."] = {},  # noqa: B006
        note: str | list[str] = "",
    ) -> str:
        """Book a hotel.

        The booking can be cancelled.

        Args:
            city (str): Where
                to stay.
            nights: How long: from one to seven.

        Returns:
            city: This is not an argument.
        """
        raise AssertionError

    function = schema_of(book)["function"]
    assert function["name"] == "book"
    assert function["description"] == "Book a hotel.\n\nThe booking can be cancelled."
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Where to stay."},
        "nights": {"type": "integer", "description": "How long: from one to seven."},
        "price": {"type": ["number", "null"]},
        "rooms": {"type": "array", "items": {"type": "string", "enum": ["single", "double"]}},
        "extras": {
            "type": "object",
            "additionalProperties": {"type": "boolean"},
            "description": "Breakfast and so on.",
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    }

    def sphinx(a: int, b: int) -> int:
        """Add.

        :param a: The first
            number.
        :param int b: The second number.
        :return: The sum.
        """
        raise AssertionError

    texts = [each["description"] for each in schema_of(sphinx)["function"]["parameters"]["properties"].values()]
    assert texts == ["The first number.", "The second number."]


class Colour(enum.Enum):
    RED = "red"


def test_functions_that_cannot_be_tools():
    def silent(a: int) -> int:
        raise AssertionError

    def untyped(a):
        """Text."""

    def many(*a: int) -> int:
        """Text."""
        raise AssertionError

    def odd(a: object) -> int:
        """Text."""
        raise AssertionError

    def coloured(a: Colour) -> int:
        """Text."""
        raise AssertionError

    def unknown(a: "Nothing") -> int:  # type: ignore[name-defined]  # noqa: F821, UP037
        """Text."""
        raise AssertionError

    for function, expected in (
        (silent, "has no docstring"),
        (untyped, "argument a has no type hint; add one, for example a: str"),
        (many, "arguments with names"),
        (odd, "argument a: type <class 'object'> has no JSON schema"),
        (coloured, "use Literal"),
        (unknown, "its type hints cannot be read"),
    ):
        with pytest.raises(ConfigError, match=f"tool {function.__name__}: .*{expected}"):
            schema_of(function)
