"""What rewards cost: the time of short checks, and how much of the engine's speed slow ones take.

    python benchmarks/reward_workers.py --out benchmarks/results/reward_workers.json

1. 1,024 GSM8K checks that arrive together: direct calls (the default of this scorer), worker processes, threads.
2. The engine generates while eight scoring calls compute all the time, in worker processes or in threads; and while
   eight processes that do not belong to the run compute. ``--load`` is their number. A generation that takes longer
   than ``--limit-s`` is ended, and its rate is that of the tokens so far: busy threads can slow the engine a
   hundredfold.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.config.schema import EngineConfig, RewardConfig
from headwater.core.interpreter import settle_garbage
from headwater.core.records import Answer, Prompt
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager

FUNCTIONS = """
from headwater.rewards.scorers.gsm8k import gsm8k

def check(data_source, solution_str, ground_truth, extra_info):
    return gsm8k(data_source, solution_str, ground_truth, extra_info)

def busy(solution_str):
    while True:
        sum(range(10_000))
"""
BUSY = "while True: sum(range(10_000))"


def prompt_of(number: int) -> Prompt:
    return Prompt(f"row{number}", (), "text", (1,), "openai/gsm8k", str(number), {"index": number})


def checks_s(function: str, num_checks: int, **settings: Any) -> tuple[float, float]:
    """Wall-clock and processor seconds of this process from the first request to the last score."""
    text = "First we add the numbers and then we multiply the sum by seven. " * 8
    answers = [Answer(prompt_of(number), f"{text}#### {number}") for number in range(num_checks)]

    async def score_all(manager: NaiveRewardManager) -> tuple[float, float]:
        await manager.score(answers[0])  # workers are started and have loaded the function
        await asyncio.gather(*(manager.score(each) for each in answers[:64]))
        began, used = time.perf_counter(), time.process_time()
        scores = await asyncio.gather(*(manager.score(each) for each in answers))
        took = time.perf_counter() - began, time.process_time() - used
        assert all(score.value == 1.0 for score in scores)
        return took

    with closing(NaiveRewardManager(RewardConfig(function=function, **settings), Spans())) as manager:
        return asyncio.run(score_all(manager))


def tokens_per_s(engine: Engine, options: Any) -> float:
    rates = []
    for run in range(options.runs):
        prompts = make_prompts(options.rows, options.prompt_tokens, engine.limits.vocab_size, seed=run)
        requests = make_requests(prompts, 1, options.new_tokens, run)
        engine.set_version(engine.get_version() + 1)
        timer = threading.Timer(options.limit_s, engine.abort)
        began = time.perf_counter()
        timer.start()
        responses = engine.generate(requests)
        rates.append(sum(len(each.output_tokens) for each in responses) / (time.perf_counter() - began))
        timer.cancel()
    return statistics.median(rates)


@contextmanager
def foreign_processes(count: int) -> Iterator[None]:
    """Busy processes that do not belong to the run, with normal priority."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    time.sleep(1.0)
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


@contextmanager
def busy_scorers(function: str, count: int, where: str) -> Iterator[None]:
    """Scoring calls that compute all the time, as a run makes them: from the event loop of a separate thread."""
    config = RewardConfig(function=function, where=where, workers=count, timeout_s=3600.0)  # type: ignore[arg-type]
    manager, loop = NaiveRewardManager(config, Spans()), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    answers = [Answer(prompt_of(number), "") for number in range(count)]
    calls = [asyncio.run_coroutine_threadsafe(manager.score(each), loop) for each in answers]
    time.sleep(1.0)
    try:
        yield
    finally:
        for call in calls:
            call.cancel()
        loop.call_soon_threadsafe(loop.call_later, 0.1, loop.stop)
        thread.join()
        manager.close()


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, prompt_tokens=16, new_tokens=64, runs=3)
    parser.add_argument("--checks", type=int, default=1024, help="GSM8K responses")
    parser.add_argument("--load", type=int, default=8, help="busy scorers, or busy foreign processes")
    parser.add_argument("--limit-s", type=float, default=15.0, help="time limit of one generation (default 15)")
    parser.add_argument("--rows", type=int, default=8, help="sequences that are generated concurrently")
    options = parser.parse_args()
    device = default_device()
    settle_garbage()  # as a run does
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(FUNCTIONS)
        places: dict[str, tuple[str, dict[str, Any]]] = {
            "direct": ("gsm8k", {}),
            "processes": (f"{file}:check", {}),
            "threads": (f"{file}:check", {"where": "threads", "workers": 8}),
        }
        checks = {}
        for name, (function, settings) in places.items():
            runs = [checks_s(function, options.checks, **settings) for _ in range(options.runs)]
            checks[name] = {"wall_s": min(run[0] for run in runs), "cpu_s": min(run[1] for run in runs)}
            times = ", ".join(f"{seconds * 1e3:.1f} ms {key[:-2]}" for key, seconds in checks[name].items())
            print(f"{options.checks} checks, {name:<9}  {times}", flush=True)

        model = build_model(options.shape, device, default_dtype(device))
        engine = Engine(model, build_tokenizer(), EngineConfig(max_sequences=options.rows, memory_fraction=0.3))
        tokens_per_s(engine, options)
        rates = {"alone": tokens_per_s(engine, options)}
        with foreign_processes(options.load):
            rates["foreign processes"] = tokens_per_s(engine, options)
        for where in ("processes", "threads"):  # the threads never end, so they come last
            with busy_scorers(f"{file}:busy", options.load, where):
                rates[f"scorers in {where}"] = tokens_per_s(engine, options)
    for name, rate in rates.items():
        print(f"{name:<22} {rate:>9,.0f} tokens/s")
    ratio = rates["scorers in processes"] / rates["foreign processes"]
    print(f"scorers in processes leave the engine {ratio:.0%} of what foreign processes leave it")
    write_record(options.out, device, shape=options.shape, checks=checks, tokens_per_s=rates, ratio=ratio)


if __name__ == "__main__":
    main()
