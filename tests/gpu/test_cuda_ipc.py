"""Weights to a server on the same GPU, through GPU memory that both processes map."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer, engine_arguments
from headwater.config.schema import EngineConfig
from headwater.core.errors import WeightsError
from headwater.core.protocols import Bucket
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.models.load import load_model
from headwater.observe.spans import Spans
from headwater.weights import shared_memory
from headwater.weights.memory import in_buckets
from headwater.weights.publish import publish

MODEL = "tiny:qwen3"


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
