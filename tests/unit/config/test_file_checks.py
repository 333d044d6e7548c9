"""Files that a run needs to start, and settings that it cannot change when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config.checks import files_exist, fits_checkpoint
from headwater.config.extension_checks import START_CHECKS, extensions_exist
from headwater.config.load import load_config
from headwater.core.errors import ConfigError
from headwater.core.registry import PACKAGE_ROOT

RECIPES = PACKAGE_ROOT / "recipes"
CHECKPOINT = Path("runs/q/checkpoints/step_000080")


def refused(recipe: Path | None, overrides: list[str], *checks) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides, checks)
    return list(caught.value.problems)


def test_a_missing_file_is_named_first_with_its_key(write):
    write("there.jsonl", "{}")
    for key in ("data.train", "data.eval"):
        overrides = [f"{key}=[there.jsonl, missing.jsonl]", "trainer.total_steps=1", "eval.every_steps=2"]
        first, *others = refused(None, overrides, files_exist)
        named = f"{key} = [there.jsonl, missing.jsonl] (command line): no such file: missing.jsonl (looked"
        assert first.startswith(named)
        assert others


def test_a_missing_file_of_a_run_is_named_with_the_remedy_for_files_that_were_moved(tmp_path):
    """The config of a run has absolute paths."""
    name = tmp_path / "missing.jsonl"
    (problem,) = refused(None, [f"data.train={name}"], files_exist)
    assert problem.endswith(
        f"no such file: {name}; check the path. If the file was moved, give the new one: data.train=FILE"
    )


def test_patterns_and_the_names_of_a_custom_dataset_are_no_missing_files(write):
    write("part-1.jsonl", "{}")
    for overrides in (["data.train=part-*.jsonl"], ["data.train=x.jsonl", "data.dataset=my.py:Mine"]):
        load_config(None, overrides, [files_exist])


def test_a_pattern_that_matches_nothing(write):
    write("part-1.jsonl", "{}")
    (problem,) = refused(None, ["data.train=rows-*.jsonl"], files_exist)
    assert "no such file: rows-*.jsonl" in problem


def test_reading_a_recipe_needs_no_files(write):
    write("unrelated.yaml", "")
    assert load_config(None, ["data.train=missing.jsonl"]).config.data.train == ("missing.jsonl",)


def test_a_name_that_a_file_does_not_have_is_reported_without_running_it(write):
    write("mine.py", "import surely_not_installed\nraise SystemExit\ndef compute_score(solution_str): ...\n")
    write("broken.py", "def f(:\n")
    keys = {
        "reward.function": "reward.function",
        "rollout.should_accept": "rollout.should_accept",
        "reward.functions.own.function": "reward.functions.own.function",
        "rollout.workflow": "rollout.workflow",
    }
    for key, blamed in keys.items():
        (problem,) = refused(None, [f"{key}=mine.py:compute_scor"], extensions_exist)
        assert problem.startswith(f"{blamed} = 'mine.py:compute_scor' (command line): mine.py has no 'compute_scor'")
        assert "did you mean 'compute_score'? known: compute_score" in problem
        (problem,) = refused(None, [f"{key}=mien.py:compute_score"], extensions_exist)
        assert "no such file: mien.py" in problem
        assert "did you mean mine.py?" in problem
        load_config(None, [f"{key}=mine.py:compute_score"], START_CHECKS)
    assert "not valid Python" in refused(None, ["reward.function=broken.py:f"], extensions_exist)[0]
    (problem,) = refused(None, ["reward.function=gsm8"], extensions_exist)
    assert "no such scorer; did you mean 'gsm8k'?" in problem
    load_config(None, ["reward.function=mine.py"], START_CHECKS)  # whose function is called compute_score
    write("other.py", "def score(solution_str): ...\n")
    assert "other.py has no 'compute_score'" in refused(None, ["reward.function=other.py"], extensions_exist)[0]
    assert "has no 'scores'" in refused(None, ["reward.function=headwater.rewards.answers:scores"], extensions_exist)[0]


def test_names_that_only_running_a_file_would_tell_are_accepted(write):
    texts = [
        "from os.path import *",
        "from os import path as score",
        "try:\n    import score\nexcept ImportError:\n    score = None",
        "for score in ():\n    pass",
        "def make():\n    global score\n    score = 1",
        "globals()['score'] = print",
        "def __getattr__(name): ...",
        "score, other = print, 1",
        "if True:\n    async def score(): ...",
    ]
    for number, text in enumerate(texts):
        write(f"file{number}.py", text)
        load_config(None, [f"reward.function=file{number}.py:score"], START_CHECKS)
    load_config(None, ["reward.function=surely_not_installed.module:score"], START_CHECKS)


DECIDED = [
    (
        "model.path=tiny:llama",
        "model.path = 'tiny:llama' (command line): {} was made with 'tiny:qwen3', and its we",
    ),
    ("learner.freeze=[vision]", "learner.freeze = [vision] (command line): {} was made with []"),
    ("run.seed=1", "run.seed = 1 (command line): {} was made with 0"),
    ("data.train=countdown", "data.train = [countdown] (command line): {} was made with [arithmetic]"),
    ("data.task_args.max_operand=99", "data.task_args = {{max_operand: 99}} (command line): {} was made with {{}}"),
    (
        "warm_start.num_steps=5",
        "warm_start.num_steps = 5 (command line): {} was made with 0, and its warm st",
    ),
]


def test_what_a_checkpoint_depends_on_cannot_be_changed():
    for override, reported in DECIDED:
        (problem,) = refused(None, [override], fits_checkpoint(load_config(None).config, CHECKPOINT))
        assert problem.startswith(reported.format(CHECKPOINT)), override
        assert f"model.path={CHECKPOINT}/model" in problem, override


def test_settings_of_adapters_cannot_be_changed():
    before = load_config(None, ["lora.rank=8"]).config
    for override in ("lora.rank=4", "lora.alpha=16", "lora.targets=[q_proj]"):
        (problem,) = refused(None, ["lora.rank=8", override], fits_checkpoint(before, CHECKPOINT))
        assert problem.startswith(override.split("=")[0])
        assert "was made with" in problem
        assert "its adapters" in problem


def test_other_settings_of_a_resumed_run_may_change():
    overrides = [
        "trainer.total_steps=500",
        "learner.learning_rate=1e-5",
        "model.dtype=bfloat16",
        "data.eval=countdown",
    ]
    load_config(None, overrides, [fits_checkpoint(load_config(None).config, CHECKPOINT)])


def test_a_file_that_was_moved_may_get_its_new_name(write):
    write("models/new/config.json", "{}")
    before = load_config(None, ["model.path=./models/old", "data.train=old.jsonl"]).config
    load_config(None, ["model.path=./models/new", "data.train=new.jsonl"], [fits_checkpoint(before, CHECKPOINT)])
    write("models/old/config.json", "{}")
    (problem,) = refused(None, ["model.path=./models/new", "data.train=new.jsonl"], fits_checkpoint(before, CHECKPOINT))
    assert problem.startswith("model.path = './models/new'")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_names_what_exists(recipe):
    """``reasoning_gym:chain_sum`` is a built-in task with an argument, and also looks like a name in a module."""
    load_config(recipe, [], START_CHECKS)


def test_a_task_with_an_argument_is_no_name_in_a_module():
    for key in ("data.train", "data.eval"):
        load_config("quickstart", [f"{key}=reasoning_gym:leg_counting"], START_CHECKS)
