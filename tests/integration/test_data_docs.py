"""The files and commands of README.md and docs/data-and-rewards.md work as printed."""

from __future__ import annotations

import re
import shlex

import pytest
from command import ROOT, metrics

from headwater.cli.main import main
from headwater.rewards.scorers import SCORERS

README = (ROOT / "README.md").read_text()
TEXT = (ROOT / "docs" / "data-and-rewards.md").read_text()
FEWER_STEPS = [
    "trainer.total_steps=1", "trainer.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2", "eval.before=false",
    "eval.after=false",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory like the root of the repository, where runs can be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def write_files(text, folder):
    """Write the files that ``text`` prints after their names."""
    files = re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    for name, content in files:
        (folder / name).write_text(content)
    return [name for name, _ in files]


def shortened(arguments):
    """The arguments of a ``train`` command, and settings that shorten the run."""
    is_quickstart = any("quickstart" in argument for argument in arguments)
    fewer_rows = ["warm_start.num_steps=0", "data.num_train_rows=50", "data.num_eval_rows=10"]
    return [*arguments, *FEWER_STEPS, *(fewer_rows if is_quickstart else [])]


def test_the_files_and_commands_of_the_data_page_work(folder):
    write_files(TEXT, folder)
    commands = re.findall(r"^    headwater (train (?:[^\n\\]|\\\n)*)", TEXT, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert main(shortened(command.replace("\\\n", " ").split())) == 0, command
    runs = {path.name for path in (folder / "runs").iterdir()}
    assert runs == {"sums", "generated", "doubling", "rewarded", "judged"}
    assert all(len(metrics(folder / "runs" / name, "train")) == 1 for name in runs)


def test_the_files_and_commands_of_the_readme_work(folder, capsys):
    assert write_files(README, folder) == ["my.jsonl", "reward.py", "my.yaml"]
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
    commands = [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("headwater ")]
    assert {arguments[0] for arguments in commands} == {"train", "recipes", "config", "eval", "doctor", "replay"}
    assert "headwater train quickstart" in (ROOT / "Makefile").read_text()  # make quickstart
    assert main(shortened(["train", "quickstart"])) == 0
    for arguments in commands:
        arguments = shortened(arguments) if arguments[0] == "train" else arguments
        more = ["trainer.total_steps=2"] if "--resume" in arguments else []
        assert main([*arguments, *more]) == 0, (arguments, capsys.readouterr().err)
    assert {path.name for path in (folder / "runs").iterdir()} == {
        "quickstart", "my", "my-2", "recorded", "recorded-replay",
    }  # fmt: skip
    assert len(metrics(folder / "runs" / "quickstart", "train")) == 2


def test_the_settings_of_the_readme_exist(folder, capsys):
    table = README.split("## Scale it")[1].split("\n## ")[0]
    settings = [code.split() for code in re.findall(r"`([^`]+=[^`]+)`", table)]
    assert len(settings) == 2
    for each in settings:
        assert main(["config", "quickstart", *each, "--plain"]) == 0, capsys.readouterr().err


def test_every_scorer_is_described():
    table = TEXT.split("### Built-in scorers")[1].split("\n### ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(SCORERS.names())
