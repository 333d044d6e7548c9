"""The command line without a command, or with one that is not there."""

from __future__ import annotations

import pytest

from headwater.cli.main import COMMANDS, main


def test_help_lists_each_command_once(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: headwater [-h] [--version] [--debug] COMMAND ...")
    assert "positional arguments" not in text
    for name in COMMANDS:
        assert text.count(f"\n  {name} ") == 1


def test_an_unknown_command_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tran", "quickstart"])
    assert ended.value.code == 2
    assert "unknown command 'tran'; did you mean 'train'? known: train, replay, eval" in capsys.readouterr().err


def test_a_recipe_in_place_of_a_command(capsys):
    for name in ("quickstart", "my.yaml"):
        with pytest.raises(SystemExit):
            main([name])
        assert f"{name!r} is a recipe, not a command; write: headwater train {name}" in capsys.readouterr().err


def test_the_help_of_train_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: headwater train RECIPE [RECIPE ...] [key=value ...]\n")
    assert "\n  headwater train quickstart dapo run.name=dapo " in text
    assert all(len(line) <= 120 for line in text.splitlines())
