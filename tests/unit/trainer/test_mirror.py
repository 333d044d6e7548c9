"""The copy of a run: one run only, complete, and nothing lost by a resume or a broken transfer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import fsspec
import pytest

from headwater.core.errors import CopyFailed, RunError, WaitTimeout
from headwater.observe.manifest import damage, seal
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.ledger import Ledger
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.trainer import checkpoint
from headwater.trainer.checkpoint import Checkpoints, TrainerState
from headwater.trainer.mirror import Mirror, local_run


class OneFile:
    """A learner whose checkpoint is one file."""

    def __init__(self, content: str = "weights") -> None:
        self.content = content
        self.may_write = threading.Event()
        self.may_write.set()

    def save(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(self.content)

    def snapshot(self, folder: Path) -> OneFile:
        self.folder = folder
        return self

    def write(self) -> None:
        self.may_write.wait(60)
        self.save(self.folder)


def state(step: int) -> TrainerState:
    return TrainerState(step, RolloutSnapshot({}, Ledger().state_dict()), warm_started=True)


def new_run(root: Path, *steps: int, content: str = "weights") -> RunDirectory:
    run = RunDirectory.create(root, "run")
    run.write_config(f"# {content}")
    for step in steps:
        run.append_metrics({"kind": "train", "step": step, "by": content})
        Checkpoints(run.checkpoints, 9).save(state(step), OneFile(f"{content} {step}"))
    return run


def names(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "checkpoints").iterdir())


def kept(run: RunDirectory) -> list[Path]:
    return [run.checkpoint(step) for step in run.checkpoint_steps()]


def test_a_copy_belongs_to_one_run(tmp_path):
    place = tmp_path / "copies"
    first = new_run(tmp_path / "a", 1)
    Mirror.of(str(place), first).update(kept(first))
    second = new_run(tmp_path / "b", 1, content="other")
    match = r"trainer\.checkpoint_dir = .*copies/run: has the copy of another run .* set another run\.name"
    with pytest.raises(RunError, match=match):
        Mirror.of(str(place), second)
    with pytest.raises(RunError, match=r"--resume = file:.*another run than .*; move that folder away"):
        local_run(f"file://{place}/run", tmp_path / "b")
    # The same run wrote the step again: its new checkpoint and reference replace the old ones.
    first.reference.mkdir()
    for text in ("one", "two"):
        (first.reference / "weights.bin").write_text(text)
        seal(first.reference)
        (first.checkpoint(1) / "model" / "weights.bin").write_text(text)
        seal(first.checkpoint(1))
        Mirror.of(str(place), first).update(kept(first))
        for copied in (place / "run" / "reference", place / "run" / "checkpoints" / "step_000001"):
            assert damage(copied) == ()
    assert (place / "run" / "reference" / "weights.bin").read_text() == "two"
    assert (place / "run" / "checkpoints" / "step_000001" / "model" / "weights.bin").read_text() == "two"
    with pytest.raises(RunError, match=r"no copy of a run \(config\.yaml is missing\)"):
        local_run(f"file://{place}/missing", tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert not (place / "missing").exists()


def test_the_checkpoint_that_is_asked_for_is_downloaded(tmp_path):
    place = tmp_path / "copies"
    run = new_run(tmp_path / "a", 1, 2, 3)
    Mirror.of(str(place), run).update(kept(run))
    for number, (step, found) in enumerate({"": [3], "2": [2], "best": [1, 2, 3], "7": []}.items()):
        fetched = local_run(f"file://{place}/run", tmp_path / str(number), step=step)
        assert RunDirectory(fetched).checkpoint_steps() == found


def test_a_run_resumed_from_its_copy_keeps_what_it_did_not_download(tmp_path):
    place = tmp_path / "copies"
    run = new_run(tmp_path / "a", 1, 2, 3, 4)
    Mirror.of(str(place), run).update(kept(run))
    again = RunDirectory(local_run(f"file://{place}/run", tmp_path / "b"))
    assert again.checkpoint_steps() == [4]
    checkpoints = Checkpoints(again.checkpoints, 2, mirror=Mirror.of(str(place), again))
    assert checkpoints.saved_anywhere() == {1, 2, 3, 4}
    checkpoints.keep_best(1)
    checkpoints.save(state(5), OneFile())
    assert names(place / "run") == ["step_000001", "step_000004", "step_000005"]
    # From an earlier step, later checkpoints are set aside in both places.
    checkpoints.set_aside_after(4)
    aside = ["step_000001", "step_000004", "superseded-1_step_000005"]
    assert names(place / "run") == aside
    assert names(again.path) == aside[1:]
    assert damage(place / "run" / "checkpoints" / aside[-1]) == ()


def test_a_download_that_broke_off_is_repeated(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a", 1)
    mirror = Mirror("memory://broken/run", run)
    mirror.update(kept(run))
    memory = fsspec.filesystem("memory")
    get_file = memory.get_file

    for broken in ("metrics", "weights.bin"):

        def breaks(source, target, broken=broken):
            if broken in source:
                Path(target).write_text("half")
                raise ConnectionError("gone")
            get_file(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(memory, "get_file", breaks)
            with pytest.raises(CopyFailed, match="gone"):
                local_run("memory://broken/run", tmp_path / "b")
    again = RunDirectory(local_run("memory://broken/run", tmp_path / "b"))
    assert damage(again.checkpoint(1)) == ()
    assert again.read_metrics() == run.read_metrics()


def test_an_older_run_directory_gets_the_records_of_the_copy(tmp_path):
    place, url = tmp_path / "copies", f"file://{tmp_path}/copies/run"
    run = new_run(tmp_path / "a", 1)
    Mirror.of(str(place), run).update(kept(run))
    elsewhere = RunDirectory(local_run(url, tmp_path / "b"))
    run.append_metrics({"kind": "train", "step": 2, "by": "lost"})  # and then the machine was gone
    run.write_config("# of a resume that saved nothing")
    local_run(url, tmp_path / "a")
    assert [each["by"] for each in run.read_metrics()] == ["weights", "lost"], "the copy has nothing newer"
    elsewhere.append_metrics({"kind": "train", "step": 2, "by": "elsewhere"})
    Checkpoints(elsewhere.checkpoints, 9, mirror=Mirror.of(str(place), elsewhere)).save(state(2), OneFile("new"))
    local_run(url, tmp_path / "a")
    assert run.checkpoint_steps() == [1, 2]
    assert [each["by"] for each in run.read_metrics()] == ["weights", "elsewhere"]
    assert [file.name for file in run.config_files] == ["config.yaml"]
    run.metrics_file.write_text('{"kind": "train", "step": 3}\n')
    Checkpoints(run.checkpoints, 9).save(state(3), OneFile())
    with pytest.raises(RunError, match="other records and a later checkpoint, that of step 3"):
        local_run(url, tmp_path / "a")


def test_only_the_last_copy_must_succeed(tmp_path, monkeypatch, caplog):
    run, said = new_run(tmp_path), []
    mirror = Mirror.of(str(tmp_path / "copies"), run)
    checkpoints = Checkpoints(run.checkpoints, 9, mirror=mirror)
    update = Mirror.update

    def fails(self, *args, **options):
        raise CopyFailed("no network")

    monkeypatch.setattr(Mirror, "update", fails)
    with caplog.at_level(logging.WARNING):
        checkpoints.save(state(1), OneFile(), in_background=True)
        checkpoints.settle()
        checkpoints.save(state(2), OneFile())
    assert caplog.text.count("no network; this is tried again with the next checkpoint") == 2
    with pytest.raises(CopyFailed):
        checkpoints.save(state(2), OneFile(), is_last=True)
    monkeypatch.setattr(Mirror, "update", update)
    checkpoints.save(state(2), OneFile(), is_last=True)
    assert mirror.steps() == run.checkpoint_steps() == [1, 2]
    checkpoints.finish(said.append)
    assert said == ["Warning: 2 times, checkpoints could not be copied at once. The last cause: no network"]


def test_a_wait_that_ends_early_does_not_forget_the_checkpoint(tmp_path, monkeypatch):
    run, learner = new_run(tmp_path), OneFile()
    checkpoints = Checkpoints(run.checkpoints, 9)
    learner.may_write.clear()
    checkpoints.save(state(1), learner, in_background=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "WRITE_LIMIT_S", 0.01)
        with pytest.raises(WaitTimeout):
            checkpoints.settle()
    learner.may_write.set()
    checkpoints.settle()
    assert checkpoints.has(1)
    checkpoints.finish(print)
