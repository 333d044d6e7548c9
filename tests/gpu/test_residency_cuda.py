"""Memory that leaves a CUDA device and returns: fixed addresses, CUDA graphs that stay valid, and the same bits."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from engine.engine_parts import LIMIT_S, bits, request, tokens_of
from learner.test_engine import experience
from test_training_cuda import actor, weights
from tiny import tokenizer

from headwater.config.schema import EngineConfig, LearnerConfig
from headwater.core.errors import WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.engine.engine import Engine
from headwater.learner import streamed_averages
from headwater.learner.optimizer import Optimizer, Residency
from headwater.models import virtual_memory
from headwater.models.load import load_model
from headwater.models.pinned import PinnedMemory
from headwater.models.virtual_memory import AddressRange, is_supported, mapped_bytes

CUDA = torch.device("cuda", 0)
CHUNK = 64 * 2**20
ASKED = [request(tokens_of(length), key, max_new_tokens=24) for key, length in enumerate((3, 40, 70))]


def own_bytes() -> int:
    """Memory of the device that this process holds. Free memory would also depend on other processes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() + mapped_bytes()


def is_backed(address: int) -> bool:
    """Whether the driver has mapped memory to an address."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_ulonglong()
    if driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)):
        return False
    assert driver.cuMemRelease(handle) == 0
    return True


def make_engine(**settings) -> Engine:
    model = load_model("tiny:qwen3", dtype="bfloat16", device="cuda", seed=0)
    return Engine(model, tokenizer(), EngineConfig(**{"kv_cache_gib": 0.25, "keep_addresses": True} | settings))


@pytest.fixture
def engine():
    made = make_engine()
    yield made
    made.close()


def test_this_device_has_fixed_addresses():
    assert is_supported(CUDA)


def test_memory_leaves_its_addresses_and_returns():
    # A sixteenth of the device: if memory stayed behind, 20 rounds would not fit, whatever other processes do.
    count = torch.cuda.get_device_properties(CUDA).total_memory // 16 // CHUNK * CHUNK // 4
    for _ in range(4):
        memory = AddressRange(4 * count, CUDA)
        tensor = memory.tensor((count,), torch.int32)
        place = tensor.data_ptr()
        for value in range(5):
            assert is_backed(place)
            memory.unmap()
            assert not is_backed(place)
            assert not memory.is_mapped
            memory.map()
            tensor.fill_(value)
            assert tensor.data_ptr() == place
            assert int(tensor.amin()) == int(tensor.amax()) == value
        del memory
        gc.collect()
        assert is_backed(place), "a tensor keeps its range"
        del tensor
        gc.collect()
        assert not is_backed(place), "the last tensor frees the range"


def test_a_graph_stays_valid_while_the_memory_is_away():
    memory = AddressRange(CHUNK, CUDA)
    weight, x = memory.tensor((64, 64), torch.float32), torch.randn(8, 64, device=CUDA)
    result = torch.empty(8, 64, device=CUDA)
    weight.normal_()
    torch.mm(x, weight, out=result)  # cuBLAS allocates its workspace outside of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(x, weight, out=result)
    for _ in range(3):
        memory.unmap()
        others = torch.full((CHUNK,), torch.nan, device=CUDA)  # takes the memory meanwhile
        del others
        torch.cuda.empty_cache()
        memory.map()
        weight.normal_()
        graph.replay()
        assert torch.equal(result, torch.mm(x, weight))


def test_a_range_that_does_not_fit_takes_nothing(monkeypatch):
    before, taken, call = mapped_bytes(), [], virtual_memory._call

    def third_piece_fails(name, *arguments):
        if name == "cuMemCreate" and len(taken) == 2:
            # More than the device has, so that other processes have what they need meanwhile.
            _, _, *others = arguments
            handle, size = ctypes.c_ulonglong(), ctypes.c_size_t(2 * torch.cuda.mem_get_info()[1] // CHUNK * CHUNK)
            return call(name, ctypes.byref(handle), size, *others)
        call(name, *arguments)
        if name == "cuMemMap":
            taken.append(arguments[0].value)
        return None

    monkeypatch.setattr(virtual_memory, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(virtual_memory, "_call", third_piece_fails)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        AddressRange(4 * CHUNK, CUDA)
    assert len(taken) == 2
    assert not any(is_backed(address) for address in taken)
    assert mapped_bytes() == before
    assert torch.ones(8, device=CUDA).sum() == 8, "the device still works"


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), ("kv_cache", "weights")], ids=str)
def test_an_engine_wakes_with_its_graphs(engine, tags, monkeypatch):
    for _ in range(3):  # captures the graphs of all row counts, also with prompts that are found in the cache
        expected = bits(engine.generate(ASKED))
    captured = []
    monkeypatch.setattr(engine._runner, "_capture", lambda *_: captured.append(1))
    for _ in range(2):
        before, mapped = own_bytes(), mapped_bytes()
        engine.sleep(tags)
        assert own_bytes() < before
        assert mapped_bytes() < mapped
        engine.wake(tags)
        assert bits(engine.generate(ASKED)) == expected
    assert not captured, "no graph is captured again"


def test_an_engine_without_fixed_addresses_generates_the_same(engine):
    expected = bits(engine.generate(ASKED))
    other = make_engine(keep_addresses=False)
    try:
        assert not other.capabilities.discards_weights
        assert bits(other.generate(ASKED)) == expected
        other.sleep()
        other.wake()
        assert bits(other.generate(ASKED)) == expected
    finally:
        other.close()


def test_discarded_weights_return_with_the_next_update(engine):
    expected, before = bits(engine.generate(ASKED)), mapped_bytes()
    new = dict(load_model("tiny:qwen3", dtype="bfloat16", device="cuda", seed=0).named_parameters())
    for version in (1, 2):
        engine.discard_weights()
        assert mapped_bytes() < before
        assert engine.status().needs_weights
        with pytest.raises(WeightsIncomplete):
            engine.weights_checksum()
        engine.sleep()
        engine.wake()
        engine.update_weights(WeightUpdate.of(version, new.items())).result(LIMIT_S)
        assert mapped_bytes() == before
        assert bits(engine.generate(ASKED)) == expected


def test_page_locked_blocks_are_copied_to_in_the_background():
    pinned = PinnedMemory(3 * CHUNK)
    homes = [pinned.empty(torch.Size((CHUNK // 4,)), torch.float32) for _ in range(3)]
    assert all(home.is_pinned() for home in homes)
    source = torch.randn(CHUNK // 4, device=CUDA)
    torch.cuda._sleep(200_000_000)
    homes[1].copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the host has not waited"
    done.synchronize()
    assert torch.equal(homes[1], source.cpu())


def test_tensors_leave_and_return_bitwise():
    tensors = [torch.randn(CHUNK // 8, device=CUDA) for _ in range(6)]
    tensors.append(tensors[0][: CHUNK // 16])  # a view of the same memory
    copies = [each.clone() for each in tensors]
    gc.collect()  # not while it is measured: learners of other tests may wait to be collected
    residency, before = Residency(CUDA), torch.cuda.memory_allocated()
    for _ in range(3):
        residency.release(tensors)
        assert before - torch.cuda.memory_allocated() >= 6 * CHUNK // 2
        residency.restore()
        residency.wait()
        assert all(torch.equal(one, other) for one, other in zip(tensors, copies, strict=True))
    assert residency.num_bytes_moved == 4 * 6 * CHUNK // 2, "unchanged values are copied to main memory once"
    tensors[1].add_(1)
    residency.changed()
    residency.copy_out(tensors)
    residency.release(tensors)
    residency.restore()
    residency.wait()
    assert torch.equal(tensors[1], copies[1] + 1)
    assert torch.cuda.memory_allocated() == before


def test_memory_of_dropped_tensors_is_not_used_again_before_their_values_have_returned():
    tensor = torch.ones(CHUNK // 4, device=CUDA)
    residency = Residency(CUDA)
    residency.release([tensor])
    with residency._on_stream():
        torch.cuda._sleep(400_000_000)  # the copy begins later
    residency.restore()
    del tensor, residency
    others = [torch.zeros(CHUNK // 4, device=CUDA) for _ in range(3)]
    torch.cuda.synchronize()
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_leaves_and_returns_bitwise(dtype):
    learner = actor(dtype=dtype, cuda_graphs="off")  # graphs do not return before the next update
    for seed in range(3):
        learner.update(experience(seed))
        gc.collect()  # learners of other tests
        before, allocated = weights(learner), torch.cuda.memory_allocated()
        learner.engine.prepare_offload()
        learner.engine.offload()
        assert torch.cuda.memory_allocated() < allocated
        learner.engine.onload()
        assert torch.equal(weights(learner), before)
        assert torch.cuda.memory_allocated() == allocated


@pytest.mark.parametrize("bucket", [1, 40_000, 1 << 29])
def test_streamed_averages_are_bitwise_those_on_the_device(bucket, monkeypatch):
    monkeypatch.setattr(streamed_averages, "BUCKET_BYTES", bucket)
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = [(50, 40), (7,), (300, 30), (1, 1), (64, 64), (2000,)]
    values = [torch.randn(shape, generator=generator, device=CUDA) for shape in shapes]
    optimizers, parameters = [], []
    for streams in (False, True):
        copies = [torch.nn.Parameter(value.clone()) for value in values]
        config = LearnerConfig(learning_rate=1e-2, weight_decay=0.1, offload_optimizer=streams)
        parameters.append(copies)
        optimizers.append(Optimizer(copies, config, 0))
    for _ in range(5):
        gradients = [torch.randn(shape, generator=generator, device=CUDA) for shape in shapes]
        for copies, optimizer in zip(parameters, optimizers, strict=True):
            for parameter, gradient in zip(copies, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step(0.0, float(optimizer.clip()))
    torch.cuda.synchronize()
    plain, streamed = optimizers
    for one, other in zip(*parameters, strict=True):
        assert torch.equal(one, other)
        here, there = plain.state_of(one), streamed.state_of(other)
        assert here.keys() == there.keys()
        assert there["exp_avg"].device.type == "cpu"
        assert all(torch.equal(here[name].cpu(), there[name].cpu()) for name in here)
    assert streamed.num_bytes_moved == 9 * 2 * 4 * sum(value.numel() for value in values), "the first step fetches none"


def test_steps_and_switches_take_no_memory_of_their_own():
    learner = actor(dtype=torch.bfloat16, offload_optimizer=True)
    engine = make_engine()
    try:
        used = []
        for version in range(1, 7):
            engine.wake(("kv_cache",))
            engine.generate(ASKED)
            engine.sleep(("kv_cache",))
            engine.discard_weights()
            learner.engine.onload()
            learner.update(experience(1))
            exported = load_model("tiny:qwen3", dtype="bfloat16", device="cuda", seed=0).named_parameters()
            engine.update_weights(WeightUpdate.of(version, exported)).result(LIMIT_S)
            learner.engine.prepare_offload()
            learner.engine.offload()
            gc.collect()
            used.append(torch.cuda.memory_allocated() + mapped_bytes())
        assert len(set(used[2:])) == 1
    finally:
        engine.close()


def test_frozen_weights_are_copied_to_main_memory_once():
    engine = actor(dtype=torch.bfloat16, lora_rank=4).engine
    before = [each.detach().float().sum().item() for each in engine.module.parameters()]
    for _ in range(3):
        engine.residency.changed()  # as an update does
        engine.offload()
        engine.onload()
    size = sum(each.nbytes for each in engine.module.parameters() if not each.requires_grad)
    assert 4 * size <= engine.frozen.num_bytes_moved < 5 * size  # there once, and back three times
    assert [each.detach().float().sum().item() for each in engine.module.parameters()] == before
