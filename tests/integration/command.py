"""The real command line in a real process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from headwater.cli.main import main

ROOT = Path(__file__).parents[2]

CUT_DOWN = [
    "warm_start.num_steps=0", "warm_start.until_reward=0", "trainer.total_steps=2",
    "trainer.num_prompts_per_step=4", "rollout.num_samples_per_prompt=2", "data.num_train_rows=50",
    "data.num_eval_rows=10", "eval.num_prompts=10", "eval.every_steps=0",
    "reward.function=tests/integration/varied_reward.py:compute_score",
]  # fmt: skip
"""A recipe cut down to seconds, with a reward under which every step changes the weights."""

SMALL = ["recipes/quickstart.yaml", *CUT_DOWN]


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


def headwater(*arguments: object, timeout_s: float = 240.0) -> Result:
    command = [sys.executable, "-m", "headwater.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def train_small(root: Path, *arguments: object) -> Result:
    return headwater("train", *SMALL, f"run.root={root}", *arguments)


def train_here(*arguments: object) -> None:
    """Train in this process, which saves the seconds that importing torch takes in a new one."""
    with contextlib.chdir(ROOT):
        assert main(["train", *map(str, arguments)]) == 0


def metrics(run: Path, kind: str) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
