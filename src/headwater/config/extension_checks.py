"""Whether the code that a recipe names exists, before anything is loaded.

The syntax tree of a file tells which names it binds. Nothing is imported or run: a file may need packages that are
slow to import, or that exist only where it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from headwater.config.checks import files_exist
from headwater.config.clash import Check, Clash, Layers
from headwater.config.declared import WrongDeclaration, module_file
from headwater.config.keys import settings, value_at
from headwater.config.paths import names_extensions
from headwater.config.schema import Config
from headwater.config.traits import ScorerTraits
from headwater.core.registry import PYTHON, is_path, known_names, nearest, similar_path, split_path

_SOURCES = ("data.train", "data.eval")
_TASKS = "headwater.data.tasks"
_PLAIN = ("data.dataset", "reward.function", "rollout.should_accept", *_SOURCES)
"""Settings that name code, although their type does not say so."""
_DEFAULT_FUNCTION = "compute_score"
"""Of a reward file whose function is not named (``rewards.functions``)."""
_WRITERS = {"globals", "vars", "locals", "exec", "setattr", "__getattr__"}
"""A file that uses one of these may have names that cannot be seen in its text."""


def extensions_exist(config: Config, layers: Layers) -> Iterator[Clash]:
    for key, setting in settings(Config).items():
        if key in _PLAIN or names_extensions(setting.hint):
            value = value_at(config, key)
            for name in value if isinstance(value, tuple) else (value,):
                if reason := _problem(key, name):
                    yield Clash((key,), reason)
    for part_name, part in config.reward.functions.items():
        function = part.get("function", "")
        if isinstance(function, str) and (reason := _problem("reward.function", function)):
            yield Clash((f"reward.functions.{part_name}.function",), reason, function)


def _problem(key: str, name: str) -> str:
    """Why the code that a setting names cannot be used; empty if nothing is wrong with it."""
    if not name or name.startswith(PYTHON):
        return ""
    if not is_path(name) and name.endswith(".py") and key == "reward.function":
        name = f"{name}:{_DEFAULT_FUNCTION}"
    if not is_path(name):
        return _scorer_problem(name) if key == "reward.function" else ""
    module, attribute = split_path(name)
    is_source = module.endswith(".py")
    # reasoning_gym:chain_sum is a built-in task with its argument, although a module has the same name.
    is_task = key in _SOURCES and name.partition(":")[0] in known_names(_TASKS)
    if not attribute or "://" in name or is_task:
        return ""
    path = Path(module).expanduser() if is_source else module_file(module)
    if path is None or (not is_source and not path.is_file()):
        return ""  # only an import can tell
    if not path.is_file():
        return f"no such file: {module} (looked in {Path.cwd()}, where relative paths start){similar_path(path)}"
    try:
        names = bound_names(path)
    except WrongDeclaration as error:
        return str(error)
    is_submodule = path.name == "__init__.py" and any(path.parent.glob(f"{attribute}*"))
    if names is None or attribute in names or is_submodule:
        return ""
    offered = [each for each, is_own in names.items() if is_own and not each.startswith("_")]
    return f"{path} has no {attribute!r}; {nearest(attribute, offered or list(names))}"


def _scorer_problem(name: str) -> str:
    known = known_names(ScorerTraits.package)
    if name in known:
        return ""
    return f"no such scorer; {nearest(name, known)}; or write your own as file.py:function"


def bound_names(path: Path) -> dict[str, bool] | None:
    """The names that a file binds, and whether it defines them itself; None if its text does not tell all of them."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise WrongDeclaration(f"{path}{line}: not valid Python: {error}; fix the file") from error
    names: dict[str, bool] = {}
    for node in _of_module(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    return None
                names.setdefault(alias.asname or alias.name.partition(".")[0], False)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = True
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names |= dict.fromkeys(node.names, True)
        elif isinstance(node, ast.Name) and node.id in _WRITERS:
            return None
    return None if "__getattr__" in names else names


def _of_module(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported, outside the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _of_module(child)


START_CHECKS: tuple[Check, ...] = (files_exist, extensions_exist)
"""What must be there when a run starts. Reading a recipe needs none of it."""
