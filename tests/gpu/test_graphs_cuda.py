"""Passes as CUDA graphs: the numbers of the same kernels launched one by one, and close to those without filling up."""

from __future__ import annotations

import gc

import pytest
import torch
from learner.test_engine import experience
from learner.test_graphs import PlainRecorder
from learner.test_packing import batch, packs
from test_training_cuda import actor, gradient, weights

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.learner.engine import TrainEngine
from headwater.learner.graph_recorder import CudaRecorder, PassRecorder
from headwater.learner.graphs import PassGraphs
from headwater.learner.lora import without_adapters
from headwater.models.capture import capturing

CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def passes(engine: TrainEngine, recorder: PassRecorder, sizes=(2, 8, 2, 20, 8)) -> list[torch.Tensor]:
    """Outputs and gradients of packs of several shapes, in which shapes repeat."""
    module, graphs = engine.module, PassGraphs(engine.module, CUDA, recorder)
    found = []
    try:
        for number, size in enumerate(sizes):
            (pack,) = packs(batch(number, num_groups=size))
            made = graphs(graphs.filled(pack, pack.to(CUDA)))
            assert made is not None, "the pass could not be recorded; see the log"
            found += [each.detach().clone() for each in made.values()]
            (made["logprobs"].sum() + 0.1 * made["entropy"].square().sum()).backward()
            with torch.no_grad():
                found += [graphs(graphs.filled(pack, pack.to(CUDA)))["logprobs"].clone()]
            trained = [each for each in module.parameters() if each.requires_grad]
            if module.copies is not None:
                module.copies.put_back()
                trained = [each for each in module.parameters() if each.requires_grad]
            found += [each.grad.clone() for each in trained]
            for each in trained:
                each.grad = None
    finally:
        graphs.forget()
    return found


@DTYPES
def test_a_graph_computes_what_its_kernels_compute_one_by_one(dtype):
    """To the bit: both compute the same filled-up packs."""
    recorded, plain = (
        passes(actor(dtype=dtype).engine, recorder) for recorder in (CudaRecorder(CUDA), PlainRecorder())
    )
    assert len(recorded) == len(plain)
    for ours, theirs in zip(recorded, plain, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs)


@DTYPES
def test_repeated_graphs_have_the_same_bits(dtype):
    engine, recorder = actor(dtype=dtype).engine, CudaRecorder(CUDA)
    first, again = (passes(engine, recorder) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    ("settings", "dtype", "lowest"),
    [
        ({}, torch.bfloat16, 0.999),
        ({"max_tokens_per_microbatch": 60}, torch.bfloat16, 0.999),
        ({"lora_rank": 4, "fused_layers": False}, torch.bfloat16, 0.998),
        ({}, torch.float32, 0.99999),
    ],
    ids=["bfloat16", "accumulated", "adapters", "float32"],
)
def test_the_gradient_of_an_update_is_the_one_without_graphs(share_prompts, settings, dtype, lowest):
    data = batch(num_groups=8)
    advantages = torch.randn(len(data), 1, generator=torch.Generator().manual_seed(0)) * data.batch["response_mask"]
    data = data.with_columns(tensors={"advantages": advantages})
    found = []
    for how in ("auto", "off"):
        learner = actor(dtype=dtype, share_prompts=share_prompts, cuda_graphs=how, **settings)
        found.append(gradient(learner, data))
        if how == "auto":
            assert learner.engine.graphs is not None
            assert learner.engine.graphs.num_kept >= 2
    ours, theirs = found
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > lowest
    assert ours.norm() == pytest.approx(theirs.norm(), rel=0.02)


@DTYPES
def test_updates_follow_those_without_graphs(dtype):
    recorded, plain = actor(dtype=dtype), actor(dtype=dtype, cuda_graphs="off")
    for seed in (1, 2, 3, 4):
        ours, theirs = recorded.update(experience(seed)), plain.update(experience(seed))
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=3e-2, abs=3e-3)
    # AdamW's first steps have the size of the rate also where a gradient is nearly zero.
    assert (weights(recorded) - weights(plain)).abs().mean() < 2e-4
    graphs = recorded.engine.graphs
    assert graphs is not None
    assert graphs.num_kept > 0
    after = [each.engine.compute(experience(5))["logprobs"] for each in (recorded, plain)]
    torch.testing.assert_close(*after, atol=0.05, rtol=0.05)


def test_python_may_discard_a_graph_while_another_one_is_recorded():
    """Without a limit on collection, the second recording would fail: an engine or learner is often part of a cycle."""
    numbers = torch.zeros(4, device=CUDA)
    old = CudaRecorder(CUDA).record([lambda: numbers.add_(1)])
    kept: list[list[object]] = []

    def action() -> None:
        cycle: list[object] = [old.pop()] if old else []
        cycle.append(cycle)
        del cycle
        kept.extend([] for _ in range(20 * gc.get_threshold()[0]))  # more than enough for a collection
        numbers.mul_(2)

    new = torch.cuda.CUDAGraph()
    with capturing(new, pool=None, stream=torch.cuda.Stream()):
        action()
    numbers.fill_(3)
    new.replay()
    assert numbers.tolist() == [6.0] * 4
    assert gc.isenabled()


@DTYPES
def test_graphs_are_recorded_again_after_the_learner_was_away(dtype):
    learner, twin = actor(dtype=dtype), actor(dtype=dtype)
    for each in (learner, twin):
        each.update(experience(1))
    before = torch.cuda.memory_allocated()
    learner.engine.offload()
    assert learner.engine.graphs is not None
    assert learner.engine.graphs.num_kept == 0
    assert torch.cuda.memory_allocated() < before
    held = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)  # the weights return to other addresses
    learner.engine.onload()
    for each in (learner, twin):
        each.update(experience(2))
    assert torch.equal(weights(learner), weights(twin))
    del held


def test_without_its_adapters_a_model_is_its_own_reference():
    learner = actor(dtype=torch.bfloat16, lora_rank=4)
    data = experience(3)
    start = learner.engine.compute(data)["logprobs"]
    for seed in range(3):
        learner.update(experience(seed))
    moved = learner.engine.compute(data)["logprobs"]
    with without_adapters(learner.engine.module):
        reference = learner.engine.compute(data)["logprobs"]
    assert not torch.allclose(moved, start, atol=1e-2)
    torch.testing.assert_close(reference, start, atol=0.05, rtol=0.05)


def test_a_run_with_graphs_learns():
    learner = actor(dtype=torch.bfloat16)
    data = experience(2)
    data = data.with_columns(tensors={"advantages": data.batch["response_mask"].clone()})
    sums = []
    for _ in range(8):
        old = learner.engine.compute(data)["logprobs"]
        sums.append(float(old.sum()))
        learner.update(data.with_columns(tensors={"old_logprobs": old}))
    assert sums[-1] > sums[0] + 1
    assert learner.engine.graphs is not None
    assert learner.engine.graphs.num_kept == 2  # one with gradients, one without


def test_after_a_recording_that_fails_torch_works_as_before():
    """The stream, random numbers, the allocator, and further recordings."""
    learner = actor(dtype=torch.bfloat16)
    engine, stream = learner.engine, torch.cuda.current_stream()
    assert engine.graphs is not None
    forward = engine.module.computed

    def reads_on_the_host(*arguments):
        made = forward(*arguments)
        made["logprobs"].sum().item()
        return made

    engine.module.computed = reads_on_the_host
    data = experience(2)
    computed = engine.compute(data)["logprobs"]
    assert engine.graphs.num_kept == 0
    assert torch.cuda.current_stream() == stream
    assert torch.rand(8, device=CUDA).unique().numel() > 1, "random numbers can be drawn"
    held = torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (256 << 20), "torch returns memory to the device"
    torch.testing.assert_close(computed, actor(device="cpu").engine.compute(data)["logprobs"], atol=0.1, rtol=0.1)
    assert learner.update(data.with_columns(tensors={"old_logprobs": computed}))["skipped_steps"] == 0
    other = actor(dtype=torch.bfloat16).engine
    torch.testing.assert_close(other.compute(data)["logprobs"], computed, atol=0.1, rtol=0.1)
    assert other.graphs is not None
    assert other.graphs.num_kept == 1


def test_graphs_of_many_shapes_share_their_memory():
    engine = actor(dtype=torch.bfloat16).engine
    assert engine.graphs is not None
    torch.cuda.synchronize()

    def likelihood(outputs, data):
        return PolicyLoss(-outputs["logprobs"])

    def step(num_groups: int) -> None:
        engine.train_step(batch(1, num_groups=num_groups), likelihood)
        gc.collect()
        torch.cuda.empty_cache()

    step(40)
    largest = torch.cuda.memory_reserved()
    recorder = engine.graphs._recorder
    held = recorder.num_bytes
    assert 2**20 < held < largest, "what the graphs hold is known"
    for num_groups in (30, 20, 10, 5):
        step(num_groups)
    assert engine.graphs.num_kept == 5
    assert torch.cuda.memory_reserved() < 1.5 * largest
    assert held <= recorder.num_bytes < 2 * held
    reserved = torch.cuda.memory_reserved()
    engine.graphs.forget()
    gc.collect()
    torch.cuda.empty_cache()
    assert recorder.num_bytes == 0
    assert torch.cuda.memory_reserved() < reserved, "memory returns with the last graph"
