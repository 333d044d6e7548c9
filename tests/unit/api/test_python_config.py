"""``headwater.Config`` and settings from Python code."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import headwater
from headwater import Config, ConfigError
from headwater.config import schema
from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.config.python_values import named, python_objects, sources
from headwater.core.errors import UnknownName
from headwater.core.registry import PythonObject, load_object


def right(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def test_recipes_dicts_and_keywords_are_merged_in_order():
    config = Config("quickstart", "dapo", "trainer.total_steps=7", {"learner.learning_rate": 1e-4}, run={"seed": 3})
    assert config.trainer.total_steps == 7
    assert config.learner.learning_rate == 1e-4
    assert config.run.seed == 3
    assert config.algorithm.filter_groups
    assert {"trainer.total_steps", "run.seed", "algorithm.filter_groups"} <= config.given
    later = Config(config, trainer={"total_steps": 9}, rollout=schema.RolloutConfig(temperature=0.5))
    assert (later.trainer.total_steps, later.run.seed, later.rollout.temperature) == (9, 3, 0.5)
    assert later.rollout.max_new_tokens == config.rollout.max_new_tokens
    assert Config(schema.Config(run=schema.RunConfig(seed=5))).run.seed == 5
    assert isinstance(config, schema.Config)
    assert "trainer.total_steps=7" in repr(config)


def test_copies_are_equal():
    config = Config("quickstart", reward={"function": lambda solution_str: 1.0})
    assert replace(config, run=config.run).trainer == config.trainer
    assert pickle.loads(pickle.dumps(config)).trainer == config.trainer
    assert Config(config.given_values).learner == config.learner


def test_all_problems_are_reported_with_their_keys():
    with pytest.raises(ConfigError) as caught:
        Config("quickstart", trainer={"total_step": 2}, learner={"learning_rate": "fast"}, data={"train": 3.0})
    text = str(caught.value)
    assert "trainer.total_step (Python): no such key; did you mean trainer.total_steps?" in text
    assert "learner.learning_rate = 'fast' (Python): must be a number" in text
    with pytest.raises(ConfigError, match=r"trainerr.total_steps.*did you mean trainer.total_steps"):
        Config(trainerr={"total_steps": 2})
    with pytest.raises(ConfigError, match=r"workflow_args.*must be a plain value.*functools.partial"):
        Config(rollout={"workflow_args": {"judge": object()}})
    with pytest.raises(ConfigError, match="no such recipe"):
        Config("quickstrat")


def test_functions_that_other_processes_can_import_become_paths():
    assert named(right) == f"{__name__}:right"
    assert named(Path) == "pathlib:Path" or named(Path).endswith(":Path")
    for value in (lambda: 0, partial(right, "a"), Config.__repr__, "x".upper):
        assert isinstance(named(value), PythonObject), value
        assert load_object(named(value)) is value


def test_an_object_is_only_a_name_elsewhere():
    config = load_config(None, [{"reward.function": lambda text: 0.0, "data": {"train": [{"prompt": "a"}]}}]).config
    text = to_yaml(config)
    assert "function: python:<lambda>" in text
    assert python_objects(config) == {"reward.function": "python:<lambda>", "data.train": ["python:rows"]}
    for copied in (pickle.loads(pickle.dumps(config.reward.function)), copy.deepcopy(config.reward.function)):
        assert type(copied) is str
        with pytest.raises(UnknownName, match="object of the Python program that started the run"):
            load_object(copied)
    with pytest.raises(ConfigError, match=r"reward.function = 'python:<lambda>'.*resume=RUN") as caught:
        load_config(None, ["reward.function='python:<lambda>'", "data.train=['python:rows']"])
    assert "data.train" in str(caught.value)


def test_sources_from_python():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (made,) = sources(rows)
    assert isinstance(made, PythonObject)
    assert made.value is rows
    assert sources("arithmetic") == ["arithmetic"]
    assert sources([Path("a.jsonl"), "b.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert len(sources(["arithmetic", rows, rows])) == 3
    assert sources([]) == []
    pandas = pytest.importorskip("pandas")
    (frame,) = sources(pandas.DataFrame(rows))
    assert frame.value == rows


def test_names_of_the_package():
    assert set(headwater.__all__) <= set(dir(headwater))
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        headwater.trane  # noqa: B018
    stub = Path(headwater.__file__).with_suffix(".pyi").read_text()
    assert all(f" as {name}" in stub for name in headwater.__all__ if name != "__version__")
