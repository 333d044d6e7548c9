"""How much code a reader of one training step has to know."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from command import PROCESS_LIMIT_S, ROOT

MOST_FILES = 75


@pytest.mark.slow
def test_a_simple_step_executes_few_files(tmp_path):
    """If this fails, merge a small file that has one importer into that importer, or do less in every step."""
    record = tmp_path / "record.json"
    subprocess.run(
        [sys.executable, "benchmarks/files_per_step.py", "--out", record],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"}, timeout=PROCESS_LIMIT_S, check=True,
    )  # fmt: skip
    files = json.loads(record.read_text())["files"]
    assert {"trainer/loop.py", "learner/optimizer.py", "engine/sampler.py"} <= set(files), "the step was seen"
    assert len(files) <= MOST_FILES, files
