"""What the toolbox itself costs: time for each call, memory for each open session, and threads.

    python benchmarks/tool_calls.py --out benchmarks/results/tool_calls.json

1,000 sessions are open at the same time. Each makes several calls of a tool that does nothing: an async function, a
plain function (in a thread), a class with state, and the calculator. ``direct`` is the same function without a toolbox.
``faulty`` is a tool of which one call in nine raises, hangs until the time limit, or returns a megabyte. Times are
processor time of the Python process, and so is its memory; several rounds show whether it grows.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.config.rollout_schema import SandboxConfig, ToolsConfig
from headwater.core.records import Prompt
from headwater.core.tool_calls import ToolCall
from headwater.models.load import load_tokenizer
from headwater.tools import BaseTool
from headwater.tools.toolbox import Toolbox

NUMBER = {"parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}, "description": "A tool."}
ROW = Prompt("row", (), "?", (1,), "benchmark")


async def asynchronous(number: int) -> str:
    """Return the number."""
    return str(number)


def plain(number: int) -> str:
    """Return the number."""
    return str(number)


class Stateful(BaseTool):
    def __init__(self) -> None:
        super().__init__(tool_schema={"name": "stateful", **NUMBER})
        self.sums: dict[str, int] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.sums[instance_id] = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.sums[instance_id] += parameters["number"]
        return str(self.sums[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.sums[instance_id]


class Faulty(Stateful):
    def __init__(self) -> None:
        BaseTool.__init__(self, tool_schema={"name": "faulty", **NUMBER})
        self.sums = {}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        kind = parameters["number"] % 27
        if kind == 0:
            raise ValueError("a failure")
        if kind == 1:
            await asyncio.sleep(3600)
        return "x" * 1_000_000 if kind == 2 else "fine"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def episodes(box: Toolbox, name: str, num_sessions: int, num_calls: int) -> dict[str, float]:
    """All sessions make their calls, wait for each other with everything open, and end."""
    opened, go_on = 0, asyncio.Event()
    most_threads = 0

    async def episode(number: int) -> None:
        nonlocal opened, most_threads
        async with box.open(ROW) as session:
            for turn in range(num_calls):
                arguments = {"expression": f"{number} + {turn}"} if name == "calculator" else {"number": number + turn}
                await session.call(ToolCall("1", name, arguments))
                most_threads = max(most_threads, threading.active_count())
            opened += 1
            await go_on.wait()

    gc.collect()
    before, began = resident_mib(), time.process_time()
    tasks = [asyncio.ensure_future(episode(number)) for number in range(num_sessions)]
    while opened < num_sessions:  # noqa: ASYNC110 - a poll does not disturb what is measured
        await asyncio.sleep(0.01)
    seconds, open_mib = time.process_time() - began, resident_mib()
    go_on.set()
    await asyncio.gather(*tasks)
    del tasks
    gc.collect()
    return {
        "microseconds_per_call": 1e6 * seconds / (num_sessions * num_calls),
        "kib_per_session": 1024 * max(0.0, open_mib - before) / num_sessions,
        "mib_after": resident_mib(),
        "most_threads": most_threads,
    }


async def direct(function: Callable[[int], Awaitable[str]], num_calls: int) -> float:
    began = time.process_time()
    for number in range(num_calls):
        await function(number)
    return 1e6 * (time.process_time() - began) / num_calls


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    results: dict[str, Any] = {"direct": {"microseconds_per_call": asyncio.run(direct(asynchronous, 10_000))}}
    tokenizer = load_tokenizer("tiny:qwen3")
    for name, tool in (
        ("asynchronous", asynchronous), ("plain", plain), ("stateful", Stateful()), ("calculator", "calculator"),
        ("faulty", Faulty()),
    ):  # fmt: skip
        use, objects = ((tool,), ()) if isinstance(tool, str) else ((), (tool,))
        box = Toolbox(
            ToolsConfig(use=use, timeout_s=5 if name != "faulty" else 0.5), SandboxConfig(), tokenizer, objects
        )

        async def run(box: Toolbox = box, name: str = name) -> list[dict[str, float]]:
            rounds = [await episodes(box, name, args.sessions, args.calls) for _ in range(args.rounds)]
            await box.close()
            return rounds

        rounds = asyncio.run(run())
        # Later rounds use the memory that earlier ones have freed.
        most = max(each["kib_per_session"] for each in rounds)
        best = {**min(rounds, key=lambda each: each["microseconds_per_call"]), "kib_per_session": most}
        results[name] = {**best, "mib_after": [each["mib_after"] for each in rounds], "counts": dict(box.counts)}
        print(name, {key: round(value, 1) for key, value in best.items()}, dict(box.counts), flush=True)
        if isinstance(tool, Stateful):
            assert not tool.sums
    write_record(args.out, torch.device("cpu"), results=results)


if __name__ == "__main__":
    main()
