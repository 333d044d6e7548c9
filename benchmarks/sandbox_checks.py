"""Checks of small programs per second: in the sandbox, and as a new interpreter for each.

    python benchmarks/sandbox_checks.py --out benchmarks/results/sandbox_checks.json

`run` is a program that checks one assertion. `tests` is a function and its tests, in two processes. `piece` is a line
of code in a session. `interpreter` is `python -c` with the same program, without isolation. `isolated interpreter` is
the same under bubblewrap, which is what a sandbox without warm processes costs. Concurrency is the number of programs
at a time; the processor time includes all processes and is more stable than the wall time on a busy machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.config.rollout_schema import SandboxConfig
from headwater.sandbox import Sandbox

CODE = "assert sorted([3, 1, 2]) == [1, 2, 3]"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--checks", type=int, default=200, help="programs per measurement (default 200)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 8], help="programs at a time")
    parser.add_argument("--sessions", type=int, default=200, help="open sessions whose memory is measured")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    bare = ([sys.executable, "-c", CODE], [sys.executable, "-I", "-S", "-c", CODE])
    for width in args.concurrency:
        for isolation in ("bubblewrap", "namespaces"):
            with Sandbox(SandboxConfig(isolation=isolation, max_concurrent=width)) as sandbox:
                sandbox.start()
                measure(results, f"{isolation} run", width, args.checks, lambda: expect_ok(sandbox.run(CODE)))
                tests = lambda: expect_ok(sandbox.run_tests("def f(x): return 2 * x", "assert f(2) == 4"))  # noqa: E731
                measure(results, f"{isolation} tests", width, args.checks, tests)
        measure(results, "interpreter", width, args.checks, lambda: subprocess.run(bare[0], check=True))
        measure(results, "interpreter without site", width, args.checks, lambda: subprocess.run(bare[1], check=True))
        if bwrap := shutil.which("bwrap"):
            isolated = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", *bare[0]]
            measure(results, "isolated interpreter", width, args.checks, lambda: subprocess.run(isolated, check=True))
    results["session"] = asyncio.run(measure_sessions(args.sessions, args.checks))
    print(results["session"])
    write_record(args.out, torch.device("cpu"), cores=os.cpu_count(), results=results)


def expect_ok(outcome: Any) -> None:
    assert outcome.status == "ok", outcome


def measure(results: dict[str, Any], name: str, width: int, num_checks: int, check: Callable[[], object]) -> None:
    times: list[float] = []

    def timed(_: int) -> None:
        began = time.perf_counter()
        check()
        times.append(1000 * (time.perf_counter() - began))

    timed(0)
    times.clear()
    busy_s, began = machine_busy_s(), time.perf_counter()
    with ThreadPoolExecutor(width) as threads:
        list(threads.map(timed, range(num_checks)))
    seconds = time.perf_counter() - began
    record = {
        "per_second": round(num_checks / seconds, 1),
        "median_ms": round(statistics.median(times), 2),
        "least_ms": round(min(times), 2),
        "machine_cpu_ms": round(1000 * (machine_busy_s() - busy_s) / num_checks, 2),
    }
    results.setdefault(name, {})[str(width)] = record
    print(f"{name:28} {width} at a time: {record}", flush=True)


def machine_busy_s() -> float:
    """Processor time of the whole machine: what cells use is in no process's account of its children."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


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
