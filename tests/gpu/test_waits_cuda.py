"""The host does not wait for a CUDA device between the passes of an update, nor between those for log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from learner.test_engine import experience
from test_training_cuda import actor

from headwater.learner.actor import Actor
from headwater.models.upload import upload

CUDA = torch.device("cuda")


def refuse_waits(learner: Actor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From the first pass to the end of the last, torch raises an error when the host has to wait."""
    sizes: list[int] = []
    packs = learner.engine.packs

    def refusing(*arguments: Any) -> Iterator[Any]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for pack, counts in packs(*arguments):
                sizes.append(len(pack.input_ids))
                yield pack, counts
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(learner.engine, "packs", refusing)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_no_pass_waits(dtype, share_prompts, monkeypatch):
    learner = actor(dtype=dtype, share_prompts=share_prompts, max_tokens_per_microbatch=24)
    data = experience(1, rows=16)
    learner.engine.compute(data)  # compiles and allocates, which may wait
    learner.update(data)
    sizes = refuse_waits(learner, monkeypatch)
    learner.update(data)
    assert len(sizes) > 3
    learner.engine.compute(data)


def test_what_was_uploaded_arrives_as_it_was():
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 99, (1000,), generator=generator),
        torch.rand(7, 3, generator=generator)[:, ::2],
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int32),
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrived = upload(tensors, CUDA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for here, there in zip(tensors, arrived, strict=True):
        assert there.is_cuda
        assert torch.equal(here, there.cpu())
