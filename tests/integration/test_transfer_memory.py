"""No transport holds a second copy of the weights: the memory of the sender and of the engine's process meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from integration import collective_ranks
from transformers import AutoModelForCausalLM

from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer, engine_arguments
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.builtin.tiny import Preset, build_config
from headwater.models.load import load_tokenizer, save_model
from headwater.observe.spans import Spans
from headwater.weights import TRANSPORTS, collective, shared_memory
from headwater.weights.publish import publish

MIB = 2**20
SHAPE = Preset("qwen2", hidden_size=640, intermediate_size=2560, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=80)
"""200 MiB in float32."""
BUCKET = 8 * MIB
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt``."""
SLACK = 64 * MIB
"""For what is not weights: buffers of gloo, Python objects, code that is executed for the first time."""


def reset_peak(pid: int) -> int:
    """Forget the most memory that a process has held; what it holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
def test_no_transport_holds_a_second_copy_of_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", BUCKET)
    monkeypatch.setattr(collective, "BUCKET_BYTES", BUCKET)
    # Both processes return freed memory at once, so that the peak is what was in use.
    for name, option in (("MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD), ("MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD)):
        monkeypatch.setenv(name, "65536")
        assert ctypes.CDLL(None).mallopt(option, 65536)
    learner = collective_ranks.OneRank(0)
    learner.model = AutoModelForCausalLM.from_config(build_config(SHAPE)).eval()
    whole = sum(each.nbytes for each in learner.model.parameters())
    save_model(learner.model, load_tokenizer("tiny:qwen2"), tmp_path / "model")
    few = 4 * BUCKET
    most = {
        "collective": few,
        "shared_memory": few,
        # Pages of the file, which both ends map and the system may take back. A copy would come on top.
        "file": whole + few,
    }
    assert all(2 * whole > limit + 2 * SLACK for limit in most.values())  # or they prove nothing
    assert whole > few + 2 * SLACK
    place = OwnServer(str(tmp_path / "model"), engine_arguments(collective_ranks.ENGINE, shares_device=True), "float32")
    engine = NativeEngine(place, transfer="collective", spans=Spans())
    with closing(engine):
        # Weights that no request has used yet may be on disk only.
        request = ModelRequest("r", (5, 6, 7), SamplingParams(max_new_tokens=2), rng_key=0)
        asyncio.run(engine.agenerate(request))
        versions = itertools.count(1)
        for transfer, limit in most.items():
            engine._transport.close()
            engine._transport = TRANSPORTS.resolve(transfer)(torch.float32)
            pids = {"sender": os.getpid(), "engine": engine.pid}
            for _ in range(2):  # the first update imports modules: 35 MiB, or 150 with a CUDA build of torch
                with torch.no_grad():
                    learner.model.model.norm.weight.add_(1.0)
                before = {name: reset_peak(pid) for name, pid in pids.items()}
                published = publish(learner, engine, next(versions))
                grown = {name: peak(pid) - before[name] for name, pid in pids.items()}
            assert published.num_bytes == whole, transfer
            shown = {name: f"{each / MIB:.0f} MiB" for name, each in grown.items()}
            for name, each in grown.items():
                assert each <= limit + SLACK, f"{transfer}: {name} needs more than {limit / MIB:.0f} MiB: {shown}"
