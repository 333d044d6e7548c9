"""The config that a run keeps has absolute paths, so that it means the same in every folder."""

from __future__ import annotations

from pathlib import Path

from headwater.config.explain import to_yaml
from headwater.config.load import load_config
from headwater.config.paths import with_absolute_paths

RECIPE = """
run: {root: out}
model: {path: models/mine/best}
critic: {enabled: true, path: judges}
data:
  train: [rows.jsonl, "parts/*.parquet", "~/home.json", "tasks.py:rows", "arithmetic", "file:///data/x.jsonl"]
  eval: ../held_out.json
  task_args: {folder: gsm8k, "tasks.py:rows": {folder: mine, level: 3}, arithmetic: {max_operand: 9}}
reward: {function: "reward.py:compute_score", model: org/judge}
rollout: {workflow: "flows/mine.py:Mine", backend: embedded, workflow_args: {folder: as-it-is}}
algorithm:
  advantage: gae
  corrections: ["mine.py:reject", truncate]
  corrections_args: {"mine.py:reject": {upper: 2}, truncate: {upper: 3}}
"""


def test_every_path_becomes_absolute_and_everything_else_stays(write, tmp_path, monkeypatch):
    (tmp_path / "work" / "judges").mkdir(parents=True)
    recipe = write("work/r.yaml", RECIPE)
    monkeypatch.chdir(tmp_path / "work")
    loaded = load_config(recipe, was_accepted=True).config
    config = with_absolute_paths(loaded)
    here = str(tmp_path / "work")
    assert config.run.root == f"{here}/out"
    assert config.model.path == f"{here}/models/mine/best"
    assert config.critic.path == f"{here}/judges"
    assert config.data.train == (
        f"{here}/rows.jsonl", f"{here}/parts/*.parquet", str(Path.home() / "home.json"), f"{here}/tasks.py:rows",
        "arithmetic", "file:///data/x.jsonl",
    )  # fmt: skip
    assert config.data.eval == (str(tmp_path / "held_out.json"),)
    assert config.data.task_args == {
        "folder": f"{here}/gsm8k",
        f"{here}/tasks.py:rows": {"folder": f"{here}/mine", "level": 3},
        "arithmetic": {"max_operand": 9},
    }
    assert config.reward.function == f"{here}/reward.py:compute_score"
    assert config.reward.model == "org/judge"
    assert config.rollout.workflow == f"{here}/flows/mine.py:Mine"
    assert config.rollout.workflow_args == {"folder": "as-it-is"}
    assert config.algorithm.corrections == (f"{here}/mine.py:reject", "truncate")
    assert config.algorithm.corrections_args == {f"{here}/mine.py:reject": {"upper": 2}, "truncate": {"upper": 3}}
    assert (config.rollout.backend, config.algorithm.advantage) == ("embedded", "gae")

    monkeypatch.chdir("/")
    assert with_absolute_paths(config) == config
    assert with_absolute_paths(load_config(write("again.yaml", to_yaml(config)), was_accepted=True).config) == config


def test_a_custom_dataset_keeps_names_that_are_no_files(write, tmp_path):
    (tmp_path / "rows.json").write_text("[]")
    settings = ["data.dataset=mine.py:Dataset", "data.train=[rows.json, table.json]"]
    config = with_absolute_paths(load_config(write("r.yaml", "run: {name: x}"), settings).config)
    assert config.data.train == (str(tmp_path / "rows.json"), "table.json")
    assert config.data.dataset == f"{tmp_path}/mine.py:Dataset"


def test_the_defaults_have_no_path_but_the_root_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = load_config(None).config
    lines = set(to_yaml(with_absolute_paths(plain)).splitlines()) - set(to_yaml(plain).splitlines())
    assert lines == {f"  root: {tmp_path}/runs"}
