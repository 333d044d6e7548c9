"""Several processes that talk over NCCL: ranks of a learner, and engines that get their weights. They share one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import one_gpu
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "integration"))
import collective_ranks
import two_ranks
from command import ON_TWO_RANKS, ROOT, SMALL, environment_of_ranks, metrics, train_here
from two_ranks import CASES, build, resume, save_models, spec_of, take_steps

from headwater.observe.run_directory import RunDirectory

LIMIT_S = 400.0
SOON_S = 120.0
NAMES = ("plain", "adapters", "critic and reference", "pictures", "bfloat16")


def environment() -> dict[str, str]:
    # torchrun sets the last one, with which torch ends a process whose operation has failed.
    told = {one_gpu.VARIABLE: "1", "OMP_NUM_THREADS": "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {**environment_of_ranks(), **told}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_two_ranks_compute_and_train_what_one_does(tmp_path):
    save_models(tmp_path, NAMES)
    alone = {
        name: take_steps(build(spec_of(CASES[name], tmp_path)), CASES[name], tmp_path / "of_one" / name)
        for name in NAMES
    }
    done = run(two_ranks.__file__, tmp_path, *NAMES)  # it also reads the checkpoints of one rank
    assert (tmp_path / "results.pt").exists(), done.stderr[-8000:]
    together = torch.load(tmp_path / "results.pt", weights_only=False)
    for name, theirs in alone.items():
        ours, case = together["taken"][name], CASES[name]
        share = 0.05 if name == "bfloat16" else 1e-3
        largest = max(float(each.norm()) for each in theirs["gradients"].values())
        for key, gradient in theirs["gradients"].items():
            difference = float((ours["gradients"][key] - gradient).norm())
            assert difference <= share * float(gradient.norm()) + 1e-3 * share * largest, f"{name}: {key}"
        for key, values in theirs["computed"].items():
            torch.testing.assert_close(ours["computed"][key], values, atol=share, rtol=share, msg=f"{name}: {key}")
        held = [each["held"] for each in together["held"][name]]
        assert max(held) < 0.6 * sum(held), "each rank holds its shard"
        if name == "plain":
            restored, _ = resume(build(spec_of(case, tmp_path)), case, tmp_path / "of_two" / name)
            assert restored == ours["saved"], "one rank reads the checkpoint of two"
    assert together["alone"] == "rank 1 of 2: MemoryError: no room for the gradients"


def test_two_ranks_send_to_two_engines_and_survive_one_that_dies_or_stops(tmp_path):
    done = run(collective_ranks.__file__, tmp_path)
    assert (tmp_path / "outcomes.json").exists(), done.stderr[-8000:]
    seen = json.loads((tmp_path / "outcomes.json").read_text())
    assert set(seen["parts"]) == {3}, "both ranks send a part of every tensor"
    for version, name in ((1, "first"), (2, "second")):
        outcome = seen[name]
        assert outcome["is_exported"], "the checksum of the ranks' parts is that of the whole weights"
        assert outcome["is_served"] == [True, True]
        assert outcome["versions"] == [version, version]
    assert seen["is_reused"]
    assert (seen["killed"]["is_served"], seen["killed"]["version"]) == (True, 3)
    assert seen["replaced"] == {"versions": [3, 3], "num_checksums": 1}
    assert seen["stopped"]["is_served"]
    assert seen["continued"] == {"versions": [4, 4], "num_checksums": 1}
    plain, again = seen["adapters, delta"]
    assert plain["is_served"] == again["is_served"] == [True]
    assert again["num_bytes"] < plain["num_bytes"] / 100, "nothing has changed"


def test_the_command_takes_the_same_steps_on_two_ranks(tmp_path):
    settings = [*SMALL, "eval.before=false", "eval.after=false", "model.dtype=float32"]
    done = run("-c", ON_TWO_RANKS, "train", *settings, f"run.root={tmp_path}")
    status = json.loads((tmp_path / "quickstart" / "status.json").read_text())
    assert status["state"] == "finished", done.stderr[-8000:]
    train_here(*settings, f"run.root={tmp_path / 'alone'}")
    together, alone = (metrics(each / "quickstart", "train") for each in (tmp_path, tmp_path / "alone"))
    assert [each["step"] for each in together] == [1, 2]
    assert together[0]["reward/mean"] == alone[0]["reward/mean"]
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert together[0][key] == pytest.approx(alone[0][key], rel=1e-3, abs=1e-5), key


def test_a_rank_that_dies_ends_the_run_with_its_cause(tmp_path):
    long = [*SMALL, "trainer.total_steps=100000", "trainer.checkpoint_every_steps=1", "eval.before=false"]
    log = tmp_path / "log"
    command = [sys.executable, "-c", ON_TWO_RANKS, "train", *long, f"run.root={tmp_path}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        made = RunDirectory(tmp_path / "quickstart")
        until(made.checkpoint_steps, "a checkpoint", log)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        killed_at = time.monotonic()
        until(lambda: "error: rank 1: its process has ended" in log.read_text(), "the message", log)
        process.wait(LIMIT_S)
        assert time.monotonic() - killed_at < SOON_S
    finally:
        for pid in [*ranks_of(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(LIMIT_S)
    last = made.checkpoint_steps()[-1]
    train_here("--resume", made.path, f"trainer.total_steps={last + 1}", "eval.after=false")
    assert metrics(made.path, "train")[-1]["step"] == last + 1


def until(condition, what: str, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen; {log.read_text()[-3000:]}"
        time.sleep(0.2)


def ranks_of(parent: int) -> list[int]:
    """The processes that ``fork_ranks`` has started, in their order."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(folder.name))
    return sorted(found)
