"""A disk that fills up: the message names it, and what was saved before stays whole.

On a small file system in memory. Where it cannot be mounted, the tests are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from command import SMALL, after_step, headwater
from safetensors import SafetensorError

from headwater.core.errors import DiskFull
from headwater.models.load import load_model, load_tokenizer, save_model
from headwater.observe.manifest import damage
from headwater.observe.run_directory import RunDirectory
from headwater.observe.status_file import read_status

FAST = [*SMALL, "eval.before=false", "eval.after=false", "run.name=run"]
MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of the given size, or changes its size."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(num_mib: int, how: str = "") -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"{how}size={num_mib}m", "tmpfs", str(place)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user cannot mount a file system")
        return place

    yield mount
    # At once: models that were loaded from it may still be mapped into the memory of this process.
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_the_run_can_be_resumed(disk, tmp_path):
    place = disk(1000)
    settings = ["trainer.checkpoint_every_steps=1", "trainer.total_steps=1"]
    assert headwater("train", *FAST, f"run.root={place}", *settings).code == 0
    run = RunDirectory(place / "run")
    needed = size(run.checkpoint(1))
    disk((size(place) + needed // 2) // MIB + 1, "remount,")
    result = headwater("train", "--resume", run.path, "trainer.total_steps=3")
    assert result.code == 2
    assert "Traceback" not in result.stderr
    full = rf"step_000002: the checkpoint cannot be written: the disk is full\. The disk at {place} has [\d.]+ MiB free"
    assert re.search(rf"{full} of \d+ MiB; about [\d.]+ MiB are needed; free some space \(the check", result.stderr)
    assert run.checkpoint_steps() == [1]
    assert damage(run.checkpoint(1)) == ()
    assert not list(run.checkpoints.glob(".*")), "the incomplete checkpoint takes no space"
    status = read_status(run.status_file)
    assert (status.state, status.error.partition(":")[0]) == ("failed", "DiskFull")
    report = headwater("doctor", run.path).stdout
    assert "free disk space" in report
    assert "memory" not in report
    disk(1000, "remount,")
    assert headwater("train", "--resume", run.path, "trainer.total_steps=3").code == 0
    assert run.checkpoint_steps() == [2, 3]


def test_records_and_rollouts_that_do_not_fit_are_named(disk):
    place = disk(20)
    run = RunDirectory(place / "run")

    def fill() -> None:
        with (place / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    for every, what in ((1, r"rollouts/step_000002\.parquet: the rollouts"), (0, r"(metrics|ledger)\.jsonl: a record")):
        with after_step(1, fill):
            settings = ["trainer.total_steps=100", f"trainer.save_rollouts_every_steps={every}"]
            result = headwater("train", *FAST, f"run.root={place}", *settings)
        assert result.code == 2
        assert "Traceback" not in result.stderr
        # A status that was being replaced when the disk was filled leaves the space of the one before.
        full = rf"{what} cannot be written: the disk is full\. The disk at {place} has [\d.]+ (bytes|KiB) free"
        assert re.search(full, result.stderr), result.stderr
        assert read_status(run.status_file).state == "failed", "its last status needs no new space"
        assert "memory" not in headwater("doctor", run.path).stdout
        (place / "filler").unlink()
        assert RunDirectory(run.path).read_metrics()
        shutil.rmtree(run.path)


def test_libraries_that_report_a_full_disk_in_their_own_way(disk):
    place = disk(1)
    model, tokenizer = load_model("tiny:qwen3", dtype="float32", device="cpu", seed=0), load_tokenizer("tiny:qwen3")
    with pytest.raises(SafetensorError, match="os error 28"):
        model.save_pretrained(place / "raw")
    shutil.rmtree(place / "raw")
    with pytest.raises(DiskFull, match=rf"the model cannot be written: the disk is full. The disk at {place} has"):
        save_model(model, tokenizer, place / "model")
    assert list(place.iterdir()) == []
