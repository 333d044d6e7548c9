"""Allocation, sharing and reuse of pages."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headwater.engine.pages import SCRATCH_PAGE, OutOfPages, PagePool, prefix_keys

TOTAL = 12
CHAINS = [[f"{chain}:{place}".encode() for place in range(5)] for chain in range(3)]
"""Three prompts of five full pages. A key identifies everything up to the end of its page."""


class Pool(RuleBasedStateMachine):
    """Compares the pool with a simple model: references per page, and the page registered under each key."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL + 1)
        self.references: Counter[int] = Counter()
        self.registered: dict[bytes, int] = {}

    @rule(target=held, count=st.integers(0, 6))
    def allocate(self, count):
        idle = set(self.pool._idle)
        free = TOTAL - len(self.in_use) - len(idle)
        pages = self.pool.allocate(count) if count <= self.pool.num_available else None
        if pages is None:
            return multiple()
        taken = pages.tolist()
        assert len(set(taken)) == count
        assert SCRATCH_PAGE not in taken
        assert not self.in_use & set(taken)
        # Registered pages are reused last, and then no longer found.
        assert len(set(taken) & idle) == max(0, count - free)
        self.registered = {key: page for key, page in self.registered.items() if page not in taken}
        self.references.update(taken)
        return pages

    @rule(more=st.integers(1, 5))
    def allocating_too_many_changes_nothing(self, more):
        before = self.books()
        with pytest.raises(OutOfPages):
            self.pool.allocate(self.pool.num_available + more)
        assert self.books() == before

    @rule(target=held, pages=held)
    def retain(self, pages):
        self.pool.retain(pages)
        self.references.update(pages.tolist())
        return pages.copy()

    @rule(pages=consumes(held))
    def release(self, pages):
        self.pool.release(pages)
        self.references.subtract(pages.tolist())

    @rule(several=st.lists(consumes(held), max_size=4))
    def release_all(self, several):
        self.pool.release_all(np.concatenate([np.zeros(0, np.int32), *(pages[::-1] for pages in several)]))
        for pages in several:
            self.references.subtract(pages.tolist())

    @rule(several=st.lists(consumes(held), max_size=4))
    def drop(self, several):
        self.pool.drop(np.concatenate([np.zeros(0, np.int32), *several]))
        for pages in several:
            self.references.subtract(pages.tolist())
        self.registered.clear()

    @rule(pages=held, chain=st.sampled_from(CHAINS))
    def register(self, pages, chain):
        count = min(len(pages), len(chain))
        self.pool.register(pages[:count], chain[:count])
        known = set(self.registered.values())
        for page, key in zip(pages[:count].tolist(), chain, strict=False):
            if key not in self.registered and page not in known:
                self.registered[key] = page
                known.add(page)

    @rule(target=held, chain=st.sampled_from(CHAINS), length=st.integers(0, 5))
    def match(self, chain, length):
        found = self.pool.match(chain[:length])
        expected = []
        for key in chain[:length]:
            if key not in self.registered:
                break
            expected.append(self.registered[key])
        assert found.tolist() == expected
        self.references.update(expected)
        return found

    @rule()
    def forget(self):
        self.pool.forget()
        self.registered.clear()
        assert all(not len(self._looked_up(chain)) for chain in CHAINS)

    def _looked_up(self, chain):
        found = self.pool.match(chain)
        self.pool.release(found)
        return found

    @property
    def in_use(self):
        return {page for page, count in self.references.items() if count > 0}

    def books(self):
        pool = self.pool
        free = pool._free[: pool._num_free].tolist()
        return free, list(pool._idle), pool._references.tolist(), dict(pool._page_of), dict(pool._key_of)

    @invariant()
    def every_page_is_in_exactly_one_place(self):
        free, idle, references, page_of, key_of = self.books()
        assert sorted([*free, *idle, *self.in_use]) == list(range(1, TOTAL + 1))
        assert references == [self.references[page] for page in range(TOTAL + 1)]
        assert self.pool.num_used == len(self.in_use)
        assert self.pool.num_available == TOTAL - len(self.in_use)
        assert {page: key for key, page in page_of.items()} == key_of
        assert page_of == self.registered
        assert set(np.flatnonzero(self.pool._is_remembered).tolist()) == set(key_of)
        assert set(idle) == set(key_of) - self.in_use


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_page_used_longest_ago_is_forgotten_first():
    pool = PagePool(4)
    pages = [pool.allocate(1) for _ in range(3)]
    for page, chain in zip(pages, CHAINS, strict=True):
        pool.register(page, chain[:1])
        pool.release(page)
    pool.release(pool.match(CHAINS[0][:1]))  # used again: now the second one is the oldest
    pool.allocate(1)
    assert [len(pool.match(chain[:1])) for chain in CHAINS] == [1, 0, 1]


def test_of_one_prefix_the_end_is_forgotten_before_the_start():
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.register(pages, CHAINS[0][:3])
    pool.release(pages)
    pool.allocate(1)
    assert len(pool.match(CHAINS[0][:3])) == 2


def test_a_pool_without_a_page_to_give_is_refused():
    with pytest.raises(ValueError, match="num_pages = 1"):
        PagePool(1)


TOKENS = st.lists(st.integers(0, 2**31), min_size=4, max_size=24)


@given(TOKENS, st.sampled_from([1, 2, 4, 8]), st.integers(-1, 50), st.data())
def test_a_prefix_key_depends_on_every_token_up_to_its_page_and_on_nothing_after(tokens, page_tokens, salt, data):
    prompt = np.array(tokens, np.int64)
    keys = prefix_keys(prompt, page_tokens, salt)
    assert len(keys) == len(tokens) // page_tokens
    assert len(set(keys)) == len(keys)
    changed = data.draw(st.integers(0, len(tokens) - 1))
    prompt[changed] += 1
    others = prefix_keys(prompt, page_tokens, salt)
    page = changed // page_tokens
    assert others[:page] == keys[:page]
    assert not set(others[page:]) & set(keys)


@given(TOKENS, st.integers(0, 1000), st.integers(0, 1000))
def test_a_prefix_key_differs_between_policy_versions(tokens, version, other):
    prompt = np.array(tokens, np.int64)
    same = prefix_keys(prompt, 2, version) == prefix_keys(prompt, 2, other)
    assert same == (version == other)
