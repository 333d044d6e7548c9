"""Garbage collection is disabled inside the block, and enabled again afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from headwater.core.interpreter import collect_young_garbage, garbage_put_off, sharing_interpreter


def test_it_is_on_again_once_the_last_one_has_left():
    with garbage_put_off():
        with garbage_put_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failure_turns_it_on_again():
    with pytest.raises(RuntimeError), garbage_put_off():
        raise RuntimeError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off():
    gc.disable()
    try:
        with garbage_put_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_collects_rarely_but_after_each_step():
    class Loop:
        def __init__(self) -> None:
            self.myself = self

    before = gc.get_threshold()
    with sharing_interpreter():
        assert gc.get_threshold()[0] > before[0]
        garbage = weakref.ref(Loop())
        collect_young_garbage()
        assert garbage() is None
    assert gc.get_threshold() == before
