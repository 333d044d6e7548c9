"""Which model ``headwater serve`` serves, with how many threads, and what it says of a folder that is no model."""

from __future__ import annotations

import argparse
import os

import pytest

from headwater.backends import engine_device
from headwater.cli.main import main
from headwater.cli.serve import add_arguments, find_model, num_threads, read_options
from headwater.core.errors import ConfigError, HeadwaterError, ModelError
from headwater.observe.manifest import seal
from headwater.observe.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.write_config("{}")
    return run


def test_a_run_is_served_with_its_newest_model(run, capsys):
    with pytest.raises(ModelError, match="is a run directory without a checkpoint"):
        find_model(str(run.path))
    for step in (5, 80):
        run.model(step).mkdir(parents=True)
        (run.model(step) / "config.json").write_text("{}")
    run.checkpoint(90).mkdir()  # without a model
    assert find_model(str(run.path)) == str(run.model(80))
    assert f"its newest model is {run.model(80)}" in capsys.readouterr().err
    assert find_model(str(run.checkpoint(5))) == str(run.model(5))
    for model in (str(run.model(5)), "tiny:qwen3", "org/name"):
        assert find_model(model) == model
    seal(run.checkpoint(80))
    assert find_model(str(run.path)) == str(run.model(80))
    (run.model(80) / "config.json").write_text("[]")
    for damaged in (run.path, run.checkpoint(80)):
        with pytest.raises(ModelError, match=r"config\.json .*serve another checkpoint"):
            find_model(str(damaged))


def test_a_folder_has_a_short_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "model").mkdir(parents=True)
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def names(model: str, *arguments: str) -> tuple[str, ...]:
        args = parser.parse_args([model, *arguments])
        return read_options(args, served_name=args.served_name or model, model=model).names

    for model, short in (
        ("/models/some-model", "some-model"),
        ("/models/some-model/", "some-model"),
        ("~/some-model", "some-model"),
        ("own/model", "model"),
        (".", tmp_path.name),
        ("own/model/..", "own"),
    ):
        assert names(model) == (model, short)
        assert names(model, "--served-name", "mine") == ("mine",)
    for model in ("tiny:qwen3", "org/name", "smollm2"):
        assert names(model) == (model,)


def test_what_is_wrong_is_blamed_on_the_argument(tmp_path, capsys):
    config = tmp_path / "config.json"
    for arguments, message in [
        ([str(tmp_path)], f"error: MODEL = {tmp_path}: has no config.json"),
        (["tiny:gpt9"], "error: MODEL = "),
        (["tiny:qwen3", "--device", "gpu"], "error: --device = gpu: not a device"),
        (["tiny:qwen3", "--threads", "-1"], "error: --threads = -1: must be >= 0"),
        (["tiny:qwen3", "--max-responses", "0"], "error: --max-responses = 0: must be >= 1"),
    ]:
        assert main(["serve", *arguments, "--port", "0"]) == 2, arguments
        shown = capsys.readouterr().err
        assert message in shown, shown
        assert "model.path" not in shown
    config.write_text("{}")
    with pytest.raises(ConfigError, match=r"rollout\.device = gpu: not a device"):
        engine_device("gpu", "cpu")


def test_a_router_needs_a_backend_that_talks_to_servers(capsys):
    for backend, message in (
        ("embedded", "error: --backend = embedded: does not talk to servers"),
        ("slang", "did you mean 'sglang'?"),
    ):
        assert main(["route", "http://127.0.0.1:9", "--backend", backend]) == 2
        assert message in capsys.readouterr().err


def test_the_number_of_threads():
    assert num_threads(3, {"OMP_NUM_THREADS": "2"}) == 3
    assert num_threads(0, {}) == 0
    assert num_threads(None, {"OMP_NUM_THREADS": "2"}) == 0  # torch reads the variable itself
    assert 1 <= num_threads(None, {}) <= max(1, len(os.sched_getaffinity(0)) // 2)
    with pytest.raises(HeadwaterError, match="--threads"):
        num_threads(-1, {})
