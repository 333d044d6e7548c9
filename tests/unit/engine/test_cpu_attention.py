"""Attention over pages on a CPU: what it copies, what it sees, and how broken tokens affect others."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from cases import case
from engine.engine_parts import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.config.schema import EngineConfig
from headwater.engine import kv_cache
from headwater.engine.attention import cpu
from headwater.engine.attention.cpu import BlockwiseAttention, CpuDecode, CpuPrefill
from headwater.engine.kv_cache import KVCache, num_pages_for
from headwater.engine.model_spec import ModelSpec

PAGE = 4
SCALE = 0.3


@cache
def model_spec():
    return ModelSpec.of(make_model())


class Copied(TorchDispatchMode):
    """Records the number of elements of every copy of pages."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "index_select" in str(func):
            self.sizes.append(result.numel())
        return result


class Filled:
    """A cache with sequences of these lengths in shuffled pages. Unused table entries are stale."""

    def __init__(self, lengths, seed=0):
        spec = model_spec()
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        longest = max(1, max(-(-length // PAGE) for length in lengths))
        self.cache = KVCache(spec, len(lengths) * longest + 1, PAGE)
        order = torch.randperm(len(lengths) * longest, generator=generator) + 1
        self.table = order.view(len(lengths), longest).to(torch.int32)
        shape = (spec.num_kv_heads, spec.head_dim)
        self.keys = [torch.randn(length, *shape, generator=generator) for length in lengths]
        self.values = [torch.randn(length, *shape, generator=generator) for length in lengths]
        for row, length in enumerate(lengths):
            if not length:
                continue  # a row without work
            self.cache.store(0, self.keys[row], self.values[row], self.slots(row, torch.arange(length)))
        self._query = torch.randn(sum(lengths) + len(lengths), spec.num_heads, spec.head_dim, generator=generator)

    def slots(self, row, places):
        return self.table[row].to(torch.int64)[places // PAGE] * PAGE + places % PAGE

    def break_unused(self, value):
        """Write ``value`` to all keys and values that no sequence uses, including the scratch page."""
        used = torch.cat([self.slots(row, torch.arange(length)) for row, length in enumerate(self.lengths)])
        every = torch.arange(self.cache.num_pages * PAGE)
        unused = every[~torch.isin(every, used)]
        broken = torch.full((len(unused), *self.keys[0].shape[1:]), value)
        self.cache.store(1, broken, broken, unused)  # a later layer breaks a token as well
        self.cache.store(0, broken, broken, unused)

    def decode(self, window=0):
        query = self._query[: len(self.lengths)]
        attention = CpuDecode(self.cache, self.table, torch.tensor(self.lengths, dtype=torch.int32))
        return attention(0, query, scale=SCALE, window=window)

    def prefill(self, chunks, window=0):
        """Prefill the last ``chunks[i]`` tokens of each sequence."""
        attention = CpuPrefill(self.cache, self.table, chunks, self.lengths)
        return attention(0, self._query[: sum(chunks)], scale=SCALE, window=window)

    def blockwise(self, window=0):
        positions = torch.tensor(self.lengths) - 1
        query = self._query[: len(self.lengths)]
        return BlockwiseAttention(self.cache, self.table, positions)(0, query, scale=SCALE, window=window)

    def expected(self, chunks, window=0):
        """The result by definition, query by query."""
        rows, query = [], iter(self._query)
        for row, (length, chunk) in enumerate(zip(self.lengths, chunks, strict=True)):
            for position in range(length - chunk, length):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                group = self._query.shape[1] // self.keys[row].shape[1]
                keys = self.keys[row][seen].repeat_interleave(group, 1)
                values = self.values[row][seen].repeat_interleave(group, 1)
                weights = (torch.einsum("hd,thd->ht", next(query), keys) * SCALE).softmax(-1)
                rows.append(torch.einsum("ht,thd->hd", weights, values))
        return torch.stack(rows)


@contextmanager
def little_memory(num_pages):
    """Limit copies to ``num_pages`` pages, and masks to a few queries."""
    page_bytes = 2 * KVCache(model_spec(), 2, PAGE).layer(0)[0][0].nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CPU_COPY_BYTES", num_pages * page_bytes)
        patch.setattr(cpu, "CPU_MASK_BYTES", 1000)
        yield


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, room=st.sampled_from([1, 7, 1000]), window=st.sampled_from([0, 5]), data=st.data())
def test_any_mixture_of_lengths_sees_its_own_tokens_and_no_others(lengths, room, window, data):
    chunks = [data.draw(st.integers(1, length)) for length in lengths]
    filled, ones = Filled(lengths), [1] * len(lengths)
    with little_memory(room):
        torch.testing.assert_close(filled.decode(window), filled.expected(ones, window))
        torch.testing.assert_close(filled.prefill(chunks, window), filled.expected(chunks, window))
    torch.testing.assert_close(filled.blockwise(window), filled.expected(ones, window))


@settings(max_examples=15, deadline=None)
@given(
    value=st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38]),
    lengths=LENGTHS,
    room=st.sampled_from([7, 1000]),
    window=st.sampled_from([0, 5]),
)
def test_what_unused_slots_hold_does_not_change_a_bit(value, lengths, room, window):
    sound, broken = Filled(lengths), Filled(lengths)
    broken.break_unused(value)
    with little_memory(room):
        assert torch.equal(broken.decode(window), sound.decode(window))
        assert torch.equal(broken.prefill(lengths, window), sound.prefill(lengths, window))
    assert torch.equal(broken.blockwise(window), sound.blockwise(window))


def test_a_broken_token_is_seen_by_those_after_it_and_by_no_other():
    for value, which in [(torch.nan, "keys"), (torch.inf, "values"), (torch.nan, "values")]:
        with case(value, which):
            sound, broken = Filled([20, 13]), Filled([20, 13])
            getattr(broken, which)[0][11] = value
            broken.cache.store(0, broken.keys[0], broken.values[0], broken.slots(0, torch.arange(20)))
            result, expected = broken.prefill([20, 13]), sound.prefill([20, 13])
            sees = torch.zeros(33, dtype=torch.bool)
            sees[11:20] = True
            assert torch.equal(result[~sees], expected[~sees])
            if which == "values":  # an infinite key may get a weight of zero
                assert not result[sees].isfinite().any(dim=(1, 2)).all()
            beyond = broken.prefill([20, 13], window=3)
            sees[14:] = False
            assert torch.equal(beyond[~sees], sound.prefill([20, 13], window=3)[~sees])
            assert torch.equal(broken.decode(window=3), sound.decode(window=3))
            assert torch.equal(broken.blockwise(window=3), sound.blockwise(window=3))


def test_a_slot_that_is_written_anew_is_sound_again_and_a_copied_page_is_not():
    cache = KVCache(model_spec(), 4, PAGE)
    sound = torch.ones(1, *cache.layer(0)[0].shape[2:])
    cache.store(1, sound, sound * torch.nan, torch.tensor([6]))
    cache.copy_pages(np.array([1]), np.array([3]))
    for layer in range(2):
        cache.store(layer, sound, sound, torch.tensor([6]))
    broken = cache.broken_in(torch.arange(4))
    assert broken is not None
    assert broken.nonzero().tolist() == [[3, 2]]
    cache.free()
    cache.allocate_again()
    assert cache.broken_in(torch.arange(4)) is None


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_decoding_copies_at_most_twice_what_the_rows_hold(lengths):
    filled = Filled(lengths)
    with Copied() as copied:
        filled.decode()
    pages = sum(max(1, -(-length // PAGE)) for length in lengths)
    page_size = filled.cache.layer(0)[0][0].numel()
    assert sum(copied.sizes) <= 2 * (2 * pages * page_size)


def test_rows_of_one_length_are_read_in_one_go():
    filled = Filled([30] * 20)
    with Copied() as copied:
        filled.decode()
    assert len(copied.sizes) == 2


def test_no_copy_is_larger_than_its_memory():
    for lengths in ([400] * 20, [400] + [9] * 60, list(range(1, 60))):
        filled = Filled(lengths)
        page_size = filled.cache.layer(0)[0][0].numel()
        with little_memory(150), Copied() as copied:
            filled.decode()
            filled.prefill([1] * len(lengths))
        assert max(copied.sizes) <= 150 * page_size, lengths


def test_what_attention_copies_is_no_part_of_the_cache(monkeypatch):
    spec = model_spec()

    def num_pages(free):
        monkeypatch.setattr(kv_cache, "free_bytes", lambda _: free)
        sizes = {"max_sequences": 10**4, "max_prefill_tokens": 8, "page_tokens": PAGE, "is_shared": False}
        return num_pages_for(spec, EngineConfig(memory_fraction=1.0), **sizes)

    room = 2 * kv_cache.CPU_COPY_BYTES + kv_cache.CPU_MASK_BYTES + kv_cache._workspace_bytes(spec, 10**4, 8)
    page_bytes = spec.kv_bytes_per_token * PAGE
    room += kv_cache._page_copy_bytes(page_bytes, 10**4)
    assert num_pages(room + 100 * page_bytes) == 101
