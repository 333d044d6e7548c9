"""The cost of regular weight updates for generation, per update mode, while long responses run.

    python benchmarks/update_modes.py [--runs 3]
    python benchmarks/update_modes.py --shape qwen2.5-1.5b --rows 256 --requests 768 --new-tokens 256 --updates 4

The same requests, of log-normal length, are generated without updates and with each mode. More requests are queued than
run concurrently. Updates come after a fixed number of tokens. They load the same weights again, so every run generates
the same tokens. Reported per update: tokens computed again (compared with the run without updates), the duration of the
swap as the engine measures it, the time from the call to its end, and the additional time of the whole run.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.config.schema import EngineConfig, UpdateMode
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer

MODES: tuple[UpdateMode, ...] = ("in_flight", "interrupt", "drain")
NONE = "no updates"
_SIGMA = 0.6
_LOOK_S = 0.002


@dataclass(frozen=True)
class Run:
    mode: str
    seconds: float
    tokens: int
    prefilled: int
    swaps_s: tuple[float, ...] = ()
    """Pauses of generation, as the engine measures them."""
    delays_s: tuple[float, ...] = ()
    """From asking for an update to its end."""


def long_requests(options: argparse.Namespace, vocabulary: int) -> list[ModelRequest]:
    """Different prompts, with responses of log-normal length."""
    prompts = make_prompts(options.requests, options.prompt_tokens, vocabulary)
    mean = math.log(options.new_tokens) - _SIGMA**2 / 2
    lengths = np.random.default_rng(0).lognormal(mean, _SIGMA, options.requests)
    longest = 4 * options.new_tokens
    return [
        replace(each, sampling=replace(each.sampling, max_new_tokens=min(longest, max(1, round(length)))))
        for each, length in zip(make_requests(prompts, 1, options.new_tokens), lengths, strict=True)
    ]


def generate(
    engine: Engine,
    requests: Sequence[ModelRequest],
    weights: Mapping[str, torch.Tensor],
    mode: UpdateMode | None,
    num_updates: int,
) -> Run:
    """All responses, with ``num_updates`` spread over their tokens."""
    engine.set_version(engine.get_version() + 1)  # nothing of an earlier run is found in the prefix cache
    before = engine.metrics()
    total = sum(each.sampling.max_new_tokens for each in requests)
    worker = threading.Thread(target=engine.generate, args=(requests,))
    swaps, delays = [], []
    began = time.perf_counter()
    worker.start()
    for number in range(1, num_updates + 1 if mode else 1):
        due = before.num_tokens_generated + number * total // (num_updates + 1)
        while worker.is_alive() and engine.metrics().num_tokens_generated < due:
            time.sleep(_LOOK_S)
        asked = time.perf_counter()
        engine.update_weights(WeightUpdate.of(engine.get_version() + 1, weights.items()), mode).result(300)
        delays.append(time.perf_counter() - asked)
        swaps.append(engine.metrics().last_update_pause_s)
    worker.join()
    seconds = time.perf_counter() - began
    after = engine.metrics()
    return Run(
        mode or NONE,
        seconds,
        after.num_tokens_generated - before.num_tokens_generated,
        after.num_tokens_prefilled - before.num_tokens_prefilled,
        tuple(swaps),
        tuple(delays),
    )


def median_run(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def row_of(run: Run, undisturbed: Run) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": run.mode, "tokens_per_s": run.tokens / run.seconds, "seconds": run.seconds}
    if run.swaps_s:
        row |= {
            "tokens_computed_again": (run.prefilled - undisturbed.prefilled) / len(run.swaps_s),
            "swap_ms": statistics.median(run.swaps_s) * 1e3,
            "delay_ms": statistics.median(run.delays_s) * 1e3,
            "cost_ms": (run.seconds - undisturbed.seconds) / len(run.swaps_s) * 1e3,
        }
    return row


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, prompt_tokens=64, new_tokens=128, runs=1)
    parser.add_argument("--rows", type=int, default=64, help="sequences generated at a time (default 64)")
    parser.add_argument("--requests", type=int, default=256, help="responses in all (default 256)")
    parser.add_argument("--updates", type=int, default=8, help="weight updates in a run (default 8)")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    device = default_device()
    model = build_model(options.shape, device, default_dtype(device))
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine = Engine(model, build_tokenizer(), EngineConfig(max_sequences=options.rows, memory_fraction=0.3))
    requests = long_requests(options, engine.limits.vocab_size)
    engine.generate(requests[: options.rows])  # as they end, every batch size is met once, and captured on a GPU
    # Mode after mode, so that what else the machine does falls on all of them alike.
    modes: tuple[UpdateMode | None, ...] = (None, *MODES)
    rounds = [
        [generate(engine, requests, weights, mode, options.updates) for mode in modes] for _ in range(options.runs)
    ]
    engine.close()
    runs = [median_run(each) for each in zip(*rounds, strict=True)]
    rows = [row_of(each, runs[0]) for each in runs]
    print(f"{'mode':<10}  {'tokens/s':>9}  {'computed again':>14}  {'swap':>9}  {'until served':>12}  {'cost':>9}")
    for row in rows:
        line = f"{row['mode']:<10}  {row['tokens_per_s']:>9,.0f}"
        if "swap_ms" in row:
            line += f"  {row['tokens_computed_again']:>14,.0f}  {row['swap_ms']:>6.1f} ms"
            line += f"  {row['delay_ms']:>9.1f} ms  {row['cost_ms']:>6.0f} ms"
        print(line)
    rates = {row["mode"]: row["tokens_per_s"] for row in rows}
    print(f"in_flight against drain: {rates['in_flight'] / rates['drain']:.2f} times the rate")
    write_record(options.out, device, shape=options.shape, load_before=load, updates=options.updates, rows=rows)


if __name__ == "__main__":
    main()
