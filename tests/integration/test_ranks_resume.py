"""Runs on two ranks that are killed with SIGKILL at arbitrary moments, and resumed, end like one that never was.

The ranks are started as torchrun does, but forked from a process that has imported everything.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import forked
import pytest
from books import check_books
from command import CUT_DOWN, PROCESS_LIMIT_S, ROOT
from test_kill import ASYNC, CHILD, TOOLS, check_equal, start_of

pytestmark = pytest.mark.flaky(reruns=0)
"""As in ``test_kill.py``."""

NUM_STEPS = 3
SETTINGS = [
    "quickstart", *CUT_DOWN, f"trainer.total_steps={NUM_STEPS}", "eval.before=false", "eval.after=false",
    "trainer.checkpoint_every_steps=1", "rollout.max_new_tokens=4",
]  # fmt: skip
DONE = f"all {NUM_STEPS} steps are done"
EXACT = [*SETTINGS, "run.deterministic=true"]
KINDS = {
    "child async": [*EXACT, *CHILD, "rollout.max_staleness=1"],
    "critic": [*EXACT[:1], "ppo", *EXACT[1:], "critic.num_warmup_steps=1", "eval.before=true"],
    "tools": [*EXACT, *TOOLS, "warm_start.num_steps=2", "warm_start.num_sequences_per_step=8"],
    "timing": [*SETTINGS, *ASYNC],
}
"""``timing`` depends on the order in which groups end: there, no prompt may be lost or trained twice."""
REFUSED_S = 60.0
"""How long a rank may continue after the other one has ended with an error. Rank 1 would wait half an hour for a rank 0
that has refused its settings, because the launcher, which would end it, is not part of this test."""
VICTIMS = ("rank 0", "rank 1", "both")
"""Both are killed at any moment, as with their machine. One alone is killed in a step: before that, the launcher ends
the others."""

FORKING = """
import math, os, signal, sys, threading, time
from ports import free_port
from headwater.cli.main import main
from headwater.trainer.recorder import Recorder
import headwater.trainer.loop, headwater.cluster.torchrun, headwater.learner.learner, headwater.engine.engine

def doomed(place, delay_s, kill):
    stage, left = Recorder.stage, [place]
    def counted(self, name, **args):
        left[0] -= 1
        if left[0] == 0:
            later(delay_s, kill)
        return stage(self, name, **args)
    Recorder.stage = counted
    if place == 0:
        later(delay_s, kill)

def later(delay_s, kill):
    timer = threading.Timer(delay_s, kill)
    timer.daemon = True
    timer.start()

def rank_of(number, port, arguments, prepare):
    pid = os.fork()
    if pid == 0:
        output = os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        os.environ |= {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        prepare()
        code = main(arguments)
        sys.stdout.flush()
        os._exit(code)
    return pid

def codes_of(pids):
    codes, deadline = {}, math.inf
    while len(codes) < len(pids):
        time.sleep(0.01)
        for pid in pids - codes.keys():
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] > 0:
                    deadline = min(deadline, time.monotonic() + float(os.environ["REFUSED_S"]))
    return codes

for line in sys.stdin:
    place, delay_s, victim, *arguments = line.rstrip("\\n").split("\\t")
    port = free_port()
    other = rank_of(1, port, arguments, lambda: None)
    def kill():
        if victim != "rank 0":
            os.kill(other, signal.SIGKILL)
        if victim != "rank 1":
            os.kill(os.getpid(), signal.SIGKILL)
    first = rank_of(0, port, arguments, lambda: doomed(int(place), float(delay_s), kill) if float(delay_s) else None)
    codes = codes_of({first, other})
    print(codes[first], codes[other], flush=True)
"""


class Ranks:
    """Runs the command on two ranks again and again."""

    def __init__(self, log: Path, refused_s: float = REFUSED_S) -> None:
        self.log = log
        environment = {
            **os.environ,
            "LOG": str(log),
            "REFUSED_S": str(refused_s),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests/unit",
        }
        self._server = forked.popen(
            "-c", FORKING, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(
        self,
        *arguments: object,
        place: int = 0,
        delay_s: float = 0.0,
        victim: str = "both",
        command: str = "train",
    ) -> list[int]:
        """The exit statuses. The victim is killed ``delay_s`` after stage number ``place`` of the run, or after its
        start if that is 0. If both are 0, nothing is killed."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write("\t".join([str(place), str(delay_s), victim, command, *map(str, arguments)]) + "\n")
        self._server.stdin.flush()
        return [int(each) for each in self._server.stdout.readline().split()]

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(PROCESS_LIMIT_S)


def is_balanced(run: Path) -> bool:
    counts = json.loads((run / "status.json").read_text())["ledger"]
    return counts["dispatched"] == sum(counts[name] for name in ("trained", "dropped", "buffered", "in_flight"))


def killed_and_resumed(ranks: Ranks, kind: str, root: Path, draw: random.Random) -> list[str]:
    """Kill each of the victims once, beginning again when the run is complete. Compare every complete run."""
    whole, is_exact, whole_s = root / f"{kind}-whole", kind != "timing", 0.0
    if is_exact:
        began = time.monotonic()
        assert ranks(*start_of(whole, KINDS[kind])) == [0, 0], ranks.log.read_text()[-3000:]
        whole_s = time.monotonic() - began
    number, killed = 0, []
    while True:
        run = root / f"{kind}-{number}"
        victim = VICTIMS[len(killed)] if len(killed) < len(VICTIMS) else ""
        place, delay_s = draw.randint(3, 9), 0.01 + draw.random() * 0.2
        if victim == "both" and is_exact:
            place, delay_s = 0, 0.01 + draw.random() * whole_s
        if not victim:
            place, delay_s = 0, 0.0
        num_before = len(ranks.log.read_text())
        codes = ranks(*start_of(run, KINDS[kind]), place=place, delay_s=delay_s, victim=victim)
        said = ranks.log.read_text()[num_before:]
        if DONE in said:  # it was killed when its last step was saved
            codes = [0, 0]
        assert victim or codes == [0, 0], said[-3000:]
        assert all(code in (0, 2, -signal.SIGKILL) for code in codes), said[-3000:]
        if codes == [2, -signal.SIGKILL]:
            assert "rank 1: its process has ended" in said, said[-3000:]
            assert is_balanced(run), "what was dispatched when the rank ended is counted"
        if codes != [0, 0]:
            assert -signal.SIGKILL in codes, said[-3000:]  # not ended by itself, for example by a refusal
            killed.append(victim)
            continue
        check_books(run, NUM_STEPS)
        assert is_balanced(run)
        if is_exact:
            check_equal(run, whole, NUM_STEPS)
        number += 1
        if not victim:
            return killed


@pytest.mark.slow
def test_settings_that_rank_0_refuses_end_both_ranks(tmp_path):
    ranks = Ranks(tmp_path / "log", refused_s=0.5)
    try:
        assert ranks("quickstart", f"run.root={tmp_path}", "learner.context_parallel=3") == [2, -signal.SIGKILL]
    finally:
        ranks.close()
    assert "learner.context_parallel = 3: 2 ranks cannot form groups of 3" in " ".join(ranks.log.read_text().split())


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_runs_on_two_ranks_that_are_killed_end_bitwise_equal(tmp_path):
    ranks = Ranks(tmp_path / "log")
    draw = random.Random(17)
    try:
        killed = {kind: killed_and_resumed(ranks, kind, tmp_path, draw) for kind in KINDS}
    finally:
        ranks.close()
    assert sum(map(len, killed.values())) == 12, killed
