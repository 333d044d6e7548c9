"""What ``headwater serve`` says of a folder that is no model."""

from __future__ import annotations

import pytest

from headwater.cli.main import main
from headwater.cli.serve import check_model_folder
from headwater.core.errors import ModelError
from headwater.observe.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.write_config("{}")
    return run


def refusal(model) -> str:
    with pytest.raises(ModelError) as caught:
        check_model_folder(str(model))
    return str(caught.value)


def test_a_run_directory_names_its_newest_model(run):
    assert f"MODEL = {run.path}: is a run directory" in refusal(run.path)
    assert "no checkpoint yet" in refusal(run.path)
    for step in (5, 80):
        run.model(step).mkdir(parents=True)
        (run.model(step) / "config.json").write_text("{}")
    assert refusal(run.path).endswith(f"serve {run.path}/checkpoints/step_000080/model")
    assert refusal(run.model(5).parent).endswith(f"serve {run.path}/checkpoints/step_000005/model")
    check_model_folder(str(run.model(5)))


def test_another_folder_is_blamed_on_the_argument(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert f"error: MODEL = {tmp_path}: has no config.json" in capsys.readouterr().err
