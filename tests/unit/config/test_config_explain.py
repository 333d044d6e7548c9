"""Explanations, the resolved recipe, and the schema as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwater.config import keys
from headwater.config.constraints import (
    AtLeast,
    Constraint,
    Extension,
    LessThan,
    MoreThan,
    NotEmpty,
    PlainName,
    ServerUrl,
    Within,
)
from headwater.config.convert import Converter
from headwater.config.explain import explain, explanation, to_yaml
from headwater.config.load import load_config
from headwater.config.recipe import TreeBuilder
from headwater.config.schema import Config
from headwater.config.tree import Origin
from headwater.config.yaml12 import compose
from headwater.core.errors import ConfigError
from headwater.core.registry import known_names

SETTINGS = keys.settings(Config)


def test_every_setting_has_a_plain_name_and_an_explanation():
    for key in SETTINGS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", key), key
        assert explanation(key).endswith("."), key
        assert 10 <= len(explanation(key)) <= 240, key


def test_every_default_is_allowed():
    """Each is read as if a recipe gave it, so the built-in extensions that defaults name must exist."""
    for key, setting in SETTINGS.items():
        written = list(value) if isinstance(value := setting.default(), tuple) else value
        for name in reversed(key.split(".")):
            written = {name: written}
        converter = Converter(Config)
        converter.build(TreeBuilder(Origin("default", 0)).root(compose(yaml.safe_dump(written))))
        assert converter.problems == [], key


def test_the_explanation_is_the_text_under_the_field():
    assert explanation("run.root") == "Folder that holds the run directories."


def test_explain_gives_every_setting_in_order(write):
    recipe = write("r.yaml", "run:\n  name: x\n")
    rows = explain(load_config(recipe, ["data.task_args.a=1"]))
    assert [row.key for row in rows] == list(SETTINGS)
    by_key = {row.key: row for row in rows}
    assert (by_key["run.name"].value, by_key["run.name"].origin) == ("x", "r.yaml:2")
    assert (by_key["data.task_args"].value, by_key["data.task_args"].origin) == ({"a": 1}, "command line")
    assert by_key["run.seed"].origin == "default"


def test_it_says_what_a_setting_may_be_and_what_the_chosen_algorithm_takes():
    by_key = {row.key: row for row in explain(load_config(None, ["algorithm.policy_loss=cispo"]))}
    assert by_key["rollout.temperature"].limits == "Allowed: > 0."
    assert by_key["rollout.top_p"].limits == "Allowed: > 0 and in [0, 1]."
    assert by_key["rollout.on_stale"].text.endswith("Allowed: mask | drop | wait.")
    assert by_key["data.shuffle"].limits == ""
    assert "ppo | " in by_key["algorithm.policy_loss"].limits
    taken = "cispo takes clip_low = 1.0 (>= 0), clip_high = 4.0 (>= 0), max_log_ratio = 20.0 (> 0 | null)."
    assert by_key["algorithm.policy_loss_args"].limits == taken
    assert by_key["run.root"].limits == "Allowed: not empty."


def test_to_yaml_of_one_section():
    assert to_yaml(load_config(None).config, "lora") == "lora:\n  rank: 0\n  alpha: 32\n  targets: []\n"


def test_text_in_a_resolved_recipe_is_text_to_yaml_1_1_readers_as_well():
    for text in ("no", "1e-6", "1e3", "0o17", "2024-01-01", "null", "3", "1:30", "~", "", "=", "<<", "010", "1_0"):
        config = load_config(None, [f"data.system_prompt={text!r}"]).config
        assert yaml.safe_load(to_yaml(config))["data"]["system_prompt"] == text


TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["no", "on", "true", "1e-6", "0x1f", "0o7", "null", "~", "2024-01-01", "a: b", "# x", "- x", "{", "'", '"', "\x85"]
)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(lambda key: key != "<<"), inner, max_size=3)
    ),
    max_leaves=6,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that ``hint`` allows."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *constraints = get_args(hint)
        return constrained(inner, constraints)
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin is tuple:
        return st.lists(values_of(get_args(hint)[0]), max_size=3).map(tuple)
    if origin is Mapping:
        _, inner = get_args(hint)
        values = FREE if inner is Any else values_of(inner)
        return st.dictionaries(TEXT.filter(lambda key: key != "<<"), values, max_size=3)
    if is_dataclass(hint):
        return st.builds(hint, **{field.name: values_of(keys.hints(hint)[field.name]) for field in fields(hint)})
    if origin is not None:
        return st.one_of(st.none() if option is type(None) else values_of(option) for option in get_args(hint))
    return {str: TEXT, int: st.integers(), float: st.floats(allow_nan=False), bool: st.booleans()}[hint]


def constrained(inner: Any, constraints: list[Constraint]) -> st.SearchStrategy[Any]:
    low: float = 0
    below: float | None = None
    for constraint in constraints:
        if isinstance(constraint, Extension):
            return st.sampled_from([*known_names(constraint.package), "my.module:Thing"])
        if isinstance(constraint, ServerUrl):
            return st.integers(1, 65535).map("http://10.0.0.5:{}".format)
        if isinstance(constraint, PlainName):
            return TEXT.filter(lambda text, rule=constraint: rule.broken_by(text) is None)
        if isinstance(constraint, AtLeast | MoreThan):
            low = constraint.minimum
        if isinstance(constraint, LessThan):
            below = constraint.maximum
        if isinstance(constraint, Within):
            return st.floats(constraint.minimum, constraint.maximum, exclude_min=True)
        assert isinstance(constraint, AtLeast | MoreThan | LessThan | NotEmpty), "teach this test the new constraint"
    if inner is int:
        return st.integers(min_value=int(low) + 1)
    if inner is float:
        exclude_max = below is not None
        return st.floats(low, below, exclude_min=True, exclude_max=exclude_max, allow_infinity=False)
    return values_of(inner).filter(bool)


@settings(max_examples=5)
@given(values_of(Config))
def test_any_config_survives_being_written_and_read(config):
    converter = Converter(Config)
    again = converter.build(TreeBuilder(Origin("r.yaml", 0)).root(compose(to_yaml(config))))
    assert converter.problems == []
    assert again == config


RECIPE_PARTS = [
    "warm_start: {num_steps: 5, learning_rate: 3e-3}",
    "warm_start: {num_steps: 0, learning_rate: 3e-3}",
    "eval: {num_prompts: 8}",
    "eval: {before: false, after: false, num_prompts: 8}",
    "data: {train: [rows.parquet]}",
    "data: {train: countdown, task_args: {a: 1}, num_train_rows: 64}",
    "rollout: {top_p: 0.9}",
    "learner: {num_minibatches: 4, learning_rate: 1e-5}",
]
OVERRIDES = [
    "warm_start.num_steps=0",
    "warm_start.num_steps=7",
    "warm_start.num_sequences_per_step=8",
    "eval.before=false",
    "eval.after=false",
    "eval.every_steps=5",
    "eval.temperature=0.7",
    "eval.num_samples_per_prompt=4",
    "data.train=rows.parquet",
    "data.eval=arithmetic",
    "data.task_args={}",
    "data.task_args.b=2",
    "data.num_eval_rows=9",
    "algorithm.old_logprobs=recompute",
    "trainer.total_steps=3",
]
# Stated, so that the property does not hang on which built-in extensions there are.
EXTENSIONS = [
    f"{key}=my.module:Thing"
    for key, setting in SETTINGS.items()
    if get_origin(setting.hint) is Annotated and any(isinstance(part, Extension) for part in get_args(setting.hint))
]


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(RECIPE_PARTS), max_size=3, unique_by=lambda part: part.split(":")[0]),
    st.lists(st.sampled_from(OVERRIDES), max_size=4),
)
def test_whatever_loads_is_resolved_to_a_recipe_that_loads_again(tmp_path_factory, parts, overrides):
    folder = tmp_path_factory.mktemp("recipes")
    recipe = folder / "r.yaml"
    recipe.write_text("\n".join(parts))
    try:
        loaded = load_config(recipe, [*overrides, *EXTENSIONS])
    except ConfigError:
        assume(False)
    resolved = folder / "resolved.yaml"
    resolved.write_text(to_yaml(loaded.config))
    assert load_config(resolved).config == loaded.config


def test_loading_imports_no_torch():
    code = (
        "import sys, headwater.config.load, headwater.config.explain\n"
        "headwater.config.explain.explain(headwater.config.load.load_config(None))\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
