"""Run directories: nothing overwritten, nothing lost."""

from __future__ import annotations

import os

import pytest
from log import own_records

from headwater.core.errors import RunError
from headwater.observe.run_directory import RunDirectory


def test_runs_of_the_same_name_get_their_own_folder(tmp_path):
    names = [RunDirectory.create(tmp_path, "run").path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_a_root_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"run\.root = .*file"):
        RunDirectory.create(tmp_path / "file", "run")


def test_a_run_that_failed_before_it_recorded_anything_is_removed_and_its_error_says_so(tmp_path):
    for has_recorded in (False, True):
        run = RunDirectory.create(tmp_path, "run")
        if has_recorded:
            run.metrics_file.touch()
        with pytest.raises(ValueError, match="wrong") as caught, run.removed_if_unused():
            raise ValueError("wrong")
        assert run.path.exists() == has_recorded
        note = f"{run.path} was removed, because the run has recorded nothing"
        assert getattr(caught.value, "__notes__", []) == ([] if has_recorded else [note])


def test_opening_something_else_is_an_error(tmp_path):
    with pytest.raises(RunError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_a_folder_of_runs_or_a_part_of_one_is_answered_with_the_run(tmp_path):
    for name in ("old", "new"):
        RunDirectory.create(tmp_path / "runs", name).write_config("a: 1")
    os.utime(tmp_path / "runs/old", (0, 0))
    with pytest.raises(RunError, match=r"folder of runs; give one of them, for example .*runs/new$"):
        RunDirectory.open(tmp_path / "runs")
    with pytest.raises(RunError, match=r"it is a part of a run; give .*runs/old$"):
        RunDirectory.open(tmp_path / "runs/old/checkpoints/step_000002")
    with pytest.raises(RunError, match=r"did you mean .*runs/new\?"):
        RunDirectory.open(tmp_path / "runs/nwe")


def test_a_folder_is_not_its_own_correction(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(RunError, match=r"for example runs/quickstart$"):
        RunDirectory.open(tmp_path / "runs")


def test_settings_of_a_resume_are_kept_in_addition_to_the_first(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for text in ("a: 1", "a: 1", "a: 2", "a: 3"):
        run.write_config(text)
    names = ["config-2.yaml", "config-3.yaml", "config.yaml", "run_id"]
    assert sorted(path.name for path in run.path.iterdir()) == names
    assert (run.path / "config.yaml").read_text() == "a: 1"
    assert RunDirectory.open(run.path).config_file.read_text() == "a: 3"


def test_the_last_record_of_a_repeated_step_counts(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for kind, step, value in (("train", 1, 0.1), ("train", 2, 0.2), ("eval", 2, 0.5), ("train", 2, 0.3)):
        run.append_metrics({"kind": kind, "step": step, "value": value})
    assert [record["value"] for record in run.read_metrics()] == [0.1, 0.3, 0.5]
    assert len(run.metrics_file.read_text().splitlines()) == 4


def test_records_after_the_step_of_a_resume_are_invalid(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for step in (1, 2, 3, 4):
        run.append_metrics({"kind": "train", "step": step})
    run.append_metrics({"kind": "resume", "step": 2})
    run.append_metrics({"kind": "train", "step": 3, "again": True})
    assert run.read_metrics() == [
        {"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "train", "step": 3, "again": True},
    ]  # fmt: skip


def test_an_incomplete_line_is_skipped(tmp_path, caplog):
    run = RunDirectory.create(tmp_path, "run")
    run.metrics_file.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    run.append_metrics({"kind": "train", "step": 2})
    assert [record["step"] for record in run.read_metrics()] == [1, 2]
    assert "metrics.jsonl: skipped line 2: incomplete" in caplog.text


def test_bytes_and_lines_of_others_are_skipped_and_named_once(tmp_path, caplog):
    run = RunDirectory.create(tmp_path, "run")
    foreign = [b"\xff\xfe\x00", b"[1, 2]", b"7", b'{"kind": "train"}', b'{"kind": "note", "step": 1}', b"[" * 10**5]
    foreign += [b'{"kind": "train", "step": "two"}', b'{"kind": "train", "step": true}']
    for step, line in enumerate(foreign, start=1):
        run.append_metrics({"kind": "train", "step": step})
        with run.metrics_file.open("ab") as file:
            file.write(line + b"\n\n")
    for _ in range(2):
        assert [record["step"] for record in run.read_metrics()] == list(range(1, len(foreign) + 1))
    assert run.last_metrics(1000) == run.read_metrics()
    run.last_metrics(1000)[0]["step"] = -1  # a caller may change its copy
    assert run.last_metrics(1000) == run.read_metrics()
    (message,) = (each.getMessage() for each in own_records(caplog))
    assert message.startswith(f"{run.metrics_file}: skipped lines 2, 5, 8, 11, 14, ...: ")


def test_files_are_never_overwritten(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    for content in ("one", "two", "three"):
        run.free_file("eval", "step_1", ".txt").write_text(content)
    assert {path.name: path.read_text() for path in (run.path / "eval").iterdir()} == {
        "step_1.txt": "one", "step_1-2.txt": "two", "step_1-3.txt": "three",
    }  # fmt: skip


def test_the_end_of_a_long_file_is_read_alone(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    assert run.last_metrics(5) == []
    for step in range(1, 1001):
        run.append_metrics({"kind": "train", "step": step, "text": "x" * 100})
    run.append_metrics({"kind": "resume", "step": 998})
    run.append_metrics({"kind": "train", "step": 999, "again": True})
    with run.metrics_file.open("a") as file:
        file.write('{"kind": "tra')
    assert [record["step"] for record in run.last_metrics(6)] == [997, 998, 999]
    assert run.last_metrics(6)[-1] == {"kind": "train", "step": 999, "again": True}
    assert run.last_metrics(10**6) == run.read_metrics()


def test_the_end_of_a_ledger_respects_resumes(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    assert run.last_ledger(5) == []
    for step in range(1, 6):
        run.append_ledger({"kind": "step", "step": step})
    run.append_ledger({"kind": "resume", "step": 4})
    assert [record["step"] for record in run.last_ledger(3)] == [4]
    run.append_ledger({"kind": "step", "step": 5, "again": True})
    assert run.last_ledger(100) == run.read_ledger()
    assert run.last_ledger(1) == [{"kind": "step", "step": 5, "again": True}]


def test_checkpoints_that_can_be_resumed_are_known(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    assert run.checkpoint_steps() == []
    foreign = ("step_000100_copy", "step_7", "step_old", "step_²")
    for name in ("step_000100", "step_000020", "step_1000000", ".step_000120", "superseded-1_step_000140", *foreign):
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / "step_000030").write_text("a file")
    assert run.checkpoint_steps() == [20, 100, 1000000]
    assert {path.name for path in run.foreign_checkpoints()} == {*foreign, "step_000030"}
    (run.path / "config-old.yaml").write_text("")
    assert run.config_file.name == "config.yaml"
