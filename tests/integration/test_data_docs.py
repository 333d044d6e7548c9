"""The files and commands of README.md, docs/data-and-rewards.md and docs/rewards.md work as printed."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest
from command import ROOT, metrics

from headwater.cli.main import main
from headwater.config.keys import settings
from headwater.config.schema import Config
from headwater.rewards.scorers import SCORERS

README = (ROOT / "README.md").read_text()
TEXT = (ROOT / "docs" / "data-and-rewards.md").read_text()
REWARDS = (ROOT / "docs" / "rewards.md").read_text()
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


@pytest.mark.parametrize(
    ("page", "names"),
    [
        (TEXT, {"sums", "mixed", "generated", "doubling", "rewarded"}),
        pytest.param(REWARDS, {"function", "turns", "mixture", "batched"}, marks=pytest.mark.slow),
    ],
    ids=["data", "rewards"],
)
def test_the_files_and_commands_of_a_page_work(folder, page, names):
    write_files(page, folder)
    commands = re.findall(r"^    headwater (train (?:[^\n\\]|\\\n)*)", page, flags=re.MULTILINE)
    if page is TEXT:
        commands.remove("train geometry3k.yaml")  # it needs the hub; test_vision_runs.py trains with rows of its layout
    assert len(commands) == len(names)
    for command in commands:
        assert main(shortened(command.replace("\\\n", " ").split())) == 0, command
    assert {path.name for path in (folder / "runs").iterdir()} == names
    recorded = {name: metrics(folder / "runs" / name, "train") for name in names}
    assert all(len(each) == 1 for each in recorded.values())
    if page is REWARDS:
        assert recorded["mixture"][0].keys() >= {"reward/answer/mean", "reward/form/mean", "reward/form_right/mean"}
        assert recorded["function"][0].keys() >= {"reward/right/mean", "reward/exact_match/right/mean"}


def test_the_judge_of_the_rewards_page_is_a_valid_recipe(folder, capsys):
    write_files(REWARDS, folder)
    assert main(["config", "sums.yaml", "graded.yaml", "--plain"]) == 0, capsys.readouterr().err


def test_geometry3k_of_the_data_page_is_a_valid_recipe(folder, capsys):
    assert "geometry3k.yaml" in write_files(TEXT, folder)
    assert main(["config", "geometry3k.yaml", "--plain"]) == 0, capsys.readouterr().err


def test_the_settings_of_the_rewards_page_exist():
    named = re.findall(r"`((?:reward|rollout|trainer|data|algorithm)\.[a-z_]+)[`:]", REWARDS)
    for key in {*named} - {"reward.py"}:
        assert key in settings(Config), key
    parameters = inspect.signature(SCORERS.resolve("llm_judge")).parameters
    arguments = re.findall(r"`([a-z_]+)`", REWARDS.split("| argument |")[1].split("\n\n")[0])
    assert {*arguments} - {"judge_cost"} <= {*parameters, "extra_body"}
    assert {"base_url", "score_key", "max_attempts"} <= {*arguments}


def test_the_files_and_commands_of_the_readme_work(folder, capsys):
    assert write_files(README, folder) == ["my.jsonl", "reward.py", "my.yaml"]
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
    commands = [shlex.split(line, comments=True)[1:] for line in blocks.splitlines() if line.startswith("headwater ")]
    assert {arguments[0] for arguments in commands} == {
        "train", "recipes", "config", "eval", "doctor", "export", "replay", "ui",
    }  # fmt: skip
    assert "headwater train quickstart" in (ROOT / "Makefile").read_text()  # make quickstart
    assert main(shortened(["train", "quickstart"])) == 0
    for arguments in commands:
        arguments = shortened(arguments) if arguments[0] == "train" else arguments
        if arguments[0] == "ui":  # which runs until it is stopped
            arguments = ["ui", "runs/quickstart", "--export", "run.html"]
        more = ["trainer.total_steps=2"] if "--resume" in arguments else []
        assert main([*arguments, *more]) == 0, (arguments, capsys.readouterr().err)
    assert {path.name for path in (folder / "runs").iterdir()} == {
        "quickstart", "my", "my-2", "recorded", "recorded-replay",
    }  # fmt: skip
    assert len(metrics(folder / "runs" / "quickstart", "train")) == 2
    assert (folder / "models" / "mine" / "README.md").exists()


def test_the_settings_of_the_readme_exist(folder, capsys):
    table = README.split("## Scale it")[1].split("\n## ")[0]
    settings = [[word for word in code.split() if "=" in word] for code in re.findall(r"`([^`]+=[^`]+)`", table)]
    assert len(settings) == 4
    for each in settings:
        assert main(["config", "quickstart", *each, "--plain"]) == 0, capsys.readouterr().err
