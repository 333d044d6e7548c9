"""What ``headwater train`` refuses before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from headwater.cli.main import main
from headwater.config.explain import to_yaml
from headwater.config.load import load_config


def test_a_resume_can_change_what_a_later_version_refuses(tmp_path, capsys):
    accepted = load_config(None, ["algorithm.kl_in_reward=0.1", "algorithm.kl_target=6"]).config
    refused = replace(accepted, algorithm=replace(accepted.algorithm, kl_horizon=10))
    (tmp_path / "config.yaml").write_text(to_yaml(refused), encoding="utf-8")
    assert main(["train", "--resume", str(tmp_path), "model.path=/nowhere"]) == 2
    assert "algorithm.kl_horizon = 10" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path), "model.path=/nowhere", "algorithm.kl_horizon=256"]) == 2
    assert "kl_horizon" not in capsys.readouterr().err


def test_a_resume_to_fewer_steps_than_are_done(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(None, ["trainer.total_steps=60"]).config))
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)
    for wanted in (3, 7):
        assert main(["train", "--resume", str(tmp_path), f"trainer.total_steps={wanted}"]) == 2
        assert capsys.readouterr().err == (
            f"error: trainer.total_steps = {wanted}: {tmp_path} has done 7 steps already; "
            "leave it out to continue to step 60\n"
        )


def test_a_negative_number_of_responses_to_show(tmp_path, capsys):
    assert main(["eval", str(tmp_path), "--show", "-1"]) == 2
    assert "--show = -1: must be >= 0" in capsys.readouterr().err


def test_a_recipe_beside_resume(capsys):
    assert main(["train", "--resume", "runs/q", "quickstart"]) == 2
    assert "quickstart: a resumed run uses its own recipe; give either a recipe or --resume" in capsys.readouterr().err
