"""How long a weight update of an engine in another process takes, per transport.

    python benchmarks/served_weights.py --shape qwen2.5-1.5b
    python benchmarks/served_weights.py --shape qwen2.5-1.5b --before /tmp/old/src --out results/gpu_served_weights.json

Weights are published as a run publishes them: streamed to ``headwater serve`` as a child process, then verified by
checksum. ``pause`` is measured by the engine, from the moment it stops generating until it can continue; nothing is
generated here. ``publish`` is the whole call. The learner's weights are float32, the engine's are of the device's usual
number type. The first update, which allocates and pins memory, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from options import add_shape, parser_of
from record import write_record
from shapes import WeightsInMemory, build_model, default_device, default_dtype

from headwater.backends.native.engine import NativeEngine, engine_arguments
from headwater.backends.native.places import OwnServer
from headwater.config.schema import EngineConfig
from headwater.models.builtin.tiny import build_tokenizer
from headwater.observe.spans import Spans
from headwater.weights.publish import publish

TRANSFERS = ("shared_memory", "file")


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    parser.add_argument("--before", type=Path, help="the src folder of an older source tree, measured as well")
    parser.add_argument("--updates", type=int, default=5, help="updates that are timed (default 5)")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps([_measure(options.model, transfer, options) for transfer in TRANSFERS]), flush=True)
        return
    sides = ([("before", options.before)] if options.before else []) + [("now", Path(__file__).parents[1] / "src")]
    with tempfile.TemporaryDirectory() as folder:
        build_model(options.shape, torch.device("cpu"), default_dtype(default_device())).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        results = {name: _in_tree(source, Path(folder), options) for name, source in sides}
    for name, rows in results.items():
        for row in rows:
            print(
                f"{options.shape} {name:<7} {row['transfer']:<14} pause {row['pause_ms']:>7.1f} ms, publish "
                f"{row['publish_ms']:>7.1f} ms"
            )
    write_record(options.out, default_device(), shape=options.shape, **results)


def _in_tree(source: Path, model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the code in ``source``, in a process that imports it."""
    command = [sys.executable, __file__, f"--shape={options.shape}", f"--updates={options.updates}", f"--model={model}"]
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _measure(model: Path, transfer: Any, options: argparse.Namespace) -> dict[str, Any]:
    device = default_device()
    dtype: Any = str(default_dtype(device)).removeprefix("torch.")
    learner = build_model(options.shape, device, torch.float32)
    source = WeightsInMemory({name: each.detach() for name, each in learner.named_parameters()})
    config = EngineConfig(max_sequences=8, kv_cache_gib=0.25)
    arguments = engine_arguments(config, shares_device=False)
    engine = NativeEngine(OwnServer(str(model), arguments, dtype), transfer=transfer, spans=Spans())
    pauses, whole = [], []
    try:
        for version in range(1, options.updates + 2):
            started = time.perf_counter()
            publish(source, engine, version)
            whole.append((time.perf_counter() - started) * 1e3)
            pauses.append(engine.status().metrics["last_update_pause_s"] * 1e3)
    finally:
        engine.close()
    return {
        "transfer": transfer,
        "pause_ms": statistics.median(pauses[1:]),
        "publish_ms": statistics.median(whole[1:]),
        "pauses_ms": pauses,
        "publishes_ms": whole,
    }


if __name__ == "__main__":
    main()
