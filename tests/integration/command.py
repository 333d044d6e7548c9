"""The command line, in this process or in a separate one."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
import torch
from processes import is_running
from safetensors.torch import load_file

from headwater.cli.main import main
from headwater.trainer import summary
from headwater.trainer.recorder import Recorder

ROOT = Path(__file__).parents[2]

CUT_DOWN = [
    "warm_start.num_steps=0", "warm_start.until_reward=0", "trainer.total_steps=2",
    "trainer.num_prompts_per_step=4", "rollout.num_samples_per_prompt=2", "data.num_train_rows=50",
    "data.num_eval_rows=10", "eval.num_prompts=10", "eval.every_steps=0",
    "reward.function=tests/integration/varied_reward.py:compute_score",
]  # fmt: skip
"""Settings that shorten a recipe to seconds, with a reward under which every step changes the weights."""

PROCESS_LIMIT_S = 600.0
"""Generous: tests share the machine with other work."""

SMALL = ["quickstart", *CUT_DOWN]


def python_of(name: str) -> tuple[Path, bool]:
    """The interpreter of an environment that ``make setup-NAME`` makes, and whether everything is installed there.

    The interpreter exists before the packages do, so the Makefile's stamp decides. An interpreter that
    HEADWATER_NAME_PYTHON names is used as it is.
    """
    if told := os.environ.get(f"HEADWATER_{name.upper()}_PYTHON"):
        return Path(told), Path(told).exists()
    folder = ROOT / f".venv-{name}"
    return folder / "bin" / "python", (folder / ".installed").exists()


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


def headwater(*arguments: object, draws: bool = False) -> Result:
    """Run the command in this process, which saves the seconds that importing torch takes in a new one.

    Without ``draws``, no reward curve is drawn, which takes a quarter of the time of a small run.
    """
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.MonkeyPatch.context() as patch,
    ):
        if not draws:
            patch.setattr(summary, "draw_reward_curve", lambda *arguments: None)
        try:
            code = main([*map(str, arguments)])
        except SystemExit as end:  # argparse ends --help and usage errors this way
            code = end.code if isinstance(end.code, int) else 1
    return Result(code, output.getvalue(), errors.getvalue())


def start_headwater(*arguments: object) -> forked.Forked:
    """Start the command as a separate process, which the caller must wait for."""
    return forked.popen("-m", "headwater", *arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def headwater_process(*arguments: object) -> Result:
    """Run the command as a user does: in a separate process."""
    process = start_headwater(*arguments)
    try:
        output, errors = process.communicate(timeout=PROCESS_LIMIT_S)
    finally:
        process.kill()
    return Result(process.returncode, output, errors)


@contextlib.contextmanager
def after_step(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Runs in this process call ``action`` when they have recorded ``step``, before they continue."""
    record = Recorder.step

    def record_and_act(self: Recorder, done: int, *arguments: object, **keywords: object) -> None:
        record(self, done, *arguments, **keywords)
        if done == step:
            self.flush()  # records are written in the background
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "step", record_and_act)
        yield


def send(number: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def children(pid: int) -> list[int]:
    """The engine processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[1]) == pid and b"serve" in command.split(b"\0"):
            found.append(int(stat.parent.name))
    return found


def is_gone(pid: int) -> bool:
    return not is_running(pid)


SIGNALLED = """
import os, sys
sys.path.insert(0, "tests/integration")
from command import after_step, children, main, send

def act():
    print("children:", *children(os.getpid()), flush=True)
    send(int(sys.argv[2]))

with after_step(int(sys.argv[1]), act):
    sys.exit(main(sys.argv[3:]))
"""


def signalled_process(step: int, number: int, *arguments: object) -> Result:
    """Run the command in a separate process that sends itself a signal when it has recorded ``step``.

    Before the signal, it prints the ids of its engine processes after ``children:``.
    """
    done = forked.run("-c", SIGNALLED, step, int(number), *arguments, cwd=ROOT, timeout=PROCESS_LIMIT_S)
    return Result(done.returncode, done.stdout, done.stderr)


def train_small(root: Path, *arguments: object, draws: bool = False) -> Result:
    return headwater("train", *SMALL, f"run.root={root}", *arguments, draws=draws)


def train_here(*arguments: object) -> None:
    result = headwater("train", *arguments)
    assert result.code == 0, result.stderr


ON_TWO_RANKS = """
import sys
from integration.two_ranks import fork_ranks
from headwater.cli.main import main
fork_ranks(lambda: main(sys.argv[1:]))
"""
"""The command as torchrun starts it, without the processor time of torchrun and of two more imports of torch."""


def environment_of_ranks() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}


def train_on_two(run: Path, *arguments: object, limit_s: float = PROCESS_LIMIT_S) -> None:
    """Train on two ranks. ``run`` is the directory of the run."""
    environment = environment_of_ranks()
    done = forked.run("-c", ON_TWO_RANKS, "train", *arguments, cwd=ROOT, env=environment, timeout=limit_s)
    assert json.loads((run / "status.json").read_text())["state"] == "finished", done.stderr[-3000:]


def warm_quickstart(factory: pytest.TempPathFactory) -> Path:
    """A model after the supervised start of the quickstart, trained once for all test processes.

    It takes longer than the 20 steps in which the quickstart then learns.
    """
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm"
    root.mkdir(exist_ok=True)
    model = root / "quickstart" / "checkpoints" / "step_000001" / "model"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.exists():
            evaluation = ("eval.before=false", "eval.after=false")
            train_here("quickstart", f"run.root={root}", "trainer.total_steps=1", *evaluation)
    return model


def metrics(run: Path, kind: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    # A run that is still going may be writing the last one.
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == kind]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def different_files(run: Path, other: Path, step: int) -> list[str]:
    """The files of a checkpoint that two runs do not have alike: exported model, weights and averages of the policy and
    the critic on every rank, position in the data. The manifest, which lists them, is left out."""
    folders = [each / "checkpoints" / f"step_{step:06d}" for each in (run, other)]
    contents = [
        {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in folders
    ]
    names = {name for content in contents for name in content} - {"manifest.json"}
    return sorted(name for name in names if contents[0].get(name) != contents[1].get(name))


def same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
