"""Settings given on the command line: ``section.key=value``, with the value written as YAML."""

from __future__ import annotations

import yaml

from headwater.config import yaml12
from headwater.config.recipe import EXTENDS, TreeBuilder
from headwater.config.tree import COMMAND_LINE, Branch, Leaf, Origin, Tree

FORM = "write it as section.key=value, for example learner.learning_rate=1e-5"


def parse_override(text: str, layer: int, problems: list[str]) -> Branch | None:
    """The tree that one override stands for; None, and a line in ``problems``, if it is malformed."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        problems.append(f"{text!r} ({COMMAND_LINE}): an override needs a value; {FORM}")
        return None
    names = key.split(".")
    if key.startswith("-"):
        problems.append(f"{text!r} ({COMMAND_LINE}): an override has no dashes in front; write {text.lstrip('-')}")
        return None
    if not all(name and name == name.strip() for name in names):
        problems.append(f"{text!r} ({COMMAND_LINE}): {key!r} is not a dotted key; {FORM}")
        return None
    if names == [EXTENDS]:
        problems.append(f"{text!r} ({COMMAND_LINE}): {EXTENDS} belongs in a recipe; write a recipe that extends both")
        return None
    tree = _value(key, value, Origin(COMMAND_LINE, layer), problems)
    if tree is None:
        return None
    for name in reversed(names):
        tree = Branch({name: tree}, tree.origin)
    assert isinstance(tree, Branch)
    return tree


def _value(key: str, text: str, origin: Origin, problems: list[str]) -> Tree | None:
    try:
        node = yaml12.compose(text)
    except yaml.YAMLError as error:
        _, why = yaml12.reason(error)
        remedy = f"""if it is text, put it in quotes twice: {key}='"..."'"""
        problems.append(f"{key} = {text!r} ({COMMAND_LINE}): not valid YAML: {why}; {remedy}")
        return None
    if node is None:
        # A shell turns key='' into key=, so nothing after the sign is empty text.
        return Leaf("", origin)
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value != text.strip():
        # YAML would cut at ' #' and fold line breaks; nobody means that on a command line.
        return Leaf(text, origin)
    builder = TreeBuilder(origin, lines=False)
    tree = builder.tree(node)
    problems.extend(f"{key} = {text!r} ({origin}): {problem}" for _, problem in builder.problems)
    return None if builder.problems else tree
