"""How long a weight update pauses generation, per mode, with sequences running.

    python benchmarks/weight_swap.py --shape qwen2.5-1.5b        # a GPU: weights in the learner's float32 and in bf16

Weights are published as a run publishes them: streamed in buckets, then verified by checksum. The pause is measured by
the engine, from the moment it stops generating until it can continue. Before each update all sequences run. The table
also shows the time of the whole publish call, and the tokens that are computed again in mode interrupt.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
from options import add_shape, add_work, parser_of
from record import write_record
from shapes import WeightsInMemory, build_model, default_device, default_dtype, make_prompts, make_requests

from headwater.config.schema import EngineConfig, UpdateMode
from headwater.core.protocols import WeightUpdate
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer
from headwater.weights.publish import publish

MODES: tuple[UpdateMode, ...] = ("interrupt", "in_flight")


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    add_work(parser, new_tokens=1024)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    device = default_device()
    model = build_model(options.shape, device, default_dtype(device))
    learner = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine = Engine(model, build_tokenizer(), EngineConfig(max_sequences=options.sequences, memory_fraction=0.3))
    prompts = make_prompts(options.sequences, 128, engine.limits.vocab_size)
    engine.generate(make_requests(prompts, 1, 20))
    rows = []
    for dtype in (torch.float32, default_dtype(device)):
        tensors = {name: tensor.to(dtype) for name, tensor in learner.items()}
        for mode in MODES:
            rows.append(_measure(engine, prompts, tensors, mode, options))
            row = rows[-1]
            print(
                f"{options.shape} {dtype!s:<15} {mode:<10} pause {row['pause_ms']:>8.2f} ms "
                f"({row['min_pause_ms']:.2f} to {row['max_pause_ms']:.2f}), publish {row['publish_ms']:>6.1f} ms, "
                f"{row['tokens_computed_again']:,.0f} tokens computed again per update",
                flush=True,
            )
            row["dtype"] = str(dtype)
    engine.close()
    write_record(options.out, device, shape=options.shape, sequences=options.sequences, rows=rows)


class _InMode:
    """An engine whose weight updates use ``mode``."""

    def __init__(self, engine: Engine, mode: UpdateMode) -> None:
        self._engine = engine
        self._mode = mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update_weights(self, update: WeightUpdate) -> Future[None]:
        return self._engine.update_weights(update, self._mode)


def _measure(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    tensors: dict[str, torch.Tensor],
    mode: UpdateMode,
    options: argparse.Namespace,
) -> dict[str, object]:
    engine.set_version(engine.get_version() + 1)
    running = threading.Thread(target=lambda: engine.generate(make_requests(prompts, 1, options.new_tokens)))
    running.start()
    _wait_until_all_run(engine, len(prompts), running)
    before = engine.metrics().num_tokens_prefilled
    pauses, publish_times = [], []
    for _ in range(options.updates):
        time.sleep(0.1)
        _wait_until_all_run(engine, len(prompts), running)
        started = time.perf_counter()
        publish(WeightsInMemory(tensors), _InMode(engine, mode), engine.get_version() + 1)
        publish_times.append((time.perf_counter() - started) * 1e3)
        pauses.append(engine.metrics().last_update_pause_s * 1e3)
    _wait_until_all_run(engine, len(prompts), running)
    again = (engine.metrics().num_tokens_prefilled - before) / options.updates
    engine.abort()
    running.join()
    return {
        "mode": mode,
        "pause_ms": statistics.median(pauses),
        "min_pause_ms": min(pauses),
        "max_pause_ms": max(pauses),
        "pauses_ms": pauses,
        "publish_ms": statistics.median(publish_times),
        "tokens_computed_again": again,
    }


def _wait_until_all_run(engine: Engine, num_sequences: int, running: threading.Thread) -> None:
    """A pause with some of them waiting to be computed again would not be that of a full load."""
    while engine.metrics().num_running < num_sequences:
        if not running.is_alive():
            raise SystemExit("the sequences ended before the last update: ask for more with --new-tokens")
        time.sleep(0.002)


if __name__ == "__main__":
    main()
