"""The cache that is limited by bytes."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.byte_cache import ByteCache

MAX_BYTES = 10
KEYS = st.sampled_from("abcdef")
ACTIONS = st.lists(st.tuples(st.sampled_from(["get", "put"]), KEYS, st.integers(0, 12), st.sets(KEYS)))


@given(ACTIONS)
def test_it_holds_what_a_plain_list_with_the_same_rules_holds(actions):
    cache: ByteCache[str, bytes] = ByteCache(MAX_BYTES, len)
    expected: list[tuple[str, bytes]] = []  # used longest ago first
    for action, key, size, in_use in actions:
        known = dict(expected).get(key)
        if known is not None:
            expected.remove((key, known))
            expected.append((key, known))
        if action == "get":
            assert cache.get(key) is known
            continue
        value = bytes(size)
        assert cache.put(key, value, in_use) is (value if known is None else known)
        if known is None and (size <= MAX_BYTES or key in in_use):
            expected.append((key, value))
            for old in [each for each in expected if each[0] not in in_use]:
                if sum(len(each) for _, each in expected) > MAX_BYTES:
                    expected.remove(old)
        assert cache.num_bytes == sum(len(each) for _, each in expected)
    assert {key: cache.get(key) for key in "abcdef"} == {key: dict(expected).get(key) for key in "abcdef"}


def test_values_are_loaded_once_and_those_used_longest_ago_are_dropped():
    cache: ByteCache[str, bytes] = ByteCache(MAX_BYTES, len)
    loaded = []

    def load(key: str) -> bytes:
        loaded.append(key)
        return key.encode() * 4

    for key in ("a", "b", "a", "c", "a", "b"):
        assert cache.get_or_load(key, lambda key=key: load(key)) == key.encode() * 4
    assert loaded == ["a", "b", "c", "b"]
    cache.clear()
    assert (cache.num_bytes, cache.get("a")) == (0, None)


def test_a_value_that_cannot_be_loaded_leaves_the_cache_as_it_was():
    cache: ByteCache[str, bytes] = ByteCache(MAX_BYTES, len)
    kept = cache.put("a", b"12345678")
    with pytest.raises(ZeroDivisionError):
        cache.get_or_load("b", lambda: b"1" * (1 // 0))
    assert cache.put("c", b"larger than all") == b"larger than all"
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (kept, None, None)


def test_a_copy_in_another_process_is_empty_and_has_the_same_limit():
    cache: ByteCache[str, bytes] = ByteCache(MAX_BYTES, len)
    cache.put("a", b"123")
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.max_bytes, copy.num_bytes, copy.get("a")) == (MAX_BYTES, 0, None)
    copy.put("b", b"12345678")
    copy.put("c", b"123")
    assert (copy.get("b"), copy.get("c")) == (None, b"123")


def test_threads_share_one_value_and_do_not_wait_while_another_loads():
    cache: ByteCache[str, list[int]] = ByteCache(MAX_BYTES, len)
    both = threading.Barrier(2, timeout=60)

    def load(number: int) -> list[int]:
        both.wait()  # only passed if the other thread loads at the same time
        return [number]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda number: cache.get_or_load("a", lambda: load(number)), range(2))
    assert first is second
    assert cache.num_bytes == 1


def test_many_threads_leave_the_count_of_bytes_right():
    cache: ByteCache[int, bytes] = ByteCache(100, len)

    def work(start: int) -> None:
        for number in range(start, start + 200):
            cache.put(number % 37, bytes(number % 37))
            cache.get((number * 7) % 37)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert cache.num_bytes == sum(len(value) for key in range(37) if (value := cache.get(key)) is not None) <= 100
