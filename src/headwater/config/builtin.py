"""The recipes that come with Headwater, and how a recipe is named: a built-in recipe by its name, a file by its path.

``recipes/`` holds complete recipes. Those in ``recipes/algorithms/`` have only the settings of one algorithm. They are
combined with a recipe that names a model and data: ``headwater train quickstart dapo``.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headwater.core.registry import PACKAGE_ROOT

FOLDER = PACKAGE_ROOT / "recipes"
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class BuiltinRecipe:
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_part(self) -> bool:
        """Whether it has only the settings of an algorithm, without a model and data."""
        return self.path.parent != FOLDER

    @property
    def summary(self) -> str:
        """The first paragraph of the comment at its beginning."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def builtin_recipes() -> list[BuiltinRecipe]:
    """All of them by name, the complete ones first."""
    found = [BuiltinRecipe(path) for path in FOLDER.rglob("*.yaml")]
    return sorted(found, key=lambda recipe: (recipe.is_part, recipe.name))


def find_builtin(name: str) -> BuiltinRecipe | None:
    return next((recipe for recipe in builtin_recipes() if recipe.name == name), None)


def locate(name: str | Path, folder: Path) -> Path:
    """The file of a recipe: of a built-in recipe by its name, or a path that starts at ``folder`` if it is relative."""
    builtin = find_builtin(name) if isinstance(name, str) else None
    return builtin.path if builtin else folder / Path(name).expanduser()


def split_arguments(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The recipes and the ``key=value`` settings among the positional arguments of a command."""
    recipes = [text for place, text in enumerate(texts) if _is_recipe(text, is_first=place == 0)]
    return recipes, [text for text in texts if text not in recipes]


def _is_recipe(text: str, *, is_first: bool) -> bool:
    if Path(text).is_file() or text.endswith(SUFFIXES) or find_builtin(text):
        return True
    # A later dotted key without a value counts as a setting, so that the message about it says how to write one.
    return "=" not in text and (is_first or "/" in text or "." not in text)


def suggestion(path: Path) -> str:
    """What to do about a recipe that does not exist: the nearest file beside it or the nearest built-in recipe."""
    beside = {other.name: other for other in path.parent.glob("*.y*ml")}
    builtin = [recipe.name for recipe in builtin_recipes()]
    if matches := difflib.get_close_matches(path.name, list(beside), n=1):
        return f"did you mean {display(beside[matches[0]])}?"
    if matches := difflib.get_close_matches(path.stem, builtin, n=1):
        return f"did you mean the built-in recipe {matches[0]}?"
    return "give the path of a YAML file or the name of a built-in recipe (headwater recipes lists them)"


def display(path: Path) -> str:
    """A path for messages: a built-in recipe's name, or the path relative to the working directory if it is below."""
    resolved = path.expanduser().resolve()
    if resolved.is_relative_to(FOLDER):
        return resolved.stem
    cwd = Path.cwd()
    return str(resolved.relative_to(cwd)) if resolved.is_relative_to(cwd) else str(resolved)
