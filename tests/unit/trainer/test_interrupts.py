"""Signals are handled where the run is consistent."""

from __future__ import annotations

import os
import signal

import pytest

from headwater.core.interpreter import Interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_outside_a_deferred_block_is_immediate():
    with pytest.raises(KeyboardInterrupt), Interrupts(lambda doing: None).installed():
        interrupt()


@pytest.fixture(autouse=True)
def hang_up_restored():
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_inside_a_deferred_block_waits_for_its_end(number):
    seen = []
    interrupts = Interrupts(seen.append)

    def block() -> None:
        with interrupts.deferred("this update"):
            os.kill(os.getpid(), number)
            seen.append("finished")
        seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interrupts.installed():
        block()
    assert seen == ["this update", "finished"]


def test_a_second_interrupt_is_immediate():
    interrupts = Interrupts(lambda doing: None)
    seen = []

    def block() -> None:
        with interrupts.deferred("this update"):
            interrupt()
            seen.append("deferred")
            interrupt()
            seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interrupts.installed():
        block()
    assert seen == ["deferred"]


def test_a_second_interrupt_is_not_raised_once_more():
    interrupts = Interrupts(lambda doing: None)
    seen = []

    def update() -> None:
        with interrupts.deferred("this update"):
            interrupt()
            interrupt()

    with interrupts.installed():
        with pytest.raises(KeyboardInterrupt):
            update()
        with interrupts.deferred("this checkpoint"):
            seen.append("saved")
        seen.append("went on")
    assert seen == ["saved", "went on"]


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda doing: None).installed():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_repeated_hang_ups_do_not_stop_a_deferred_block(first):
    """It sends a signal, and its shell sends the same one again."""
    interrupts = Interrupts(lambda doing: None)
    seen = []

    def block() -> None:
        with interrupts.deferred("this update"):
            for number in (first, signal.SIGHUP, signal.SIGHUP):
                os.kill(os.getpid(), number)
            seen.append("finished")
        seen.append("went on")

    with pytest.raises(KeyboardInterrupt), interrupts.installed():
        block()
    os.kill(os.getpid(), signal.SIGHUP)  # ignored from now on
    assert seen == ["finished"]


def test_a_hang_up_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts(lambda doing: None).installed():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
