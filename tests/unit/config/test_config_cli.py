"""The command ``headwater config``."""

from __future__ import annotations

import argparse
import re

import pytest
import yaml

from headwater.cli import config as command
from headwater.config.explain import explanation
from headwater.core.errors import ConfigError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_it_shows_value_origin_and_explanation(write, capsys):
    write("r.yaml", "run:\n  name: probe\n")
    assert run("r.yaml", "data.train=[a.parquet]") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        "name" in line and "'probe'" in line and "r.yaml:2" in line and "run directory" in line for line in lines
    )
    assert any("[a.parquet]" in line and "command line" in line for line in lines)
    assert any("seed" in line and "default" in line for line in lines)


@pytest.mark.parametrize("width", ["60", "80", "130"])
def test_a_terminal_of_any_width_loses_nothing(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run("--only", "rollout") == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= int(width)
    words = " ".join(lines).split()
    assert "num_samples_per_prompt" in words
    for word in explanation("rollout.top_p").split():
        assert word in words


def test_plain_prints_a_recipe(write, capsys):
    write("r.yaml", "run: {name: probe}\n")
    assert run("r.yaml", "trainer.total_steps=7", "--plain") == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["run"]["name"] == "probe"
    assert resolved["trainer"]["total_steps"] == 7


def test_only_keeps_one_section(capsys):
    assert run("--plain", "--only", "run") == 0
    assert list(yaml.safe_load(capsys.readouterr().out)) == ["run"]
    assert run("--only", "run") == 0
    assert "learning_rate" not in capsys.readouterr().out


def test_the_recipe_may_be_left_out(capsys):
    assert run("run.name=probe", "run.seed=5", "--plain", "--only", "run") == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"] == {
        "name": "probe",
        "project": "headwater",
        "root": "runs",
        "if_exists": "number",
        "seed": 5,
        "deterministic": False,
    }


def test_an_unknown_section_is_an_error():
    with pytest.raises(ConfigError, match="did you mean 'rollout'"):
        run("--only", "rolout")
