"""Every recipe that comes with Headwater loads, says what it is for, and is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config.explain import to_yaml
from headwater.config.load import load_config

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@every_recipe
def test_it_loads_and_loads_again_when_resolved(recipe, write):
    config = load_config(recipe).config
    assert load_config(write("resolved.yaml", to_yaml(config))).config == config


@every_recipe
def test_it_begins_with_what_it_is_and_its_runs_bear_its_name(recipe):
    assert recipe.read_text().startswith("# ")
    assert load_config(recipe).config.run.name == recipe.stem


@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if each.parent.name == "algorithms"], ids=lambda path: path.stem
)
def test_the_page_on_algorithms_links_it(recipe):
    assert f"](../recipes/algorithms/{recipe.name})" in ALGORITHMS
