"""Garbage collection is disabled inside the block, and enabled again afterwards."""

from __future__ import annotations

import gc

import pytest

from headwater.core.interpreter import garbage_put_off


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
