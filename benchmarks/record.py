"""The record of a benchmark: its results, and what is needed to run it again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch


def write_record(path: Path | None, device: torch.device, **values: Any) -> None:
    if path is None:
        return
    origin = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU",
        "torch": torch.__version__,
        "commit": commit(),
        "arguments": _arguments(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(origin | values, indent=1) + "\n")


def _arguments() -> list[str]:
    """What the script was asked to do, without the place its results go to."""
    given = [each for each in sys.argv[1:] if not each.startswith("--out=")]
    place = given.index("--out") if "--out" in given else len(given)
    return given[:place] + given[place + 2 :]


@cache
def commit() -> str:
    """The short hash of what is checked out, with ``-dirty`` if tracked files differ; ``unknown`` without git.

    A copy of the tree on another machine may have no history, or an older one: ``BENCHMARK_COMMIT`` says what it is.
    """
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
