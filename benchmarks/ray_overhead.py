"""The step time of the quickstart in one process, with a server in a child process, and with actors of Ray.

    python benchmarks/ray_overhead.py --out benchmarks/results/cpu_ray_overhead.json

Every way is a separate ``headwater train``. The median step and its parts come from the metrics of the run, without the
first two steps; ``start`` is the time from the command to the first step. With the same number of learner ranks and
servers, the difference between `child process` and `ray` is what Ray costs: batches and weights through its object
store, and calls of actors.
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
NUM_SKIPPED = 2


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    options = parser.parse_args()
    results = {}
    for way in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            results[way] = measured(WAYS[way], options.steps, Path(folder))
        times = ", ".join(f"{name} {value:.3f}" for name, value in results[way].items())
        print(f"{way:28} {times}", flush=True)
    write_record(options.out, torch.device("cpu"), num_cores=os.cpu_count(), seconds=results)


def measured(settings: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Seconds to the first step, and the median of each part of a step."""
    fixed = [f"run.root={folder}", f"trainer.total_steps={steps}", "warm_start.num_steps=0"]
    fixed += ["eval.before=false", "eval.after=false", "eval.every_steps=0", "trainer.save_rollouts_every_steps=0"]
    command = [sys.executable, "-m", "headwater.cli.main", "train", "quickstart", *fixed, *settings]
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "quickstart" / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [each for line in lines if (each := json.loads(line))["kind"] == "train"]
    first = records[0]["time"] - records[0]["time/step_s"]
    medians = {
        part: statistics.median(each.get(f"time/{part}_s", 0.0) for each in records[NUM_SKIPPED:]) for part in PARTS
    }
    return {"start": first - began, **medians}


if __name__ == "__main__":
    main()
