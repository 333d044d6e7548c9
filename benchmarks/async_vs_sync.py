"""Samples per second of whole training runs, synchronous and asynchronous, on the same cores.

    python benchmarks/async_vs_sync.py [--steps 16] [--trace-dir /tmp/traces]

There are two workloads (``async_workloads``): responses of long-tailed length, and a tool that each episode waits for.
Runs of a workload differ only in ``rollout.max_staleness``. Prompts, lengths, latencies and the number of trained
samples are equal, and ``on_stale=wait``, so nothing is dropped or masked. The time includes all steps, also the first
ones. In asynchronous runs, the engine and the learner each get half of the threads. The synchronous run is made twice,
with threads for all cores and for half of them, and the faster one counts.

The trace of each run shows the source of the gain: the share of the time in which the learner waits, the engine
generates, the learner trains, and the share in which generation and training run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from options import parser_of
from record import write_record
from training_run import mean_lag, records, train

from headwater.observe.run_directory import RunDirectory

WORKFLOWS = Path(__file__).with_name("async_workloads.py")
LEARNING = ("experience", "train", "publish")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Workload:
    name: str
    settings: Mapping[str, Any]


def workloads(options: argparse.Namespace) -> list[Workload]:
    long_tailed = {
        "rollout.workflow": f"{WORKFLOWS}:LongTailed",
        "rollout.workflow_args": {"mean_tokens": options.mean_tokens, "sigma": 0.8},
        "rollout.max_new_tokens": 6 * options.mean_tokens,
    }
    slow_tool = {
        "rollout.workflow": f"{WORKFLOWS}:SlowTool",
        "rollout.workflow_args": {"mean_s": options.mean_tool_s, "sigma": 0.7},
        "rollout.max_new_tokens": options.mean_tokens // 2,
    }
    return [Workload("long-tailed", long_tailed), Workload("tool latency", slow_tool)]


def settings_of(workload: Workload, max_staleness: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "run.name": f"{workload.name.replace(' ', '-')}-{max_staleness}",
        "model.path": "tiny:qwen3",
        "model.device": "cpu",
        "data.train": "largest_digit",
        "data.num_train_rows": 2048,
        "data.max_prompt_tokens": 32,
        "rollout.num_samples_per_prompt": options.samples,
        "rollout.max_staleness": max_staleness,
        "rollout.on_stale": "wait",
        "reward.function": f"{WORKFLOWS}:compute_score",
        "algorithm.policy_loss": "decoupled",
        "algorithm.old_logprobs": "recompute",
        "learner.learning_rate": 1e-5,
        "learner.num_minibatches": 2,
        "learner.num_epochs": options.epochs,
        "learner.skip_zero_advantages": False,
        "trainer.total_steps": options.steps,
        "trainer.num_prompts_per_step": options.prompts,
        "trainer.save_rollouts_every_steps": 0,
        "trainer.trace": True,
        "eval.before": False,
        "eval.after": False,
        **workload.settings,
    }


def best_run(workload: Workload, max_staleness: int, options: argparse.Namespace) -> dict[str, float]:
    """With the number of threads that suits it."""
    cores = os.cpu_count() or 1
    half = max(1, cores // 2)
    rows = []
    for num_threads in sorted({half, cores}) if max_staleness == 0 else [half]:
        torch.set_num_threads(num_threads)
        with TemporaryDirectory() as folder:
            run = train(None, settings_of(workload, max_staleness, options), Path(folder))
            rows.append({**measure(run, options.prompts * options.samples), "threads": num_threads})
            if options.trace_dir is not None:
                options.trace_dir.mkdir(parents=True, exist_ok=True)
                shutil.copy(run.path / "trace.json", options.trace_dir / f"{run.path.name}.json")
    return max(rows, key=lambda row: row["samples_per_s"])


def measure(run: RunDirectory, samples_per_step: int) -> dict[str, float]:
    steps = records(run, "train")
    total_s = sum(each["time/step_s"] for each in steps)
    bars = bars_of(run.path / "trace.json")
    generating = union(bars.get("generate", ()))
    learning = union(bar for name in LEARNING for bar in bars.get(name, ()))
    return {
        "samples_per_s": len(steps) * samples_per_step / total_s,
        "seconds": total_s,
        "waiting": sum(each["time/wait_s"] for each in steps) / total_s,
        "generating": length(generating) / total_s,
        "training": length(learning) / total_s,
        "overlap": overlap(generating, learning) / total_s,
        "mean_lag": mean_lag(steps),
        "max_lag": max(int(name.rpartition("_")[2]) for each in steps for name in each if "staleness/lag_" in name),
        "dropped_groups": sum(each["staleness/dropped_groups"] for each in steps),
    }


def bars_of(trace: Path) -> dict[str, list[Interval]]:
    """By name, from when to when in seconds."""
    bars: dict[str, list[Interval]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            began = event["ts"] / 1e6
            bars.setdefault(event["name"], []).append((began, began + event["dur"] / 1e6))
    return bars


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for began, ended in sorted(intervals):
        if joined and began <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(ended - began for began, ended in intervals)


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """Seconds that lie in both. The intervals of each side do not overlap."""
    return length(first) + length(second) - length(union([*first, *second]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        default=[0, 1, 2, 4, 8],
        help="values of rollout.max_staleness; the first one is the baseline",
    )
    parser.add_argument("--steps", type=int, default=12, help="training steps per run (default 12)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (default 8)")
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt (default 4)")
    parser.add_argument("--mean-tokens", type=int, default=48, help="mean length of a response (default 48)")
    parser.add_argument("--mean-tool-s", type=float, default=1.0, help="mean time the tool takes (default 1 s)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over a batch (default 2)")
    parser.add_argument("--trace-dir", type=Path, help="keep each run's trace.json here, for ui.perfetto.dev")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for workload in workloads(options):
        print(f"\n{workload.name}\n{'staleness':>9}  {'samples/s':>9}  {'speedup':>7}  ", end="")
        print(f"{'waiting':>7}  {'generating':>10}  {'training':>8}  {'both':>5}  {'mean lag':>8}")
        for max_staleness in options.staleness:
            row = best_run(workload, max_staleness, options)
            first = next((each for each in rows if each["workload"] == workload.name), row)
            speedup = row["samples_per_s"] / first["samples_per_s"]
            rows.append({"workload": workload.name, "max_staleness": max_staleness, **row, "speedup": speedup})
            shares = [f"{row[name]:.0%}" for name in ("waiting", "generating", "training", "overlap")]
            print(f"{max_staleness:>9}  {row['samples_per_s']:>9.1f}  {speedup:>6.2f}x  ", end="")
            print("{:>7}  {:>10}  {:>8}  {:>5}  ".format(*shares) + f"{row['mean_lag']:>8.2f}", flush=True)
    for workload in workloads(options):
        best = max((each for each in rows if each["workload"] == workload.name), key=lambda each: each["speedup"])
        print(f"{workload.name}: {best['speedup']:.2f} times synchronous at max_staleness {best['max_staleness']}")
    write_record(
        options.out,
        torch.device("cpu"),
        steps=options.steps,
        samples_per_step=options.prompts * options.samples,
        load_before=load,
        load_after=os.getloadavg()[0],
        rows=rows,
    )


if __name__ == "__main__":
    main()
