"""Help, config and fetch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from command import headwater


def test_help_names_every_command():
    result = headwater("--help")
    assert result.code == 0
    for name in ("train", "eval", "recipes", "config", "fetch"):
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", ["train", "eval", "recipes", "config", "fetch"])
def test_each_command_explains_itself(name):
    result = headwater(name, "--help")
    assert result.code == 0
    assert f"usage: headwater {name}" in result.stdout


def test_no_command_shows_the_help():
    result = headwater()
    assert result.code == 2
    assert "commands:" in result.stdout


def test_an_unknown_command_lists_the_known():
    result = headwater("tran")
    assert result.code == 2
    assert "train" in result.stderr


def test_a_recipe_is_resolved_and_explained():
    shown = headwater("config", "quickstart", "ppo", "trainer.total_steps=777")
    assert shown.code == 0, shown.stderr
    assert "command line" in shown.stdout
    assert "Training steps of the run." in shown.stdout
    plain = headwater("config", "quickstart", "ppo", "--plain", "trainer.total_steps=777")
    assert yaml.safe_load(plain.stdout)["trainer"]["total_steps"] == 777


def test_fetch_refuses_an_unknown_model():
    result = headwater("fetch", "gpt-17")
    assert result.code == 2
    assert "smollm2" in result.stderr


@pytest.mark.slow
def test_fetch_smollm2():
    result = headwater("fetch", "smollm2")
    assert result.code == 0, result.stderr
    folder = Path(result.stdout.split("is ready in ")[1].splitlines()[0])
    assert (folder / "model.safetensors").exists()
    assert os.access(folder, os.R_OK)
