"""Runs that are killed with SIGKILL at arbitrary moments and resumed end like a run that was never killed.

Each process kills itself a random time after a random stage of its steps, also while a checkpoint is written in the
background; or a random time after its start, so that the start, the warm start, loading a checkpoint and evaluations
are hit too. With the kills of ``test_ranks_resume.py`` there are fifty.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import forked
import picture_tools
import pytest
from books import check_books, outcomes
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT, different_files

from headwater.data.sampler import ShufflingSampler
from headwater.observe.run_directory import RunDirectory

pytestmark = pytest.mark.flaky(reruns=0)
"""A kill at one moment in a hundred after which a run ends differently is a defect, which a second try would hide."""

NUM_STEPS = 3
COMMON = [
    *CUT_DOWN, f"trainer.total_steps={NUM_STEPS}", "eval.before=false", "eval.after=false",
    "trainer.checkpoint_every_steps=1", "trainer.keep_checkpoints=1", "rollout.max_new_tokens=4",
]  # fmt: skip
EXACT = [*COMMON, "run.deterministic=true"]
ASYNC = ["rollout.max_staleness=2"]
CHILD = ["rollout.placement=disaggregated"]
ODD = "tests/integration/odd_tools.py"
TOOLS = [
    "rollout.workflow=tool_agent", f"tools.use=[{ODD}:fine, {ODD}:raises]", f"tools.parser={ODD}:EveryReply",
    "rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 3}", "rollout.max_new_tokens=64",
    "data.max_prompt_tokens=96",
]  # fmt: skip
"""An untrained model, in whose replies a parser finds calls."""
PPO = ["ppo", *EXACT, "critic.num_warmup_steps=1"]
WARM_START = ["warm_start.num_steps=3", "warm_start.num_sequences_per_step=8"]
EVALUATED = ["eval.before=true", "eval.after=true", "eval.every_steps=2"]
KINDS = {
    "sync": ["quickstart", *EXACT, *EVALUATED],
    "async": ["quickstart", *EXACT, *ASYNC, *WARM_START],
    "critic": ["quickstart", *PPO, *WARM_START],
    "critic async": ["quickstart", *PPO, *ASYNC],
    "tools": ["quickstart", *EXACT, *TOOLS],
    "tools async": ["quickstart", *EXACT, *TOOLS, *ASYNC, *EVALUATED],
    "child critic": ["quickstart", *PPO, *CHILD],
    "child async": ["quickstart", *EXACT, *CHILD, *ASYNC],
    "timing": ["quickstart", *COMMON, *ASYNC],
    "pictures": [*picture_tools.VISION, *EXACT, *picture_tools.TOOLS, *ASYNC],
}
"""``timing`` is not deterministic: there, no prompt may be lost or trained twice."""

DOOMED = """
import os, signal, sys, threading
import headwater.trainer.summary
from headwater.cli.main import main
from headwater.trainer.recorder import Recorder

headwater.trainer.summary.draw_reward_curve = lambda *arguments: None  # it takes longer than a run
stage, left, delay_s = Recorder.stage, int(sys.argv[1]), float(sys.argv[2])

def end_later():
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True  # a process that is done earlier does not wait for it
    timer.start()

def counted(self, name, **args):
    global left
    left -= 1
    if left == 0:
        end_later()
    return stage(self, name, **args)

Recorder.stage = counted
if left == 0 and delay_s:
    end_later()
sys.exit(main(["train", *sys.argv[3:]]))
"""


DONE = f"all {NUM_STEPS} steps are done"


def train(*arguments: object, place: int = 0, delay_s: float = 0.0) -> int:
    """The exit status of a process that kills itself ``delay_s`` after its stage number ``place``, or after its start
    if that is 0. If both are 0, it does not."""
    done = forked.run("-c", DOOMED, place, delay_s, *arguments, cwd=ROOT, timeout=PROCESS_LIMIT_S)
    if done.returncode == 2 and DONE in done.stderr:  # it was killed when its last step was saved
        return done.returncode
    assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
    return done.returncode


def timeless(run: Path) -> list[dict]:
    """The valid metrics, without measurements of time and memory."""
    left_out = ("time", "throughput", "timing", "memory", "perf", "engine", "host", "gpu", "rollout/", "mfu")
    left_out += ("ranks/memory",)
    return [
        {name: value for name, value in each.items() if not name.startswith(left_out)}
        for each in RunDirectory(run).read_metrics()
    ]


def check_equal(run: Path, whole: Path, num_steps: int) -> None:
    """The runs end with the same last checkpoint, byte for byte, and have the same metrics and outcomes of prompts."""
    assert different_files(run, whole, num_steps) == []
    assert timeless(run) == timeless(whole)
    assert outcomes(run) == outcomes(whole)


def drawn_kill(draw: random.Random, whole_s: float) -> dict[str, float]:
    """When to kill a process: after one of its stages, or, if the duration of a run is known, in any second of it."""
    if whole_s and draw.random() < 0.4:
        return {"place": 0, "delay_s": 0.01 + draw.random() * whole_s}
    return {"place": draw.randint(1, 5 * NUM_STEPS), "delay_s": draw.random() * 0.1}


def start_of(run: Path, settings: list[str]) -> list[object]:
    """The arguments that begin the run or, if it has begun, resume it."""
    if (run / "config.yaml").exists():
        return ["--resume", run]
    shutil.rmtree(run, ignore_errors=True)  # killed before it had a config: there is nothing to resume
    return [*settings, f"run.root={run.parent}", f"run.name={run.name}"]


def killed_and_resumed(kind: str, root: Path, num_kills: int, seed: int) -> int:
    """Kill a run of this kind ``num_kills`` times, beginning again when it is complete. Compare every complete run."""
    draw = random.Random(f"{kind} {seed}")
    is_exact, whole_s = kind != "timing", 0.0
    if is_exact:
        began = time.monotonic()
        assert train(*start_of(root / "whole", KINDS[kind])) == 0
        whole_s = time.monotonic() - began
    num_done, number, run = 0, 0, root / "killed-0"
    while True:
        kill = drawn_kill(draw, whole_s) if num_done < num_kills else {}
        code = train(*start_of(run, KINDS[kind]), **kill)
        num_done += code == -signal.SIGKILL
        if code == 0:
            assert not list((run / "checkpoints").glob(".*")), "nothing incomplete is left"
        if code != -signal.SIGKILL:
            if is_exact:
                check_equal(run, root / "whole", NUM_STEPS)
            check_books(run, NUM_STEPS)
            number += 1
            run = root / f"killed-{number}"
            if num_done >= num_kills:
                return num_done


def test_the_check_finds_prompts_that_are_lost_or_trained_twice(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {seed: 0}\ntrainer: {num_prompts_per_step: 2}\ndata: {num_train_rows: 50}\n"
    )
    draws = [(draw.index, draw.epoch) for draw in ShufflingSampler(num_rows=50, seed=0).take(9)]

    def check(places: list[int]) -> None:
        """Of a run of three steps whose dispatches have the draws of these places."""
        trained = [{"id": id, "index": draws[at][0], "epoch": draws[at][1]} for id, at in enumerate(places)]
        lines = [
            {
                "kind": "step", "step": step, "trained": trained[2 * step - 2 : 2 * step], "dropped": [],
                "counts": {"dispatched": 2 * step, "trained": 2 * step, "dropped": 0, "buffered": 0, "in_flight": 0},
            }
            for step in (1, 2, 3)
        ]  # fmt: skip
        (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        check_books(tmp_path, num_steps=3)

    check([0, 1, 2, 3, 4, 5])
    for wrong in ([0, 1, 3, 4, 5, 6], [0, 1, 2, 2, 3, 4]):
        with pytest.raises(AssertionError):
            check(wrong)


def test_a_killed_run_ends_bitwise_equal(tmp_path):
    assert killed_and_resumed("critic async", tmp_path, num_kills=1, seed=0) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thirty_eight_kills(tmp_path):
    counts = {
        "sync": 6, "async": 5, "critic": 5, "critic async": 5, "tools": 4, "tools async": 5, "child critic": 2,
        "child async": 2, "timing": 4,
    }  # fmt: skip
    done = {}
    for kind, num_kills in counts.items():
        (root := tmp_path / kind.replace(" ", "-")).mkdir()
        done[kind] = killed_and_resumed(kind, root, num_kills, seed=1)
    assert done == counts
    assert sum(done.values()) == 38
