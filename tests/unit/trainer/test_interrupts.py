"""Signals are taken where the run is consistent."""

from __future__ import annotations

import os
import signal

import pytest

from headwater.trainer.interrupts import Interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_outside_a_deferred_block_is_immediate():
    with pytest.raises(KeyboardInterrupt), Interrupts(lambda: None).installed():
        interrupt()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_inside_a_deferred_block_waits_for_its_end(number):
    seen = []
    interrupts = Interrupts(lambda: seen.append("asked"))

    def block() -> None:
        with interrupts.deferred():
            os.kill(os.getpid(), number)
            seen.append("finished")
        seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interrupts.installed():
        block()
    assert seen == ["asked", "finished"]


def test_a_second_interrupt_is_obeyed_at_once():
    interrupts = Interrupts(lambda: None)
    seen = []

    def block() -> None:
        with interrupts.deferred():
            interrupt()
            seen.append("deferred")
            interrupt()
            seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interrupts.installed():
        block()
    assert seen == ["deferred"]


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda: None).installed():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
