"""Samples of a prompt share its computation, also after an interruption, and large groups cost no more per sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.engine_parts import make_model, request, running, stepped, texts, tokens_of, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.engine import kv_cache
from headwater.engine.kv_cache import KVCache
from headwater.engine.model_spec import ModelSpec
from headwater.engine.sequence import EngineSequence

PROMPT = tokens_of(100)
FULL_PAGES = 96
"""Tokens of ``PROMPT`` in full pages of 16."""


def test_after_an_interruption_a_group_computes_its_prompt_once():
    group = [request(PROMPT, key, max_new_tokens=40) for key in range(8)]
    with stepped(max_prefill_tokens=16384) as slow:
        answers = [slow.submit(each) for each in group]
        slow.turn(3)
        before = slow.engine.metrics()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.finish()
        after = slow.engine.metrics()
        assert all(len(answer.result().output_tokens) == 40 for answer in answers)
    assert after.num_interrupted == 8
    computed = after.num_tokens_prefilled - before.num_tokens_prefilled
    own = 8 * (len(PROMPT) - FULL_PAGES + 40)
    assert computed <= FULL_PAGES + own
    assert after.num_tokens_cached - before.num_tokens_cached >= 7 * FULL_PAGES


def test_prompts_that_arrive_together_compute_a_common_start_once():
    prompts = [(*PROMPT[:FULL_PAGES], *tokens_of(10, seed)) for seed in range(6)]
    requests = [request(prompt, seed) for seed, prompt in enumerate(prompts)]
    with running(max_prefill_tokens=16384) as engine, running(prefix_cache=False) as plain:
        assert texts(engine.generate(requests)) == texts(plain.generate(requests))
        metrics = engine.metrics()
    assert metrics.num_tokens_prefilled == FULL_PAGES + 6 * 10
    assert metrics.num_tokens_cached == 5 * FULL_PAGES


@pytest.fixture
def reads(monkeypatch):
    """Records the sequences whose tokens were read one by one."""
    reads: list[EngineSequence] = []
    all_tokens = EngineSequence.all_tokens

    def noted(sequence):
        reads.append(sequence)
        return all_tokens(sequence)

    monkeypatch.setattr(EngineSequence, "all_tokens", noted)
    return reads


def test_members_that_wait_for_rows_are_not_touched_again_and_again(reads):
    with running(max_sequences=4) as engine:
        responses = engine.generate([request(PROMPT, key, max_new_tokens=2) for key in range(200)])
    assert len(responses) == 200
    assert len(reads) <= 2 * 200


def test_an_interruption_goes_through_no_tokens_one_by_one(reads):
    with stepped() as slow:
        for key in range(5):
            slow.submit(request(PROMPT, key, max_new_tokens=60))
        slow.turn(3)
        reads.clear()
        slow.engine.update_weights(weights(1, 1), "interrupt")
        slow.turn(3)
        assert slow.engine.metrics().num_interrupted == 5
        assert slow.engine.metrics().num_running == 5
        assert not reads


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=4))
def test_pages_for_all_samples_and_one_more_are_enough_for_groups(groups):
    """Groups are (prompt tokens, samples, new tokens). Each sample has a private copy of a partly filled page."""
    requests = [
        request(tokens_of(num_prompt, seed=number), key, f"{number}/{key}", max_new_tokens=num_new)
        for number, (num_prompt, num_samples, num_new) in enumerate(groups)
        for key in range(num_samples)
    ]
    num_pages = sum(-(-(len(each.input_tokens) + each.sampling.max_new_tokens - 1) // 4) for each in requests) + 1
    with running(num_pages=num_pages, max_sequences=len(requests)) as engine:
        responses = engine.generate(requests)
        assert engine.metrics().num_preempted == 0
    assert [len(each.output_tokens) for each in responses] == [each.sampling.max_new_tokens for each in requests]


class Largest(TorchDispatchMode):
    """The size in bytes of the largest tensor that was created inside it."""

    def __init__(self, storage):
        super().__init__()
        self.num_bytes = 0
        self._storage = storage.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() != self._storage:
                self.num_bytes = max(self.num_bytes, each.numel() * each.element_size())
        return result


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_copying_pages_needs_no_more_than_the_memory_that_was_set_aside(num_copies, num_at_once, random):
    """Copies are made in order: a page that is a source may be the target of a later copy."""
    spec = ModelSpec.of(make_model())
    cache = KVCache(spec, 64, 4)
    page_bytes = spec.kv_bytes_per_token * 4
    generator = torch.Generator().manual_seed(random.randrange(100))
    for layer in range(spec.num_layers):
        for each in cache.layer(layer):
            each.copy_(torch.randn(each.shape, generator=generator))
    targets = random.sample(range(64), num_copies)
    written: set[int] = set()
    sources = []
    for target in targets:
        sources.append(random.choice([page for page in range(64) if page not in written and page != target]))
        written.add(target)
    expected = cache._storage.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[:, :, target] = expected[:, :, source]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "_PAGE_COPY_BYTES", num_at_once * page_bytes)
        set_aside = kv_cache._page_copy_bytes(page_bytes, 1000)
        with Largest(cache._storage) as largest:
            cache.copy_pages(np.array(sources, np.int64), np.array(targets, np.int64))
    assert torch.equal(cache._storage, expected)
    assert largest.num_bytes <= set_aside
