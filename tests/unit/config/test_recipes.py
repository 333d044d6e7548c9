"""Every recipe that comes with Headwater loads, says what it is for, and is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.config.builtin import builtin_recipes, split_arguments
from headwater.config.explain import to_yaml
from headwater.config.load import load_config

ROOT = Path(__file__).parents[3]
RECIPES = builtin_recipes()
PARTS = [recipe.name for recipe in RECIPES if recipe.is_part]
ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()
OF_AN_ALGORITHM = (
    "algorithm.",
    "critic.",
    "learner.",
    "rollout.num_samples_per_prompt",
    "trainer.num_prompts_per_step",
)


def test_every_recipe_loads_and_loads_again_when_resolved(write):
    for recipe in RECIPES:
        names = ["quickstart", recipe.name] if recipe.is_part else [recipe.name]
        config = load_config(names).config
        assert load_config(write("resolved.yaml", to_yaml(config))).config == config, recipe


def test_a_complete_recipe_names_its_runs_after_itself():
    complete = [recipe.name for recipe in RECIPES if not recipe.is_part]
    assert {"quickstart", "quickstart-async", "gsm8k"} <= set(complete)
    assert [load_config(name).config.run.name for name in complete] == complete


def test_the_recipe_of_an_algorithm_leaves_model_data_and_names_alone():
    for name in PARTS:
        given = load_config(name).given
        assert given
        assert all(key.startswith(OF_AN_ALGORITHM) for key in given), (name, given)
        assert "critic.learning_rate" not in given
        assert "learner.learning_rate" not in given


def test_the_page_on_algorithms_links_every_recipe_of_an_algorithm():
    assert len(PARTS) >= 10
    for name in PARTS:
        assert f"](../src/headwater/recipes/algorithms/{name}.yaml)" in ALGORITHMS


def test_recipes_are_listed_with_a_line_each_and_printed(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    for recipe in RECIPES:
        assert f"\n  {recipe.name} " in listed
        assert recipe.summary.endswith(".")
        assert recipe.summary.split()[-1] in listed
    assert main(["recipes", "dapo"]) == 0
    assert capsys.readouterr().out == (ROOT / "src/headwater/recipes/algorithms/dapo.yaml").read_text()
    assert main(["recipes", "quickstrat"]) == 2
    assert "quickstrat: no such built-in recipe; did you mean 'quickstart'?" in capsys.readouterr().err


def test_a_recipe_extends_built_in_ones_by_name_from_any_folder(write):
    recipe = write("deep/my.yaml", "extends: [quickstart, dapo]\nrun: {name: my}\n")
    loaded = load_config(recipe, ["run.seed=3"])
    assert loaded.config.data.train == ("largest_digit",)
    assert loaded.config.algorithm.filter_groups
    assert loaded.config.run.name == "my"
    assert loaded.origins["model.path"] == "quickstart:8"


def test_several_recipes_are_merged_in_order(write):
    write("more.yaml", "trainer: {num_prompts_per_step: 8}\n")
    for names, prompts in ((["quickstart", "ppo"], 256), (["quickstart", "ppo", "more.yaml"], 8)):
        config = load_config(names).config
        assert config.critic.enabled
        assert config.trainer.num_prompts_per_step == prompts
    assert load_config(["ppo", "quickstart"]).config.trainer.num_prompts_per_step == 32


def test_which_arguments_are_recipes(write):
    write("odd=name.yaml", "run: {name: x}\n")
    texts = ["quickstart", "a.seed=1", "dapo", "my.yaml", "odd=name.yaml", "folder/x", "trainer.total_steps", "dapp"]
    recipes = ["quickstart", "dapo", "my.yaml", "odd=name.yaml", "folder/x", "dapp"]
    assert split_arguments(texts) == (recipes, ["a.seed=1", "trainer.total_steps"])
    assert split_arguments(["my.recipe", "other.key"]) == (["my.recipe"], ["other.key"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a recipe, for example: headwater train quickstart"),
        (["dapo"], "dapo: has only the settings of an algorithm; name a recipe with a model and data before it"),
        (["quickstrat"], "quickstrat: no such recipe; did you mean the built-in recipe quickstart?"),
        (["recipes/quickstart.yaml"], "no such recipe; did you mean the built-in recipe quickstart?"),
        (["quickstart", "dapp"], "1 problem in quickstart, dapp"),
        (["quickstart", "trainer.total_steps"], "'trainer.total_steps' (command line): an override needs a value"),
    ],
)
def test_arguments_that_start_nothing(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
