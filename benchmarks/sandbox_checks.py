"""Checks of small programs per second: in the sandbox, and as a new interpreter for each.

    python benchmarks/sandbox_checks.py --out benchmarks/results/sandbox_checks.json

`run` is a program that checks one assertion. `tests` is a function and its tests, in two processes. `piece` is a line
of code in a session. `interpreter` is `python -c` with the same program, without isolation. `isolated interpreter` is
the same under bubblewrap, which is what a sandbox without warm processes costs. Concurrency is the number of programs
at a time. The processor time is that of all processes, with the start of the sandbox; it depends less on what else the
machine does. That of the isolated interpreter is not known: bubblewrap does not wait for its processes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from options import parser_of
from record import write_record

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox import Outcome, Sandbox, SandboxUnavailable

CODE = "assert sorted([3, 1, 2]) == [1, 2, 3]"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--checks", type=int, default=200, help="programs per measurement (default 200)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 8], help="programs at a time")
    parser.add_argument("--sessions", type=int, default=200, help="open sessions whose memory is measured")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    bare = [sys.executable, "-c", CODE]
    commands = {"interpreter": bare, "interpreter without site": [sys.executable, "-I", "-S", "-c", CODE]}
    if bwrap := shutil.which("bwrap"):
        isolate = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        commands["isolated interpreter"] = [*isolate, *bare]
    isolations = [each for each in ("bubblewrap", "namespaces") if works(each)]
    for width in args.concurrency:
        for isolation in isolations:
            for kind, check in (("run", run), ("tests", run_tests)):
                sandbox = Sandbox(SandboxConfig(isolation=isolation, max_concurrent=width))
                with measured(results, f"{isolation} {kind}", width, args.checks) as measure, sandbox:
                    measure(partial(check, sandbox))
        for name, command in commands.items():
            with measured(results, name, width, args.checks) as measure:
                measure(partial(subprocess.run, command, check=True))
    if isolations:
        results["session"] = asyncio.run(measure_sessions(args.sessions, args.checks))
        print(results["session"])
    write_record(args.out, torch.device("cpu"), cores=os.cpu_count(), results=results)


def works(isolation: Literal["bubblewrap", "namespaces"]) -> bool:
    """Whether this machine has this isolation; the rows of the others are left out."""
    try:
        with Sandbox(SandboxConfig(isolation=isolation)) as sandbox:
            sandbox.start()
    except SandboxUnavailable as error:
        print(f"{isolation} is not measured, because it does not work here: {error}", file=sys.stderr)
        return False
    return True


def run(sandbox: Sandbox) -> None:
    expect_ok(sandbox.run(CODE))


def run_tests(sandbox: Sandbox) -> None:
    expect_ok(sandbox.run_tests("def f(x): return 2 * x", "assert f(2) == 4"))


def expect_ok(outcome: Outcome) -> None:
    assert outcome.status == "ok", outcome


@contextmanager
def measured(
    results: dict[str, Any], name: str, width: int, num_checks: int
) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Give a function that times a check. The processor time is known when all processes have ended."""
    record: dict[str, float] = {}
    times: list[float] = []

    def measure(check: Callable[[], object]) -> None:
        def timed(_: int) -> None:
            began = time.perf_counter()
            check()
            times.append(1000 * (time.perf_counter() - began))

        timed(0)
        times.clear()
        began = time.perf_counter()
        with ThreadPoolExecutor(width) as threads:
            list(threads.map(timed, range(num_checks)))
        record["per_second"] = round(num_checks / (time.perf_counter() - began), 1)
        record["median_ms"] = round(statistics.median(times), 2)
        record["least_ms"] = round(min(times), 2)

    before_s = processor_s()
    yield measure
    if name != "isolated interpreter":
        record["processor_ms"] = round(1000 * (processor_s() - before_s) / (num_checks + 1), 2)
    results.setdefault(name, {})[str(width)] = record
    print(f"{name:28} {width} at a time: {record}", flush=True)


def processor_s() -> float:
    """Processor time of this process and of all its descendants that have ended."""
    usages = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages)


async def measure_sessions(num_sessions: int, num_pieces: int) -> dict[str, float]:
    """Time of one piece of code, and memory of a session that waits."""
    with Sandbox(SandboxConfig()) as sandbox:
        async with sandbox.session() as session:
            await session.run("x = 0")
            began = time.perf_counter()
            for _ in range(num_pieces):
                expect_ok(await session.run("x += 1"))
            piece_ms = 1000 * (time.perf_counter() - began) / num_pieces
        before = available_mib()
        sessions = [sandbox.session() for _ in range(num_sessions)]
        await asyncio.gather(*(each.run("x = 1") for each in sessions))
        used = before - available_mib()
        for each in sessions:
            each.close()
    return {"piece_ms": round(piece_ms, 2), "sessions": num_sessions, "mib_per_session": round(used / num_sessions, 2)}


def available_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


if __name__ == "__main__":
    main()
