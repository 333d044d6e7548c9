"""Whether runs are equal to the bit: trained twice, and resumed from a checkpoint in the middle.

    python benchmarks/repeatability.py                                        # on a GPU if there is one
    python benchmarks/repeatability.py --cases sync async --steps 8 --settings model.path=smollm2 model.device=cuda

Each case is trained twice with ``run.deterministic=true``, and once more from the middle. The ledger has a checksum of
all weights after every step; the first step in which it differs is shown. ``plain`` is trained without
``run.deterministic``, to show what this setting changes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from options import parser_of
from record import write_record

CASES = {
    "sync": ["quickstart"],
    "async": ["quickstart", "rollout.max_staleness=2"],
    "critic": ["quickstart", "ppo"],
    "no graphs": ["quickstart", "learner.cuda_graphs=off"],
    "plain": ["quickstart", "run.deterministic=false"],
}
COMMON = ["run.deterministic=true", "eval.before=false", "eval.after=false", "trainer.keep_checkpoints=9"]


def checksums(run: Path) -> dict[int, str]:
    """Of the weights, by step. After a resume, later lines replace earlier ones."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return {line["step"]: line["weights"] for line in lines if line["kind"] == "step"}


def train(*arguments: object) -> None:
    command = [sys.executable, "-m", "headwater", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def first_difference(ours: dict[int, str], theirs: dict[int, str]) -> int | None:
    """The first step whose weights differ; None if all are equal."""
    return next((step for step in sorted(ours | theirs) if ours.get(step) != theirs.get(step)), None)


def compare(case: str, settings: list[str], num_steps: int) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        order = [CASES[case][0], *COMMON, *CASES[case][1:], *settings]
        steps = [f"trainer.total_steps={num_steps}", f"trainer.checkpoint_every_steps={num_steps // 2}"]
        for name in ("first", "second"):
            train(*order, *steps, f"run.root={root}", f"run.name={name}")
        first = checksums(root / "first")
        again = first_difference(first, checksums(root / "second"))
        resumed = root / "resumed"
        shutil.copytree(root / "first", resumed)
        train("--resume", resumed, "--step", num_steps // 2)
        found = first_difference(first, checksums(resumed))
    num_weights = len(set(first.values()))
    return {"case": case, "steps": num_steps, "different_weights": num_weights, "again": again, "resumed": found}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=8, help="of each run (default 8)")
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="for all runs")
    options = parser.parse_args()
    rows = []
    for case in options.cases:
        row = compare(case, options.settings, options.steps)
        rows.append(row)
        shown = {
            name: "equal" if row[name] is None else f"differs at step {row[name]}" for name in ("again", "resumed")
        }
        print(f"{case:<10} trained again: {shown['again']:<22} resumed: {shown['resumed']}", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_record(options.out, device, rows=rows)


if __name__ == "__main__":
    main()
