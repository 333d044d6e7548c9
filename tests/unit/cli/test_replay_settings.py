"""A replay changes nothing outside its own run directory."""

from __future__ import annotations

from pathlib import Path

from headwater.cli.replay import _for_replay
from headwater.config.load import load_config


def test_a_replay_has_no_copy_and_no_best_checkpoint():
    recorded = load_config(
        "quickstart",
        [
            "trainer.checkpoint_dir=s3://bucket/runs", "trainer.best_metric=eval/reward/mean", "trainer.best_mode=min",
            "trainer.checkpoint_in_background=false", "eval.every_steps=1",
        ],
    ).config  # fmt: skip
    plain = load_config("quickstart", []).config
    assert _for_replay(recorded, Path("runs/a")) == _for_replay(plain, Path("runs/a"))
