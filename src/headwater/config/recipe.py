"""Reads recipe files, the recipes they extend, and overrides on the command line into trees of values.

Problems are collected, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from headwater.config import yaml12
from headwater.config.builtin import display, locate, suggestion
from headwater.config.tree import COMMAND_LINE, Branch, Leaf, Origin, Tree, merge, plain

EXTENDS = "extends"
SHORT_FORMS = {"cluster": "kind"}
"""Sections that may be given as one value, and the key that this value is for: ``cluster=ray``."""
FORM = "write it as section.key=value, for example learner.learning_rate=1e-5"


class RecipeReader:
    """Reads one recipe after another and collects their ``problems``.

    Files are numbered in the order they are merged: a recipe's layer is above those of the recipes it extends.
    """

    def __init__(self, sections: frozenset[str]) -> None:
        self.problems: list[str] = []
        self.next_layer = 0
        self._sections = sections

    def read(self, paths: Sequence[Path]) -> Tree:
        """The recipes merged in order: a later one overrides the earlier ones."""
        merged: Tree = Branch({}, Origin(COMMAND_LINE, 0))
        for path in paths:
            merged = merge(merged, self._read(path, ()), self._sections)
        return merged

    def _read(self, path: Path, chain: tuple[Path, ...]) -> Branch:
        """The merged tree of ``path``, which is extended by the recipes in ``chain``, outermost first."""
        path = path.expanduser().resolve()
        if path in chain:
            names = " extends ".join(display(link) for link in (*chain[chain.index(path) :], path))
            self.problems.append(f"{names}: a recipe cannot extend itself; remove one of these extends")
            return Branch({}, Origin(display(path), self.next_layer))
        node = self._node(path, chain)
        merged: Tree = Branch({}, Origin(display(path), self.next_layer))
        # The recipes it extends are read first, so that they get the lower layers.
        for base in self._bases(node, path):
            merged = merge(merged, self._read(base, (*chain, path)), self._sections)
        builder = TreeBuilder(Origin(display(path), self.next_layer))
        self.next_layer += 1
        merged = merge(merged, builder.root(node), self._sections)
        self.problems.extend(f"{origin}: {text}" for origin, text in builder.problems)
        assert isinstance(merged, Branch)
        return merged

    def _node(self, path: Path, chain: tuple[Path, ...]) -> yaml.Node | None:
        by = f" (extended by {display(chain[-1])})" if chain else ""
        try:
            node = yaml12.compose(path.read_text(encoding="utf-8"))
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == f"{yaml12.TAG_PREFIX}null"):
                # Without this error, an empty file would train with the defaults.
                self.problems.append(f"{display(path)}{by}: is empty; write settings into it, or name another recipe")
            return node
        except FileNotFoundError:
            self.problems.append(f"{display(path)}{by}: no such recipe; {suggestion(path)}")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.problems.append(f"{display(path)}{by}: cannot be read: {why}")
        except yaml.YAMLError as error:
            where, why = yaml12.reason(error)
            self.problems.append(f"{display(path)}{where}: not valid YAML: {why}")
        except RecursionError:
            self.problems.append(f"{display(path)}: not valid YAML: it is nested too deeply")
        return None

    def _bases(self, node: yaml.Node | None, path: Path) -> list[Path]:
        if not isinstance(node, yaml.MappingNode):
            return []
        for key_node, value_node in node.value:
            if key_node.value == EXTENDS:
                value = plain(TreeBuilder(Origin(display(path), 0)).tree(value_node))
                names = value if isinstance(value, list) else [value]
                if names and all(isinstance(name, str) and name for name in names):
                    return [locate(name, path.parent) for name in names]
                where = f"{display(path)}:{key_node.start_mark.line + 1}"
                self.problems.append(f"{where}: {EXTENDS}: must be the path or name of a recipe, or a list of them")
        return []


class TreeBuilder:
    """Turns YAML nodes of one origin into a tree and collects what recipes do not support in ``problems``."""

    def __init__(self, origin: Origin, *, lines: bool = True) -> None:
        self.problems: list[tuple[Origin, str]] = []
        self._source = origin
        self._lines = lines
        # The nodes that are being built: an anchor may contain its own alias, and would never end.
        self._open: set[int] = set()

    def root(self, node: yaml.Node | None) -> Branch:
        tree = self.tree(node) if node is not None else Branch({}, self._origin(None))
        if isinstance(tree, Leaf):
            if tree.value is not None:
                self._problem(node, "a recipe must be a mapping of sections, such as 'rollout:' with its keys below")
            return Branch({}, tree.origin)
        children = {name: child for name, child in tree.children.items() if name != EXTENDS}
        return in_full(Branch(children, tree.origin))

    def tree(self, node: yaml.Node, line_node: yaml.Node | None = None) -> Tree:
        """``line_node`` is the key of the value, whose line is reported."""
        origin = self._origin(line_node or node)
        if isinstance(node, yaml.ScalarNode):
            try:
                return Leaf(yaml12.scalar(node), origin)
            except ValueError as error:
                self._problem(node, str(error))
                return Leaf(None, origin)
        if node.tag.removeprefix(yaml12.TAG_PREFIX) not in ("map", "seq"):
            self._problem(node, f"{node.tag!r} is not a kind of value that recipes have; remove the tag")
            return Leaf(None, origin)
        if id(node) in self._open:
            self._problem(node, "this value contains itself; remove the alias")
            return Leaf(None, origin)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Branch(self._children(node), origin)
            return Leaf([plain(self.tree(item)) for item in node.value], origin)
        finally:
            self._open.discard(id(node))

    def _children(self, node: yaml.MappingNode) -> dict[str, Tree]:
        children: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{yaml12.TAG_PREFIX}str":
                self._problem(key_node, f"key {name!s}: must be text; put it in quotes")
                continue
            if name == "<<":
                self._problem(
                    key_node, "merge keys (<<) are not part of recipes; put shared settings in a file to extend"
                )
                continue
            if name in children:
                self._problem(key_node, f"{name!r} is given twice; the first is in line {lines[name]}; remove one")
                continue
            children[name] = self.tree(value_node, key_node)
            lines[name] = key_node.start_mark.line + 1
        return children

    def _origin(self, node: yaml.Node | None) -> Origin:
        if node is None or not self._lines:
            return self._source
        return replace(self._source, line=node.start_mark.line + 1)

    def _problem(self, node: yaml.Node | None, text: str) -> None:
        self.problems.append((self._origin(node), text))


def parse_override(text: str, layer: int, problems: list[str]) -> Branch | None:
    """The tree of one override; None, and a line in ``problems``, if it is malformed."""
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
    return in_full(tree)


def in_full(tree: Branch) -> Branch:
    """``cluster: ray`` as ``cluster: {kind: ray}``."""
    children = dict(tree.children)
    for section, key in SHORT_FORMS.items():
        child = children.get(section)
        if isinstance(child, Leaf) and isinstance(child.value, str):
            children[section] = Branch({key: child}, child.origin)
    return Branch(children, tree.origin)


def _value(key: str, text: str, origin: Origin, problems: list[str]) -> Tree | None:
    try:
        node = yaml12.compose(text)
    except yaml.YAMLError as error:
        _, why = yaml12.reason(error)
        remedy = f"""if it is text, put it in quotes twice: {key}='"..."'"""
        problems.append(f"{key} = {text!r} ({COMMAND_LINE}): not valid YAML: {why}; {remedy}")
        return None
    if node is None:
        # A shell turns key='' into key=, so a missing value is empty text.
        return Leaf("", origin)
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value != text.strip():
        # YAML would cut at ' #' and fold line breaks, which is not intended on a command line.
        return Leaf(text, origin)
    builder = TreeBuilder(origin, lines=False)
    tree = builder.tree(node)
    problems.extend(f"{key} = {text!r} ({origin}): {problem}" for _, problem in builder.problems)
    return None if builder.problems else tree
