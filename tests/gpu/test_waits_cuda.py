"""The host does not wait for a CUDA device between the passes of an update, nor between those for log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from learner.test_engine import experience
from test_training_cuda import actor, weights

from headwater.core.learner import MEASURES_ITSELF
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


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_an_update_that_measures_itself_waits_for_no_log_probs(cuda_graphs, monkeypatch):
    """Those of the second mini-batch stay on the device; the update is the one from log-probs that a pass computed."""
    both = [
        actor(num_minibatches=2, max_tokens_per_microbatch=24, cuda_graphs=cuda_graphs, old_logprobs="recompute")
        for _ in range(2)
    ]
    data = experience(1, rows=16)
    alone = data.select(sorted(set(data.batch.keys()) - {"old_logprobs"}))
    alone = alone.with_columns(meta_info={MEASURES_ITSELF: True})
    for learner in both:  # compiles, records and allocates, which may wait
        learner.engine.compute(data)
        learner.update(alone)
    old = both[0].engine.compute(alone)["logprobs"]
    expected = both[0].update(alone.with_columns(tensors={"old_logprobs": old}))
    sizes = refuse_waits(both[1], monkeypatch)
    stats = both[1].update(alone)
    assert len(sizes) > 3
    assert stats["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    torch.testing.assert_close(weights(both[1]), weights(both[0]), atol=1e-4, rtol=1e-3)


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
