"""Memory, utilisation and profiles on a GPU."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from trainer.experience_parts import batch, training

from headwater.core.learner import ProfileOrder
from headwater.models.flops import peak_flops
from headwater.trainer.metrics import StageMemory


def test_peaks_belong_to_the_stage_that_allocated():
    memory = StageMemory()
    torch.ones(1, device="cuda")
    memory.leave("wait")
    torch.ones(2**28, device="cuda")  # 1 GiB, freed at once
    memory.leave("train")
    memory.leave("publish")
    metrics = memory.take()
    assert metrics["memory/train/gpu_peak_gib"] - metrics["memory/publish/gpu_peak_gib"] >= 1.0
    assert metrics["memory/gpu_peak_gib"] == metrics["memory/train/gpu_peak_gib"]
    assert metrics["memory/gpu_reserved_gib"] >= metrics["memory/gpu_gib"] > 0


def test_an_update_tells_its_utilisation_and_can_be_profiled(tmp_path):
    parts = training("model.device=cuda", "model.dtype=bfloat16")
    data = parts.experience.make(batch(), version=0).data
    parts.learner.profile(ProfileOrder(tmp_path, "step_000001", (0,), memory=True))
    stats = parts.learner.update(data)
    parts.learner.profile(None)
    peak = peak_flops(torch.device("cuda"), torch.bfloat16)
    if peak is not None:
        assert 0 < stats["mfu/actor"] < 1
        assert stats["mfu/actor"] * peak / 1e12 == stats["throughput/actor_tflops_per_s"]
    trace, snapshot = sorted(tmp_path.iterdir())
    assert (trace.name, snapshot.name) == ("step_000001_rank_0.json.gz", "step_000001_rank_0_memory.pickle")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
