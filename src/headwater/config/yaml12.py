"""YAML as recipes use it: the core schema of YAML 1.2.

PyYAML follows YAML 1.1, where ``1e-6`` is text and ``no`` is a boolean. Here ``1e-6`` is a number, only ``true`` and
``false`` are booleans, and dates are text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from headwater.core.registry import PythonObject

TAG_PREFIX = "tag:yaml.org,2002:"

_IMPLICIT = (
    # tag, pattern, first characters the pattern can start with
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class RecipeLoader(yaml.SafeLoader):
    """Composes nodes whose tags follow YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way to hold resolvers


class RecipeDumper(yaml.SafeDumper):
    """Writes text so that readers of YAML 1.1 and of 1.2 both read it as text: it follows the rules of both."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _IMPLICIT:
    # PyYAML looks up the empty string for an empty scalar.
    _starts = [*_first, ""] if _tag == "null" else [*_first]
    _regexp = re.compile(f"^(?:{_pattern})$")
    RecipeLoader.add_implicit_resolver(TAG_PREFIX + _tag, _regexp, _starts)
    RecipeDumper.add_implicit_resolver(TAG_PREFIX + _tag, _regexp, _starts)


def _represent_text(dumper: RecipeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    # PyYAML drops these line breaks in every style except double quotes.
    if any(mark in text for mark in "\x85\u2028\u2029"):
        style = '"'
    return dumper.represent_scalar(f"{TAG_PREFIX}str", text, style=style)


RecipeDumper.add_representer(str, _represent_text)
RecipeDumper.add_representer(PythonObject, _represent_text)


def compose(text: str) -> yaml.Node | None:
    """The root node of the one document in ``text``; None if it is empty."""
    loader = RecipeLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


def scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """The value of a scalar; ValueError for a tag that recipes do not have."""
    kind, text = node.tag.removeprefix(TAG_PREFIX), str(node.value)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "int":
        return _integer(text)
    if kind == "float":
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    raise ValueError(f"{node.tag!r} is not a kind of value that recipes have; remove the tag")


def _integer(text: str) -> int:
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


def dump(value: Any, *, flow: bool = False) -> str:
    """Block style for files; ``flow`` gives one line for messages."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "Dumper": RecipeDumper}
    if not flow:
        return str(yaml.dump(value, width=120, default_flow_style=False, **options))
    # PyYAML ends a bare scalar with a document-end mark.
    return str(yaml.dump(value, width=float("inf"), default_flow_style=True, **options)).removesuffix("...\n").strip()


def reason(error: yaml.YAMLError) -> tuple[str, str]:
    """Where (``:line:column``, empty if unknown) and why some text is not YAML."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        why = error.problem or error.context or "not valid YAML"
        return (f":{mark.line + 1}:{mark.column + 1}" if mark else ""), why
    return "", str(getattr(error, "reason", error))
