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

Each value is the difference between long and short responses, divided by the rounds in between, so that starting and
ending requests are left out. ``embedded_engine`` is the same thread in an engine of this process, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
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

from headwater.backends.native import server
from headwater.backends.native.engine import NativeEngine, engine_arguments
from headwater.config.schema import EngineConfig
from headwater.core.records import ModelRequest, SamplingParams
from headwater.engine.engine import Engine
from headwater.engine.loop import EngineLoop
from headwater.engine.runners.plain import Output
from headwater.observe.spans import Spans

MODEL = "tiny:qwen3"
STEPS = 8
CLOCK_FILE = "HEADWATER_BENCHMARK_CLOCK"
"""Where the child writes its clock; the name of an environment variable."""


def main() -> None:
    if CLOCK_FILE in os.environ and sys.argv[1:2] == ["serve"]:
        return _serve()
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, help="the src folder of an older source tree, measured as well")
    parser.add_argument("--rows", type=int, default=1024, help="requests that run at once (default 1024)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds between short and long responses (default 24)")
    parser.add_argument("--runs", type=int, default=3, help="measurements; the median is reported (default 3)")
    parser.add_argument("--one-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_side:
        print(json.dumps(_measure(options.rows, options.rounds, options.runs)), flush=True)
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
    command += [f"--rows={options.rows}", f"--rounds={options.rounds}", f"--runs={options.runs}"]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _serve() -> None:
    """The child: ``headwater serve`` with a clock in its engine's thread."""
    from headwater.cli.main import main as command

    clock = np.memmap(os.environ[CLOCK_FILE], np.float64, "r+", shape=(1,))
    _install_clock(lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    sys.exit(command())


def _install_clock(add: Callable[[float], None]) -> None:
    """Report the processor time that engines take to read rounds, without the wait for the device."""
    read, wait, waited = EngineLoop._read, Output.wait, [0.0]

    def timed_wait(self: Output) -> Any:
        start = time.thread_time()
        try:
            return wait(self)
        finally:
            waited[0] += time.thread_time() - start

    def timed_read(self: EngineLoop, queued: Any) -> None:
        start, waited[0] = time.thread_time(), 0.0
        read(self, queued)
        add(time.thread_time() - start - waited[0])

    Output.wait, EngineLoop._read = timed_wait, timed_read  # type: ignore[method-assign]


def _measure(num_rows: int, num_rounds: int, num_runs: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = EngineConfig(max_sequences=num_rows, decode_steps=STEPS, max_queue=4 * num_rows, kv_cache_gib=2.0)
    short, long = 2 * STEPS + 1, (2 + num_rounds) * STEPS + 1
    with tempfile.TemporaryDirectory() as folder:
        clock_file = Path(folder) / "clock"
        clock_file.write_bytes(bytes(8))
        os.environ[CLOCK_FILE] = str(clock_file)
        server.SERVE = (sys.executable, __file__, "serve")  # type: ignore[misc]
        clock = np.memmap(clock_file, np.float64, "r", shape=(1,))
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        arguments = engine_arguments(config, shares_device=False)
        engine = NativeEngine(MODEL, arguments, dtype=dtype, transfer="shared_memory", spans=Spans())
        try:
            _generate(engine, num_rows, short)  # compiles kernels and captures graphs
            own = engine._thread.native_id
            assert own is not None
            threads = {
                "child_engine": lambda: float(clock[0]),
                "child_server": lambda: _thread_s(engine.pid, engine.pid),
                "parent": lambda: _thread_s(os.getpid(), own),
            }
            served = [_difference(engine, num_rows, short, long, threads) for _ in range(num_runs)]
        finally:
            engine.close()
    embedded = _embedded(config, dtype, num_rows, short, long, num_runs)
    medians = {name: statistics.median(run[name] for run in served) for name in served[0]}
    wall_s = medians.pop("wall") * num_rounds
    medians["embedded_engine"] = embedded
    return {
        "ms_per_round": {name: 1e3 * seconds for name, seconds in medians.items()},
        "tokens_per_s": num_rows * num_rounds * STEPS / wall_s,
    }


def _embedded(config: EngineConfig, dtype: str, num_rows: int, short: int, long: int, num_runs: int) -> float:
    spent = [0.0]
    _install_clock(lambda seconds: spent.__setitem__(0, spent[0] + seconds))
    engine = Engine.load(MODEL, config, dtype=dtype)
    try:
        _generate(engine, num_rows, short)
        threads = {"engine": lambda: spent[0]}
        runs = [_difference(engine, num_rows, short, long, threads)["engine"] for _ in range(num_runs)]
    finally:
        engine.close()
    return statistics.median(runs)


def _difference(
    engine: Any, num_rows: int, short: int, long: int, threads: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """Seconds per round of every thread: those of long responses less those of short ones."""
    totals = []
    for num_tokens in (short, long):
        before, started = {name: read() for name, read in threads.items()}, time.perf_counter()
        _generate(engine, num_rows, num_tokens)
        spent = {name: read() - before[name] for name, read in threads.items()}
        totals.append({**spent, "wall": time.perf_counter() - started})
    num_rounds = (long - short) / STEPS
    return {name: (totals[1][name] - totals[0][name]) / num_rounds for name in totals[0]}


def _generate(engine: Any, num_rows: int, num_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    requests = [ModelRequest(f"r{key}", (7, 8, 9, 10), sampling, key) for key in range(num_rows)]

    async def run() -> None:
        responses = await asyncio.gather(*(engine.agenerate(each) for each in requests))
        assert {len(each.output_tokens) for each in responses} == {num_tokens}

    asyncio.run(run())


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
