"""The step time of the quickstart in one process, with a server in a child process, and with actors of Ray.

    python benchmarks/ray_overhead.py --out benchmarks/results/cpu_ray_overhead.json

Every way is a separate ``headwater train``, and the ways take turns. The median step and its parts come from the
metrics of the runs, without the first two steps; ``start`` is the time from the command to the first step. The warm
start of the recipe is a part of it: without it, all rewards of a group are equal, and nothing is trained. With the
same number of learner ranks and servers, the difference between `child process` and `ray` is what Ray costs: batches
and weights through its object store, and calls of actors. The record also has the load of the machine: other programs
make all times longer, and those of ways with more processes most.
"""

from __future__ import annotations

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
from options import parser_of
from record import write_record

SEPARATE = ["rollout.placement=disaggregated"]
RAY = ["cluster=ray", "cluster.object_store_mib=200", "cluster.learner.cpus_per_rank=0.5"]
RAY += ["cluster.rollout.cpus_per_server=0.5"]
WAYS = {
    "one process": [],
    "child process": SEPARATE,
    "ray, 1 rank and 1 server": [*RAY, *SEPARATE],
    "ray, 2 ranks and 2 servers": [*RAY, *SEPARATE, "cluster.learner.num_ranks=2", "rollout.launch.num_servers=2"],
}
PARTS = ("step", "wait", "experience", "train", "publish", "record")
"""Of a step; ``train`` is the update."""
NUM_SKIPPED = 2


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (default 2)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    options = parser.parse_args()
    starts: dict[str, list[float]] = {way: [] for way in options.ways}
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    loads = [os.getloadavg()[0]]
    for way in options.ways * options.rounds:
        with tempfile.TemporaryDirectory() as folder:
            start, steps = measured(WAYS[way], options.steps, Path(folder))
        starts[way].append(start)
        taken[way] += steps
        loads.append(os.getloadavg()[0])
    results = {way: {"start": min(starts[way]), **medians(taken[way])} for way in options.ways}
    for way, seconds in results.items():
        print(f"{way:28} " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()), flush=True)
    first = results[options.ways[0]]["step"]
    ratios = {way: seconds["step"] / first for way, seconds in results.items()}
    load = {"min": min(loads), "max": max(loads)}
    machine = {"num_cores": os.cpu_count(), "load_average": load}
    write_record(options.out, torch.device("cpu"), **machine, seconds=results, step_ratio=ratios)


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Of each part of a step."""
    return {part: statistics.median(each.get(f"time/{part}_s", 0.0) for each in steps) for part in PARTS}


def measured(settings: list[str], steps: int, folder: Path) -> tuple[float, list[dict[str, Any]]]:
    """Seconds to the first step, and the metrics of the steps that count."""
    fixed = [f"run.root={folder}", f"trainer.total_steps={steps}"]
    fixed += ["eval.before=false", "eval.after=false", "eval.every_steps=0", "trainer.save_rollouts_every_steps=0"]
    command = [sys.executable, "-m", "headwater.cli.main", "train", "quickstart", *fixed, *settings]
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "quickstart" / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [each for line in lines if (each := json.loads(line))["kind"] == "train"]
    first: float = records[0]["time"] - records[0]["time/step_s"]
    return first - began, records[NUM_SKIPPED:]


if __name__ == "__main__":
    main()
