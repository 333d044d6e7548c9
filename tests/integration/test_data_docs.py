"""The files and commands of docs/data-and-rewards.md work as printed."""

from __future__ import annotations

import re

from command import ROOT, metrics

from headwater.cli.main import main
from headwater.rewards.scorers import SCORERS

TEXT = (ROOT / "docs" / "data-and-rewards.md").read_text()
FEWER_STEPS = [
    "trainer.total_steps=1", "trainer.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2", "eval.before=false",
    "eval.after=false",
]  # fmt: skip


def test_its_files_and_commands_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, content in re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", TEXT, flags=re.DOTALL):
        (tmp_path / name).write_text(content)
    commands = re.findall(r"^    headwater (train (?:[^\n\\]|\\\n)*)", TEXT, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        arguments = command.replace("\\\n", " ").split()
        is_large = "recipes/quickstart.yaml" in arguments
        cut = ["warm_start.num_steps=0"] if is_large else []
        assert main([*arguments, *FEWER_STEPS, *cut]) == 0, command
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"sums", "generated", "doubling", "rewarded", "judged"}
    assert all(len(metrics(tmp_path / "runs" / name, "train")) == 1 for name in runs)


def test_every_scorer_is_described():
    table = TEXT.split("### Built-in scorers")[1].split("\n### ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(SCORERS.names())
