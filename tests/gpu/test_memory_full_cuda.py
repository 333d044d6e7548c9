"""A run that really runs out of GPU memory: the message, and whether what it advises helps as much as it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
SETTINGS = [
    "quickstart", "model.device=cuda", "model.dtype=bfloat16", "engine.kv_cache_gib=0.25",
    "trainer.total_steps=1", "trainer.num_prompts_per_step=64", "rollout.max_new_tokens=256",
    "warm_start.num_steps=0", "warm_start.until_reward=0", "learner.max_tokens_per_microbatch=65536",
    "eval.before=false", "eval.after=false", "eval.every_steps=0",
    "reward.function=tests/integration/varied_reward.py:compute_score",
]  # fmt: skip
"""A batch of about 100,000 tokens for a model of two megabytes: nearly all memory is the activations of an update."""

LIMITED = """
import sys
import torch
from headwater.cli.main import main
torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
sys.exit(main(["train", *sys.argv[2:]]))
"""


def train(root: Path, name: str, *settings: str, fraction: float = 1.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(fraction), *SETTINGS, *settings]
    return subprocess.run(
        [*command, f"run.root={root}", f"run.name={name}"],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def peak_bytes(run: Path) -> float:
    """The most memory that the update allocated."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (step,) = [each for each in records if each["kind"] == "train"]
    return float(step["memory/train/gpu_peak_gib"]) * 2**30


def read_bytes(text: str) -> float:
    count, unit = text.split()
    return float(count) * 2 ** {"bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30}[unit]


def test_the_first_advised_setting_fits_where_the_run_did_not(tmp_path):
    free = train(tmp_path, "free")
    assert free.returncode == 0, free.stderr[-3000:]
    most = peak_bytes(tmp_path / "free")
    # The limit is one of what torch reserves, which is more than what it allocates, because memory is fragmented and
    # the engine and the learner keep workspaces. With 0.75, half of the activations did not fit on an H200.
    fraction = 0.9 * most / torch.cuda.get_device_properties(0).total_memory
    full = train(tmp_path, "full", fraction=fraction)
    assert full.returncode == 2, full.stdout[-3000:] + full.stderr[-3000:]
    assert "Traceback" not in full.stderr
    assert "out of memory while updating the policy (CUDA out of memory." in full.stderr
    advice = next(line for line in full.stderr.splitlines() if line.startswith("  - "))
    found = re.match(r"  - (learner\.\S+=\S+) .*saves about (\S+ \S+) by estimate", advice)
    assert found is not None, advice
    setting, saved = found.groups()
    name, value = setting.split("=")
    assert name == "learner.max_tokens_per_microbatch"
    # Packs are evened out, so two packs have fewer tokens than the setting allows, and half of them is advised.
    assert 16384 < int(value) <= 32768, "half of the passes, which are still too large for CUDA graphs"
    fits = train(tmp_path, "fits", setting, fraction=fraction)
    assert fits.returncode == 0, fits.stderr[-3000:]
    measured = most - peak_bytes(tmp_path / "fits")
    assert measured > 0
    assert 1 / 3 < read_bytes(saved) / measured < 3, f"{saved} by estimate, {measured / 2**20:.0f} MiB measured"
