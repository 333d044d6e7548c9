"""Comparing mathematical answers in a process that can be killed.

Symbolic comparison may never end: a model only has to write ``9^{9^{9^9}}``. ``verify`` therefore asks a separate
process (``verifier_process.py``) and always returns within a limit. An answer that exceeds it is not a failure of the
reward but an answer that cannot be verified; the result says so.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

from headwater.core.errors import RewardFailed
from headwater.rewards.answers import differ_in_kind, same_text, tidy, whole_number

Verdict = Literal["right", "wrong", "too_long", "timed_out", "out_of_memory", "error"]
"""The last four are answers that could not be compared."""

UNVERIFIED: frozenset[Verdict] = frozenset({"too_long", "timed_out", "out_of_memory", "error"})

MAX_ANSWER_CHARACTERS = 1000
"""Longer answers are not compared: their length alone makes parsing slow."""
START_LIMIT_S = 120.0
WALL_FACTOR = 10.0
"""How much longer than its processor time one comparison may take on a busy machine."""


def verify(truth: str, answer: str, *, cpu_s: float) -> Verdict:
    """Whether ``answer`` equals ``truth`` mathematically. ``cpu_s`` limits the processor time of the comparison."""
    if same_text(truth, answer):
        return "right"
    numbers = whole_number(truth), whole_number(answer)
    if None not in numbers:
        return "right" if numbers[0] == numbers[1] else "wrong"
    if differ_in_kind(truth, answer):
        return "wrong"
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return "too_long"
    return _process_of(os.getpid()).verify(tidy(truth), tidy(answer), cpu_s)


@lru_cache(maxsize=1)
def _process_of(pid: int) -> VerifierProcess:
    """The verifier of this process. A forked process starts its own."""
    return VerifierProcess()


class VerifierProcess:
    """A process that compares answers, one at a time. It is started by the first call and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def verify(self, truth: str, answer: str, cpu_s: float) -> Verdict:
        request = {"truth": truth, "answer": answer, "cpu_s": cpu_s, "wall_s": cpu_s * WALL_FACTOR}
        with self._lock:
            try:
                process = self._started()
                _send(process, request)
                reply = _receive(process, cpu_s * WALL_FACTOR + START_LIMIT_S)
            except BaseException:
                self._end()  # what is in the pipes no longer belongs to the next request
                raise
        verdict: Verdict = reply["verdict"]
        return verdict

    def close(self) -> None:
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                # By its path and without the folder of this file (-P): it starts faster if it imports nothing of ours.
                [sys.executable, "-P", str(Path(__file__).with_name("verifier_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Comparisons iterate over sets: with one order of hashes, the same answers get the same verdict.
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            )
            ready = _receive(self._process, START_LIMIT_S)
            if "failed" in ready:
                raise RewardFailed(ready["failed"])
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait()
            self._process = None


def _send(process: subprocess.Popen[bytes], request: dict[str, object]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise RewardFailed(f"the process that compares answers ended with code {process.wait()}") from error


def _receive(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    line = _read_line(process.stdout, limit_s)
    if line is None:
        raise RewardFailed(f"the process that compares answers did not reply within {limit_s:g} s")
    if not line.endswith(b"\n"):
        raise RewardFailed(f"the process that compares answers ended with code {process.wait()}")
    reply: dict[str, Any] = json.loads(line)
    return reply


def _read_line(pipe: IO[bytes], limit_s: float) -> bytes | None:
    """A line, or what came before the pipe was closed; None if the limit passed."""
    until, received = time.monotonic() + limit_s, b""
    while not received.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(until - time.monotonic(), 0.0))
        if not readable:
            return None
        piece = os.read(pipe.fileno(), 65536)
        if not piece:
            break
        received += piece
    return received
