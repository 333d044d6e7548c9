"""Several ranks: the learner's calls on two ranks equal those on one, and runs under torchrun end as they should."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from integration import two_ranks
from integration.books import check_books
from integration.command import ROOT, SMALL, environment_of_ranks, is_gone, metrics, train_here, train_on_two
from integration.two_ranks import (
    CASES,
    COMMON,
    FEW,
    RESUMED,
    build,
    later_than,
    resume,
    save_models,
    spec_of,
    take_steps,
)
from safetensors.torch import load_file

from headwater.models.load import load_model
from headwater.observe.doctor import examine
from headwater.observe.run_directory import RunDirectory

LIMIT_S = 600.0
HUNG_S = 60
"""Much longer than any call of these runs takes on a busy machine, such as building the model."""
SOON_S = 300.0
"""A killed rank ends the run within a minute, or later on a busy machine: long before ``learner.rank_timeout_s``."""
NOTICED_S = 60.0
"""A killed rank is noticed within this time. Rank 0 looks for its process every second, and a busy machine
delays this less than the end of the run."""
COARSE = ("bfloat16", "adapters in bfloat16", "pictures in bfloat16")
COMPARED = ("loss", "grad_norm", "entropy", "optimizer_steps", "rollout_gap/tokens", "rollout_gap/logprob_abs_max")


def torchrun(*arguments: object) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, arguments)
    ]  # fmt: skip


ALL = pytest.param("all", marks=[pytest.mark.slow, pytest.mark.xdist_group("ranks")])


@pytest.fixture(scope="module", params=["few", ALL])
def learned(request, tmp_path_factory):
    """The same calls on one rank and on two."""
    names = FEW if request.param == "few" else tuple(CASES)
    folder = tmp_path_factory.mktemp("ranks")
    save_models(folder, names)
    alone = {
        name: take_steps(build(spec_of(CASES[name], folder)), CASES[name], folder / "of_one" / name) for name in names
    }
    done = forked.run(two_ranks.__file__, folder, *names, env=environment_of_ranks(), timeout=LIMIT_S)
    assert (folder / "results.pt").exists(), done.stderr[-8000:]
    return folder, alone, torch.load(folder / "results.pt", weights_only=False)


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str, tolerance: float = 1e-5
) -> None:
    """Columns of the same weights are equal to rounding."""
    assert actual.keys() == expected.keys(), name
    for key, tensor in expected.items():
        message = f"{name}: {key} differs by up to {(actual[key] - tensor).abs().max()}"
        torch.testing.assert_close(actual[key], tensor, atol=tolerance, rtol=tolerance, msg=message)


def without_ranks(stats: dict[str, float]) -> set[str]:
    """The names of statistics that one rank has as well."""
    return {name for name in stats if not name.startswith("ranks/")}


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    """Those of the first optimiser step, tensor by tensor. Weights after it cannot be compared as closely.

    A rank that leaves out a row or a picture, or counts one twice, changes them by tens of percent. Rounding changes
    them by less than 1e-4 with float32 and 1e-2 with bfloat16, measured on x86.
    """
    assert actual.keys() == expected.keys(), name
    share = 0.03 if name in COARSE else 1e-3
    largest = max((float(gradient.norm()) for gradient in expected.values()), default=0.0)
    for key, gradient in expected.items():
        difference, norm = float((actual[key] - gradient).norm()), float(gradient.norm())
        # The gradients of some biases are rounding alone.
        rounding = (1e-3 if name in COARSE else 1e-6) * largest
        assert difference <= share * norm + rounding, f"{name}: {key} has the norm {norm} and differs by {difference}"


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    assert actual.keys() == expected.keys(), name
    has_pictures = any(case.has_pictures and f"{name}, ".startswith(f"{each}, ") for each, case in CASES.items())
    for key, tensor in expected.items():
        # A step of AdamW has the size of the learning rate, 1e-3, however small the gradient is: where a gradient is
        # nearly zero, rounding decides the direction of the step. With pictures, on x86, in up to 5% of the places.
        differs = ~torch.isclose(actual[key], tensor, atol=1e-5, rtol=1e-5)
        # Without rotary embeddings, a bias of keys changes no attention, so its gradient is rounding alone.
        is_rounding = ".vision_model." in key and key.endswith("k_proj.bias")
        most = max(2, tensor.numel() // (10 if has_pictures else 1000))
        num_different = int(differs.sum())
        assert is_rounding or num_different <= most, f"{name}: {key} differs in {num_different} of {tensor.numel()}"
        assert (actual[key] - tensor).abs().max() < 5e-3, f"{name}: {key}"


def assert_same_steps(ours: dict, theirs: dict, name: str, numbers: tuple[str, ...]) -> None:
    """The numbers of every step, the gradients of the first, and the weights after them are equal to rounding."""
    assert_same_gradients(ours["gradients"], theirs["gradients"], name)
    for step, (mine, other) in enumerate(zip(ours["stats"], theirs["stats"], strict=True)):
        assert without_ranks(mine) == other.keys(), name
        # Every step of AdamW after the first begins with weights that rounding has changed.
        is_exact = other["actor/optimizer_steps"] == 1 and not CASES[name].has_pictures
        tolerance = {"rel": 5e-3 if step else 1e-5 if is_exact else 1e-4, "abs": 1e-6}
        for key in (each for each in other if each.endswith(numbers)):
            expected = pytest.approx(other[key], **({"rel": 0.1, "abs": 0.03} if name in COARSE else tolerance))
            assert mine[key] == expected, f"{name}: {key} of step {step + 1}"
    if name not in COARSE:
        assert_same(ours["after_one"], theirs["after_one"], name, tolerance=1e-3)  # of weights after a step
        assert_same_weights(ours["weights"], theirs["weights"], name)


def test_two_ranks_compute_and_train_what_one_does(learned):
    _, alone, together = learned
    for name, theirs in alone.items():
        case, ours = CASES[name], together["taken"][name]
        assert_same(ours["computed"], theirs["computed"], name)
        assert_same_steps(ours, theirs, name, COMPARED)
        assert ours["status"].num_ranks == 2
        used, peaks = ours["stats"][-1], [each.peak_memory_bytes / 2**30 for each in ours["status"].ranks]
        assert len(peaks) == 2
        assert 0.1 < used["ranks/memory_peak_gib_mean"] <= used["ranks/memory_peak_gib_max"] <= max(peaks)
        assert ours["status"].num_optimizer_steps == theirs["status"].num_optimizer_steps, name
        assert case.what[0] in ours["computed"]
    num_steps = {
        "critic and reference": 1,
        "critic in uneven mini-batches": 4,
        "more mini-batches than rows": 2,
        "nothing to learn in mini-batches": 1,
    }
    for name in alone.keys() & num_steps:
        assert together["taken"][name]["stats"][0]["actor/optimizer_steps"] == num_steps[name], name


def test_every_rank_holds_only_its_shard(learned):
    _, _, together = learned
    for name, ranks in together["held"].items():
        held = [each["held"] for each in ranks]
        assert sum(held) == ranks[0]["all"], name
        assert max(held) < 0.6 * ranks[0]["all"], name


@pytest.mark.parametrize("learned", [ALL], indirect=True)
def test_checkpoints_are_read_by_another_number_of_ranks(learned):
    folder, alone, together = learned
    for name in (name for name in RESUMED if name in alone):
        case = CASES[name]
        theirs, ours = alone[name], together["taken"][name]
        restored, weights = together["resumed"][name]
        assert restored == theirs["saved"], f"{name}: the checksum does not depend on the number of ranks"
        assert_same_weights(weights, theirs["weights"], f"{name}, from one rank to two")
        restored, weights = resume(build(spec_of(case, folder)), case, folder / "of_two" / name)
        assert restored == ours["saved"], f"{name}: the checksum does not depend on the number of ranks"
        assert_same_weights(weights, ours["weights"], f"{name}, from two ranks to one")
    # Saved after a pass without a gradient, whose bfloat16 copies must not be taken for the weights.
    for name in (name for name in COARSE if name in alone):
        held = load_file(folder / "of_two" / name / "train" / "shard_00001_of_00002.safetensors")
        assert {tensor.dtype for key, tensor in held.items() if key.startswith("model.")} == {torch.float32}
    saved = load_model(str(folder / "of_two" / next(iter(alone)) / "model"), dtype="float32", device="cpu", seed=0)
    assert saved.config.architectures == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("learned", [ALL], indirect=True)
def test_what_ranks_write_in_the_background_is_the_checkpoint_of_its_moment(learned):
    folder, alone, _ = learned
    for number in ("of_one", "of_two"):
        for name in alone:
            saved, later = (files(each) for each in (folder / number / name, later_than(folder / number / name)))
            assert saved.keys() == later.keys(), f"{number}, {name}"
            assert [key for key in saved if saved[key] != later[key]] == [], f"{number}, {name}"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_errors_name_the_rank(learned):
    _, _, together = learned
    assert "over learner.max_tokens_per_forward_pass = 4" in together["too long"]
    assert re.match(r"rank 1 of 2: .*blocked/train: cannot save .*Is a directory", together["cannot save"])
    assert re.match(
        r"rank 0: rank 1: .*blocked later/train: cannot save .*Is a directory", together["cannot save later"]
    )
    assert "run.root must be a folder that the machines of all learner ranks share" in together["not shared"]
    assert len(together["after an error"]) == 2, "an error on all ranks leaves them usable"
    for text in (together["alone"], together["after a failure"], together["failure"]):
        assert text == "rank 1 of 2: MemoryError: no room for the gradients"


@pytest.fixture
def started(tmp_path) -> Iterator:
    """Starts a run on two ranks in the background; nothing of it is left behind."""
    processes: list[subprocess.Popen] = []

    def start(*arguments: object, end_s: int = 30) -> subprocess.Popen:
        """``end_s`` is how long torchrun waits for processes that it has asked to end; its default."""
        log = (tmp_path / "log").open("w")
        process = subprocess.Popen(
            torchrun("--shutdown-timeout", end_s, "-m", "headwater", "train", *arguments),
            cwd=ROOT,
            env=environment_of_ranks(),
            stdout=log,
            stderr=log,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        for pid in [*ranks_of(process.pid).values(), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank, by the environment that torchrun gives it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            entries = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((each for each in entries if each.startswith(b"RANK=")), None)
        if rank is not None and int(fields[1]) == launcher and fields[0] != "Z":
            found[int(rank.removeprefix(b"RANK="))] = int(folder.name)
    return found


def wait_for(condition, what: str, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen; {log.read_text()[-2000:]}"
        time.sleep(0.2)


LONG = [
    *SMALL,
    "trainer.total_steps=100000",
    "trainer.checkpoint_every_steps=1",
    "eval.before=false",
    "eval.after=false",
]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed rank", "hung rank", "stopped run"])
def test_a_run_ends_with_all_its_ranks(tmp_path, started, how):
    run, log = RunDirectory(tmp_path / "quickstart"), tmp_path / "log"
    limit, end_s = ([f"learner.rank_timeout_s={HUNG_S}"], 5) if how == "hung rank" else ([], 30)
    process = started(*LONG, *limit, f"run.root={tmp_path}", end_s=end_s)
    wait_for(lambda: run.checkpoint_steps() or process.poll() is not None, "a checkpoint", log)
    ranks = ranks_of(process.pid)
    assert sorted(ranks) == [0, 1], log.read_text()
    if how == "killed rank":
        os.kill(ranks[1], signal.SIGKILL)
        killed_at = time.monotonic()
        said = "error: rank 1: its process has ended"
        wait_for(lambda: said in log.read_text() or process.poll() is not None, "the message", log)
        assert said in log.read_text()
        assert time.monotonic() - killed_at < SOON_S
    else:
        os.kill(*((ranks[1], signal.SIGSTOP) if how == "hung rank" else (process.pid, signal.SIGTERM)))
    assert process.wait(LIMIT_S) != 0
    for pid in ranks.values():
        wait_for(lambda pid=pid: is_gone(pid), f"the end of process {pid}", log)
    text = " ".join(log.read_text().split())
    if how == "killed rank":
        assert time.monotonic() - killed_at < SOON_S
        assert re.search(r"error: rank 1: its process has ended .*, noticed at most \S+ s later", text)
        (told,) = [each.state for each in examine(run).ranks if not each.is_alive]
        found = re.search(r", noticed at most (\S+) s later; the run ended at most (\S+) s later", told)
        assert found, told
        noticed_s, ended_s = map(float, found.groups())
        assert 0 <= noticed_s < NOTICED_S
        assert noticed_s <= ended_s < SOON_S
    elif how == "hung rank":
        limit = rf"\(learner\.rank_timeout_s = {HUNG_S}\)"
        told = rf"error: gave up after {HUNG_S} s: 2 ranks execute \w+ {limit}; rank 1: no sign of life for \d+ s \("
        assert re.search(told, text), text
    else:
        assert "Stopping: saving step" in text
    assert examine(run).ledger.missing == 0
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["quickstart"]
    last = run.checkpoint_steps()[-1]
    train_here("--resume", run.path, f"trainer.total_steps={last + 1}")
    check_books(run.path, last + 1)
    steps = metrics(run.path, "train")
    assert steps[-1]["step"] == last + 1
    train_here(*SMALL, f"run.root={tmp_path / 'alone'}", "trainer.total_steps=1")
    first = metrics(tmp_path / "alone" / "quickstart", "train")[0]
    assert steps[0]["actor/loss"] == pytest.approx(first["actor/loss"], rel=1e-2, abs=1e-4)
    assert steps[0]["reward/mean"] == first["reward/mean"]


def assert_same_metrics(run: Path, other: Path, *, rel: float) -> None:
    for ours, theirs in zip(metrics(run, "train"), metrics(other, "train"), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=rel, abs=1e-6), f"{key} of step {ours['step']}"


def test_the_command_takes_the_same_step_on_two_ranks(tmp_path):
    settings = [
        *SMALL, "trainer.total_steps=1", "trainer.checkpoint_every_steps=1", "eval.before=false", "eval.after=false",
    ]  # fmt: skip
    run, alone = tmp_path / "quickstart", tmp_path / "alone" / "quickstart"
    profile = ("trainer.profile.steps=[1]", "trainer.profile.ranks=[1]")
    train_on_two(run, *settings, *profile, f"run.root={tmp_path}")
    train_here(*settings, f"run.root={tmp_path / 'alone'}")
    assert_same_metrics(run, alone, rel=1e-5)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["alone", "quickstart"], "rank 0 alone writes a run"
    assert len(list((run / "checkpoints" / "step_000001" / "train").glob("shard_*_of_00002.safetensors"))) == 2
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "step_000001_rank_1.json.gz", "the profile of the chosen rank"
    events = {each.get("name", "") for each in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in events
    assert any("all_gather" in name for name in events), "FSDP gathers the shards"


@pytest.mark.slow
def test_a_run_continues_on_another_number_of_ranks(tmp_path):
    run = tmp_path / "quickstart"
    done = subprocess.run(
        torchrun("-m", "headwater", "train", *SMALL, f"run.root={tmp_path}", "trainer.total_steps=1"),
        cwd=ROOT, env=environment_of_ranks(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    train_here("--resume", run, "trainer.total_steps=2")
    train_on_two(run, "--resume", run, "trainer.total_steps=3")
    assert [each["step"] for each in metrics(run, "train")] == [1, 2, 3]
    assert [each.name for each in tmp_path.iterdir()] == ["quickstart"]
    train_here(*SMALL, f"run.root={tmp_path / 'alone'}", "trainer.total_steps=3")
    assert_same_metrics(run, tmp_path / "alone" / "quickstart", rel=1e-3)


@pytest.mark.slow
def test_the_quickstart_learns_on_two_ranks(tmp_path):
    run, steps = tmp_path / "quickstart", ("trainer.total_steps=20", "eval.every_steps=20")
    train_on_two(run, "quickstart", *steps, f"run.root={tmp_path}", limit_s=2 * LIMIT_S)
    first, last = (each["reward/mean"] for each in metrics(run, "eval"))
    assert first < 0.3
    assert last > 0.6


def test_settings_that_do_not_fit_the_ranks_are_refused():
    from headwater.cluster.torchrun import check_ranks
    from headwater.config.load import load_config
    from headwater.core.errors import ConfigError

    config = load_config(two_ranks.RECIPE, [*COMMON, "trainer.num_prompts_per_step=4"]).config
    check_ranks(config, 4 * config.rollout.num_samples_per_prompt)
    with pytest.raises(ConfigError, match=r"trainer\.num_prompts_per_step = 4: .* fewer than 1000 ranks; raise it"):
        check_ranks(config, 1000)
    paired = replace(config, learner=replace(config.learner, context_parallel=2))
    check_ranks(paired, 8 * config.rollout.num_samples_per_prompt)
    for num_ranks in (1, 3):
        with pytest.raises(
            ConfigError, match=r"learner\.context_parallel = 2: .* ranks? cannot form groups of 2; start"
        ):
            check_ranks(paired, num_ranks)
