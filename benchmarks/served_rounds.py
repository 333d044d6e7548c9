"""What it costs to pass generated tokens from the engine's process to this one, per round of 1,024 rows x 8 tokens.

    python benchmarks/served_rounds.py                                   # this source tree
    git worktree add /tmp/old dc5259c
    python benchmarks/served_rounds.py --before /tmp/old/src --out results/served_rounds.json

The engine runs as in a disaggregated run: ``headwater serve`` as a child process, with real requests and a tiny model.
Measured is processor time, so other programs on the machine change it little:

- ``child_engine``: the engine's thread while it reads the output of a round and passes it on, without waiting for the
  device.
- ``child_server``: the event loop of the child, which sends.
- ``parent``: the event loop of this process, which receives.

The values are taken while all rows generate, so starting and ending requests are left out. ``embedded_engine`` is the
same thread as ``child_engine`` in an engine of this process, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import parser_of
from record import write_record

from headwater.backends.native import places
from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer, engine_arguments
from headwater.config.schema import EngineConfig
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.engine import Engine
from headwater.engine.loop import EngineLoop
from headwater.engine.runners.plain import Output
from headwater.observe.spans import Spans

MODEL = "tiny:qwen3"
STEPS = 8
NUM_BEFORE = 3
"""Rounds before the first and after the last one that is measured."""
ROWS = "HEADWATER_BENCHMARK_ROWS"
CLOCK_FILE = "HEADWATER_BENCHMARK_CLOCK"
"""Where the child writes its clock; the name of an environment variable."""


def main() -> None:
    if CLOCK_FILE in os.environ and sys.argv[1:2] == ["serve"]:
        return _serve()
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, help="the src folder of an older source tree, measured as well")
    parser.add_argument("--rows", type=int, default=1024, help="requests that run at once (default 1024)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds that are measured (default 24)")
    parser.add_argument("--one-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_side:
        print(json.dumps(_measure(options.rows, options.rounds)), flush=True)
        return None
    here = Path(__file__).parents[1] / "src"
    sides = ([("before", options.before)] if options.before else []) + [("now", here)]
    results = {name: _in_tree(source, options) for name, source in sides}
    for name, result in results.items():
        cost = result["ms_per_round"]
        shown = ", ".join(f"{part} {value:.2f}" for part, value in cost.items())
        print(f"{name:<7} {shown} ms per round of {options.rows} x {STEPS} tokens; {result['tokens_per_s']:,.0f} tok/s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_record(options.out, device, rows=options.rows, steps=STEPS, **results)
    return None


def _in_tree(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the code in ``source``, in a process that imports it."""
    command = [sys.executable, __file__, "--one-side"]
    command += [f"--rows={options.rows}", f"--rounds={options.rounds}"]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _serve() -> None:
    """The child: ``headwater serve`` with a clock in its engine's thread."""
    from headwater.cli.main import main as command

    _install_clock(np.memmap(os.environ[CLOCK_FILE], np.float64, "r+", shape=(2,)), int(os.environ[ROWS]))
    sys.exit(command())


def _install_clock(clock: Any, num_rows: int) -> None:
    """Add up the processor time that engines take to read full rounds, and count these rounds.

    The wait for the device does not count.
    """
    read, wait, waited = EngineLoop._read, Output.wait, [0.0]

    def timed_wait(self: Output) -> Any:
        start = time.thread_time()
        try:
            return wait(self)
        finally:
            waited[0] += time.thread_time() - start

    def timed_read(self: EngineLoop, queued: Any) -> None:
        before, start, waited[0] = self.throughput.total, time.thread_time(), 0.0
        read(self, queued)
        if self.throughput.total - before == num_rows * STEPS:
            clock[0] += time.thread_time() - start - waited[0]
            clock[1] += 1

    Output.wait, EngineLoop._read = timed_wait, timed_read  # type: ignore[method-assign]


def _measure(num_rows: int, num_rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    config = EngineConfig(max_sequences=num_rows, decode_steps=STEPS, max_queue=4 * num_rows, kv_cache_gib=2.0)
    with tempfile.TemporaryDirectory() as folder:
        clock_file = Path(folder) / "clock"
        clock_file.write_bytes(bytes(16))
        os.environ[CLOCK_FILE], os.environ[ROWS] = str(clock_file), str(num_rows)
        places.SERVE = (sys.executable, __file__, "serve")  # type: ignore[misc]
        clock = np.memmap(clock_file, np.float64, "r", shape=(2,))
        arguments = engine_arguments(config, shares_device=False)
        engine = NativeEngine(OwnServer(MODEL, arguments, dtype), transfer="shared_memory", spans=Spans())
        try:
            parent = engine._thread._thread.native_id
            assert parent is not None
            seconds = {
                "child_engine": lambda: float(clock[0]),
                "child_server": lambda: _thread_s(engine.pid, engine.pid),
                "parent": lambda: _thread_s(os.getpid(), parent),
                "wall": time.perf_counter,
            }
            served = _per_round(engine, num_rows, num_rounds, clock, seconds)
        finally:
            engine.close()
    own_clock = np.zeros(2)
    _install_clock(own_clock, num_rows)
    embedded = Engine.load(MODEL, config, dtype=dtype)
    try:
        spent = _per_round(embedded, num_rows, num_rounds, own_clock, {"engine": lambda: float(own_clock[0])})
    finally:
        embedded.close()
    wall_s = served.pop("wall")
    return {
        "ms_per_round": {name: 1e3 * each for name, each in {**served, "embedded_engine": spent["engine"]}.items()},
        "tokens_per_s": num_rows * STEPS / wall_s,
    }


def _per_round(
    engine: Any, num_rows: int, num_rounds: int, clock: Any, seconds: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """Seconds per round by every clock, while all rows generate."""
    asyncio.run(_generate(engine, num_rows, 2 * STEPS))  # compiles kernels and captures graphs

    async def until(count: float) -> dict[str, float]:
        while clock[1] < count:  # noqa: ASYNC110  the child cannot be awaited
            await asyncio.sleep(0.001)
        return {**{name: read() for name, read in seconds.items()}, "rounds": float(clock[1])}

    async def run() -> dict[str, float]:
        generating = asyncio.create_task(_generate(engine, num_rows, (num_rounds + 3 * NUM_BEFORE) * STEPS))
        started = clock[1]
        first = await until(started + NUM_BEFORE)
        last = await until(first["rounds"] + num_rounds)
        await generating
        return {name: (last[name] - first[name]) / (last["rounds"] - first["rounds"]) for name in seconds}

    return asyncio.run(run())


async def _generate(engine: Any, num_rows: int, num_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    requests = [ModelRequest(f"r{key}", (7, 8, 9, 10), sampling, key) for key in range(num_rows)]
    responses = await asyncio.gather(*(engine.agenerate(each) for each in requests))
    assert {len(each.output_tokens) for each in responses} == {num_tokens}


def _thread_s(process: int, thread: int) -> float:
    """The processor time of a thread."""
    folder = Path(f"/proc/{process}/task/{thread}")
    try:
        return int((folder / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # a kernel without these statistics counts in ticks of 10 ms
        values = (folder / "stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
