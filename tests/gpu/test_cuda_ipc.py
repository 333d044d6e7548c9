"""Weights to a server on the same GPU, through GPU memory that both processes map."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from integration.test_transfer_memory import peak, reset_peak
from transformers import AutoModelForCausalLM

from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer, engine_arguments
from headwater.config.schema import EngineConfig
from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.builtin.tiny import Preset, build_config
from headwater.models.load import load_model, load_tokenizer, save_model
from headwater.observe.spans import Spans
from headwater.weights import shared_memory
from headwater.weights.memory import in_buckets
from headwater.weights.publish import publish

MODEL = "tiny:qwen3"
MIB = 2**20
SHAPE = Preset(
    "qwen2", hidden_size=1024, intermediate_size=4096, num_layers=16, num_heads=8, num_kv_heads=8, head_dim=128
)
"""1 GiB in float32."""
SLOT = 16 * MIB
"""The size of the largest tensor."""
SLACK = 384 * MIB
"""For what is not weights: kernels that the first update loads, blocks of torch's allocator, Python modules."""


class Policy:
    """As much of a learner as publishing needs."""

    def __init__(self) -> None:
        self.model = load_model(MODEL, dtype="float32", device="cuda", seed=1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self.model.named_parameters()}

    def export(self) -> Iterator[Bucket]:
        return in_buckets(((name, each.detach()) for name, each in self.model.named_parameters()), max_bytes=2**18)

    @torch.no_grad()
    def train(self) -> None:
        for each in self.model.parameters():
            each.mul_(1.01)


def test_every_version_arrives_and_a_process_that_replaces_the_first_gets_it_again(monkeypatch):
    """``publish`` compares checksums over every bit. Small slots, so that each is filled many times."""
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 2**18)
    arguments = ["--device", "cuda", *engine_arguments(EngineConfig(kv_cache_gib=0.1), shares_device=True)]
    policy = Policy()
    with closing(NativeEngine(OwnServer(MODEL, arguments, "bfloat16"), transfer="cuda_ipc", spans=Spans())) as engine:
        checksums = set()
        for version in (1, 2, 3):
            policy.train()
            checksums.add(publish(policy, engine, version).serving)
            assert engine.get_version() == version
        assert len(checksums) == 3
        engine._server.keeper.kill("a test ends the process")
        torch.cuda.synchronize()
        policy.train()
        assert publish(policy, engine, 4).serving == engine.weights_checksum()
        request = ModelRequest("r", (5, 6, 7), SamplingParams(max_new_tokens=4, ignore_end=True), rng_key=0)
        assert asyncio.run(engine.agenerate(request)).output_versions == (4, 4, 4, 4)
        policy.model.cpu()
        with pytest.raises(WeightsError, match="not on a GPU"):
            publish(policy, engine, 5)


@contextmanager
def most_used(found: list[int]) -> Iterator[None]:
    """Append how much more memory of the GPU all processes use at most within the block."""
    is_over = threading.Event()
    free_before, _ = torch.cuda.mem_get_info()

    def look() -> None:
        least = free_before
        while not is_over.wait(0.0005):
            least = min(least, torch.cuda.mem_get_info()[0])
        found.append(free_before - least)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_neither_process_holds_a_second_copy_of_the_weights_on_the_gpu_or_in_main_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", SLOT)
    policy = Policy()
    policy.model = AutoModelForCausalLM.from_config(build_config(SHAPE)).eval()
    save_model(policy.model, load_tokenizer("tiny:qwen2"), tmp_path / "model")
    policy.model.cuda()
    whole = sum(each.nbytes for each in policy.model.parameters())
    limit = shared_memory.NUM_SLOTS * SLOT
    assert whole > 2 * (limit + SLACK)  # or it proves nothing
    arguments = ["--device", "cuda", *engine_arguments(EngineConfig(kv_cache_gib=0.1), shares_device=True)]
    place = OwnServer(str(tmp_path / "model"), arguments, "float32")
    with closing(NativeEngine(place, transfer="cuda_ipc", spans=Spans())) as engine:
        request = ModelRequest("r", (5, 6, 7), SamplingParams(max_new_tokens=4, ignore_end=True), rng_key=0)
        asyncio.run(engine.agenerate(request))  # weights that no request has used yet may be on disk only
        torch.cuda.synchronize()
        pids = {"sender": os.getpid(), "engine": engine.pid}
        before = {name: reset_peak(pid) for name, pid in pids.items()}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated, on_gpu = torch.cuda.memory_allocated(), list[int]()
        with most_used(on_gpu):
            for version in (1, 2):
                policy.train()
                assert publish(policy, engine, version).num_bytes == whole
        found = {
            "the sender's tensors": torch.cuda.max_memory_allocated() - allocated,
            **{f"main memory of the {name}": peak(pid) - before[name] for name, pid in pids.items()},
        }
        if "PYTEST_XDIST_WORKER" not in os.environ:  # other tests use the GPU there, and all memory in use counts
            found["the GPU"] = max(on_gpu)
        shown = {name: f"{each / MIB:.0f} MiB" for name, each in found.items()}
        assert all(each <= limit + SLACK for each in found.values()), shown
