"""One config from recipes and the command line.

    loaded = load_config("quickstart", ["trainer.total_steps=20"])
    loaded.config.trainer.total_steps    # 20
    loaded.origins["trainer.total_steps"]    # 'command line'

Every problem of the recipes, of those they extend and of the overrides is reported in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwater.config.algorithm_checks import ALGORITHM_CHECKS
from headwater.config.builtin import display, locate
from headwater.config.checks import CHECKS
from headwater.config.clash import Check
from headwater.config.cluster_checks import CLUSTER_CHECKS
from headwater.config.convert import Converter
from headwater.config.keys import sections, settings
from headwater.config.python_values import PYTHON_CODE, tree_of
from headwater.config.recipe import RecipeReader, parse_override
from headwater.config.schema import Config
from headwater.config.score_checks import SCORE_CHECKS
from headwater.config.server_checks import SERVER_CHECKS
from headwater.config.training_checks import DATA_CHECKS, GIVEN_CHECKS, TRAINING_CHECKS
from headwater.config.tree import COMMAND_LINE, DEFAULT, Branch, Tree, merge, origins, where
from headwater.core.errors import ConfigError


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where the value of each dotted key was written.

    Keys inside a free-form mapping have their own origins; the mapping lists all of them.
    """

    config: Config
    origins: Mapping[str, str]

    @property
    def given(self) -> frozenset[str]:
        """The keys that a recipe or the command line set."""
        return frozenset(key for key, origin in self.origins.items() if origin != DEFAULT)


def load_config(
    recipe: str | Path | Sequence[str] | None,
    overrides: Sequence[str | Mapping[str, Any]] = (),
    checks: Sequence[Check] = (),
    *,
    was_accepted: bool = False,
    mappings_from: str = PYTHON_CODE,
) -> LoadedConfig:
    """Read ``recipe`` (None: all defaults) and what it extends, apply ``overrides``, and check the result.

    A ``str`` is the path of a recipe or the name of a built-in one. Several recipes are merged in order. An override
    is ``key=value``, or a mapping from Python code.
    ``checks`` run in addition to those of every config, and their problems are reported first. ``was_accepted`` skips
    all checks: a recorded run passed those of its version, and later versions may have more. ``mappings_from`` is where
    messages say that mappings were written.
    """
    known_sections = sections(Config)
    reader = RecipeReader(known_sections)
    names: Sequence[str | Path] = [] if recipe is None else [recipe] if isinstance(recipe, str | Path) else recipe
    paths = [locate(name, Path()) for name in names]
    tree: Tree = reader.read(paths)
    problems = list(reader.problems)
    layer = reader.next_layer
    for each in overrides:
        if isinstance(each, str):
            override = parse_override(each, layer, problems)
        else:
            layer += 1
            override = tree_of(each, layer, problems, mappings_from)
        if override is not None:
            tree = merge(tree, override, known_sections)
    unread = bool(problems)

    assert isinstance(tree, Branch)
    converter = Converter(Config)
    built = converter.build(tree)
    config = _with_implied(built)
    problems.extend(converter.problems)
    given = _given(tree)
    origins_by_key = _origins(given)
    # A value that could not be read has its default here, and the checks would report clashes with that.
    if not unread and not was_accepted:
        layers = {key: max(place.layer for place in origins(part)) for key, part in given.items()}
        every_check = (
            *(*checks, *CHECKS, *DATA_CHECKS, *SERVER_CHECKS),
            *(*ALGORITHM_CHECKS, *SCORE_CHECKS, *CLUSTER_CHECKS, *TRAINING_CHECKS),
        )
        for checked, its_checks in ((config, every_check), (built, GIVEN_CHECKS)):
            clashes = (clash for check in its_checks for clash in check(checked, layers))
            problems.extend(
                clash.line(checked, origins_by_key) for clash in clashes if converter.doubtful.isdisjoint(clash.keys)
            )
    if problems:
        default = COMMAND_LINE if all(isinstance(each, str) for each in overrides) else PYTHON_CODE
        raise ConfigError(problems, ", ".join(display(path) for path in paths) or default)
    return LoadedConfig(config, origins_by_key)


def _with_implied(config: Config) -> Config:
    """``run.deterministic`` needs an engine whose responses do not depend on the rest of the batch."""
    if not config.run.deterministic:
        return config
    return replace(config, engine=replace(config.engine, deterministic=True))


def _given(tree: Branch) -> dict[str, Tree]:
    """The parts of the tree that belong to a setting, by its key."""
    found: dict[str, Tree] = {}
    for key in settings(Config):
        part: Tree | None = tree
        for name in key.split("."):
            part = part.children.get(name) if isinstance(part, Branch) else None
        if part is not None:
            found[key] = part
    return found


def _origins(given: Mapping[str, Tree]) -> dict[str, str]:
    result: dict[str, str] = {}
    for key in settings(Config):
        part = given.get(key)
        result[key] = DEFAULT if part is None else where(part)
        if isinstance(part, Branch):
            for name, child in part.children.items():
                result[f"{key}.{name}"] = where(child)
    return result
