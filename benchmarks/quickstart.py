"""Time the quickstart with the embedded engine, then with transformers' generate.

    python benchmarks/quickstart.py [--steps 80]

Each side runs ``headwater train quickstart`` in a separate process, the second one with
``rollout.backend=hf``. Times are read from the metrics of the runs. They include the training steps, but not the
supervised start, evaluations and imports.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from options import parser_of
from record import write_record

from headwater.observe.run_directory import RunDirectory

RECIPE = "quickstart"
BACKENDS = ("embedded", "hf")
_LIMIT_S = 1800


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="training steps (default 80, as in the recipe)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        results = {backend: _train(backend, options.steps, Path(root)) for backend in BACKENDS}
    print(f"{'backend':<10} {'steps, s':>9} {'generation':>11} {'reward':>16}")
    for backend, each in results.items():
        print(
            f"{backend:<10} {each['steps_s']:>9.1f} {each['generation_share']:>11.0%} "
            f"{each['reward_before']:>7.3f} → {each['reward_after']:.3f}"
        )
    ratio = results["hf"]["steps_s"] / results["embedded"]["steps_s"]
    print(f"hf takes {ratio:.2f} times as long")
    write_record(options.out, torch.device("cpu"), results=results, hf_over_embedded=ratio)


def _train(backend: str, num_steps: int, root: Path) -> dict[str, float]:
    settings = [f"rollout.backend={backend}", f"trainer.total_steps={num_steps}", "eval.after=true"]
    where = [f"run.root={root}", f"run.name={backend}"]
    command = [sys.executable, "-m", "headwater.cli.main", "train", str(RECIPE), *settings, *where]
    print(f"training with rollout.backend={backend} ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    metrics = RunDirectory.open(root / backend).read_metrics()
    steps = [each for each in metrics if each["kind"] == "train"]
    rewards = [each["reward/mean"] for each in metrics if each["kind"] == "eval"]
    seconds = sum(each["time/step_s"] for each in steps)
    return {
        "steps_s": seconds,
        "generation_share": sum(each["time/generate_s"] for each in steps) / seconds,
        "reward_before": rewards[0],
        "reward_after": rewards[-1],
    }


if __name__ == "__main__":
    main()
