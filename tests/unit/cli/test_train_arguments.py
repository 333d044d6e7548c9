"""What ``headwater train`` refuses before anything is loaded."""

from __future__ import annotations

from headwater.cli.main import main


def test_a_recipe_beside_resume(capsys):
    assert main(["train", "--resume", "runs/q", "recipes/quickstart.yaml"]) == 2
    assert (
        "recipes/quickstart.yaml: a resumed run has its own; give either a recipe or --resume"
        in capsys.readouterr().err
    )
