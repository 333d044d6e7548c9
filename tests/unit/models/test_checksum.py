"""A text that stands for every bit of a model's weights."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import WeightsError
from headwater.models import checksum as module
from headwater.models.checksum import Checksum, checksum, dtype_of_checksum


def some(seed: int = 0, count: int = 1001, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_bit_counts(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    tensor = some(count=data.draw(st.integers(1, 70)), dtype=dtype)
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    for place in data.draw(st.sets(st.integers(0, len(raw) - 1), min_size=1, max_size=6)):
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum([("w", tensor)]) != checksum([("w", changed)])


def test_signs_and_places_count():
    tensor = some(count=64)
    assert len({checksum([("w", each)]) for each in (tensor, -tensor, tensor.flip(0), tensor.roll(2))}) == 4
    pair = torch.tensor([1.0, 2.0, 3.0, 4.0])
    swapped = [pair[[2, 3, 0, 1]], pair[[1, 0, 3, 2]], pair[[0, 1, 3, 2]], pair * torch.tensor([1, -1, 1, -1])]
    assert len({checksum([("w", each)]) for each in [pair, *swapped]}) == 5


def test_names_shapes_and_number_types_count():
    tensor = some(count=12)
    texts = [
        checksum([("w", tensor)]),
        checksum([("v", tensor)]),
        checksum([("w", tensor.view(3, 4))]),
        checksum([("w", tensor.view(4, 3))]),
        checksum([("w", tensor.view(torch.int32))]),
        checksum([("w", tensor), ("v", tensor)]),
        checksum([("w", tensor[:6]), ("v", tensor[6:])]),
        checksum([("w", torch.zeros(0))]),
        checksum([]),
    ]
    assert len(set(texts)) == len(texts)


def test_order_and_memory_do_not_count(monkeypatch):
    first, second = some(0, 999), some(1, 64).view(8, 8)
    expected = checksum([("a", first), ("b", second)])
    shifted = torch.cat([torch.zeros(1), first])[1:]
    transposed = second.T.contiguous().T
    assert not transposed.is_contiguous()
    assert checksum([("b", transposed), ("a", shifted)]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_checksum_of_a_cast_is_that_of_the_cast_tensor(dtype, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    module._multipliers.cache_clear()
    tensor = some(count=1003)
    assert checksum([("w", tensor)], dtype) == checksum([("w", tensor.to(dtype))])
    assert dtype_of_checksum(checksum([("w", tensor)], dtype)) is dtype
    changed = tensor.to(dtype, copy=True)
    changed[1001] *= -1
    assert checksum([("w", tensor)], dtype) != checksum([("w", changed)])
    module._multipliers.cache_clear()


def test_several_number_types_have_no_name():
    text = checksum([("a", some()), ("b", some(dtype=torch.bfloat16))])
    with pytest.raises(WeightsError, match="not of a single number type"):
        dtype_of_checksum(text)


def test_models_of_other_weights_differ():
    texts = [checksum(tiny.model(seed).named_parameters()) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_stream_of_buckets_has_the_checksum_of_all_tensors():
    tensors = [(f"w{number}", some(number, 100 + number)) for number in range(7)]
    for dtype in (None, torch.bfloat16):
        running = Checksum(dtype)
        for start in (4, 0, 2, 6):
            running.add(tensors[start : start + 2])
        assert running.text() == checksum(tensors, dtype)
        assert running.text() == running.text()


def test_a_device_is_waited_for_once(monkeypatch):
    """Each read of a GPU waits for the processes that share it."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    running = Checksum(torch.bfloat16)
    running.add((f"w{number}", some(number, 100)) for number in range(20))
    running.add([("empty", torch.zeros(0))])
    before, reads, tolist = running.text(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    sums = running.sums()
    assert len(reads) == 1
    assert (len(sums), len(sums["w3 bfloat16 (100,)"]), sums["empty bfloat16 (0,)"]) == (21, 4, {})
    assert Checksum.merged([sums]).text() == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_tensors_counted_together_have_the_same_checksum(dtype, monkeypatch):
    """On a GPU, many tensors are counted at once. The plain way is that of a CPU."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 256)
    monkeypatch.setattr(module, "_BATCH_BYTES", 1024)
    module._multipliers.cache_clear()
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (3, 5), (64,), (7, 31), (), (0, 4), (1000,), (33, 65)]
    tensors = [(str(shape), torch.randn(shape, generator=generator)) for shape in shapes]
    tensors.append(("transposed", torch.randn(9, 31, generator=generator).T))
    plain, together = Checksum(dtype), Checksum(dtype)
    plain.add(tensors)
    together.add_together((together._header(name, each.dtype, tuple(each.shape)), each) for name, each in tensors)
    assert together.sums() == plain.sums()
    assert together.text() == plain.text()
    tensors[6][1].view(torch.int32)[777] ^= 1 << 30
    damaged = Checksum(dtype)
    damaged.add_together((damaged._header(name, each.dtype, tuple(each.shape)), each) for name, each in tensors)
    assert damaged.text() != plain.text()
    module._multipliers.cache_clear()
