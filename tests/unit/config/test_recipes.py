"""Every recipe that comes with Headwater loads, says what it is for, and is listed."""

from __future__ import annotations

from pathlib import Path

from headwater.config.explain import to_yaml
from headwater.config.load import load_config

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()


def test_every_recipe_loads_and_loads_again_when_resolved(write):
    for recipe in RECIPES:
        config = load_config(recipe).config
        assert load_config(write("resolved.yaml", to_yaml(config))).config == config, recipe


def test_every_recipe_begins_with_a_description_and_names_its_runs_after_itself():
    for recipe in RECIPES:
        assert recipe.read_text().startswith("# "), recipe
        assert load_config(recipe).config.run.name == recipe.stem


def test_the_page_on_algorithms_links_every_recipe_of_an_algorithm():
    listed = [recipe for recipe in RECIPES if recipe.parent.name == "algorithms"]
    assert len(listed) >= 10
    for recipe in listed:
        assert f"](../recipes/algorithms/{recipe.name})" in ALGORITHMS
