"""Named waits: what they return, when they speak, when they give up, and what others see of them meanwhile."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from headwater.core import waits
from headwater.core.errors import WaitTimeout
from headwater.core.waits import OpenWait, named_wait, open_waits, start_in_thread, wait_for_future, wait_until


def eventually(read, seconds=120.0):
    """What ``read`` answers, once that is true."""
    deadline = time.monotonic() + seconds
    while not (answer := read()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
    return answer


def of_kind(kind):
    return [each for each in open_waits() if each.kind == kind]


class Waiting:
    """A thread in ``wait_until``, and what it waits for."""

    def __init__(self, kind, describe=lambda: "waiting", **limits):
        self.condition = threading.Condition()
        self.value = None
        self.result = Future()
        limits = {"hard_limit_s": 600.0, **limits}

        def work():
            try:
                with self.condition:
                    found = wait_until(self.condition, lambda: self.value, describe, kind=kind, **limits)
                self.result.set_result(found)
            except WaitTimeout as error:
                self.result.set_exception(error)

        self.thread = threading.Thread(target=work, name=f"thread of {kind}", daemon=True)
        self.thread.start()

    def give(self, value):
        with self.condition:
            self.value = value
            self.condition.notify_all()
        return self.result.result(120)


def test_a_thread_gets_what_the_predicate_answers():
    waiting = Waiting("answer")
    eventually(lambda: of_kind("answer"))
    assert waiting.give("seven") == "seven"
    eventually(lambda: not of_kind("answer"))


def test_nothing_is_waited_for_that_is_there_already():
    condition = threading.Condition()
    with condition:
        assert wait_until(condition, lambda: [1], lambda: "", kind="there", hard_limit_s=0) == [1]
    done: Future[int] = Future()
    done.set_result(2)
    assert wait_for_future(done, lambda: "", kind="there", hard_limit_s=0) == 2


def test_a_condition_nobody_notifies_is_looked_at_all_the_same():
    condition = threading.Condition()
    began = time.monotonic()
    with condition:
        assert wait_until(condition, lambda: time.monotonic() > began + 0.1, lambda: "", kind="quiet", hard_limit_s=600)


def test_a_predicate_may_end_the_wait():
    condition = threading.Condition()

    def predicate():
        raise KeyError("the engine is gone")

    with condition, pytest.raises(KeyError, match="gone"):
        wait_until(condition, predicate, lambda: "", kind="ended", hard_limit_s=600)
    assert not of_kind("ended")


def test_threads_speak_at_every_soft_limit_and_give_up_at_the_hard_one(caplog, monkeypatch):
    counted = iter(range(100))
    condition, clock = threading.Condition(), [0.0]

    def wait(timeout):
        clock[0] += timeout
        return False

    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    condition.wait = wait
    with (
        caplog.at_level(logging.WARNING),
        condition,
        pytest.raises(WaitTimeout, match=r"^gave up after 32 s: 6 of 8 groups$"),
    ):
        wait_until(
            condition,
            lambda: False,
            lambda: f"{next(counted)} of 8 groups",
            kind="batch",
            soft_limit_s=5.0,
            hard_limit_s=32.0,
        )
    spoken = [record.getMessage() for record in caplog.records if "of 8 groups" in record.getMessage()]
    assert spoken == [f"still waiting after {5 * number + 5} s: {number} of 8 groups" for number in range(6)]
    assert not of_kind("batch")


def test_a_future_gives_its_result_its_error_and_its_cancellation():
    result: Future[int] = Future()
    threading.Timer(0.05, result.set_result, [5]).start()
    assert wait_for_future(result, lambda: "", kind="future", hard_limit_s=600) == 5
    # An error of the work is not mistaken for a wait that is over.
    failed: Future[int] = Future()
    threading.Timer(0.05, failed.set_exception, [TimeoutError("of the work")]).start()
    with pytest.raises(TimeoutError, match="of the work"):
        wait_for_future(failed, lambda: "", kind="future", hard_limit_s=600)
    cancelled: Future[int] = Future()
    threading.Timer(0.05, cancelled.cancel).start()
    with pytest.raises(CancelledError):
        wait_for_future(cancelled, lambda: "", kind="future", hard_limit_s=600)


def test_a_future_that_is_late_is_left_to_its_owner():
    late: Future[int] = Future()
    with pytest.raises(WaitTimeout, match=r"gave up after \d+ s: pausing"):
        wait_for_future(late, lambda: "pausing", kind="weights", hard_limit_s=0.05)
    assert late.cancel()


def test_the_thread_that_waits_may_do_something_meanwhile(monkeypatch):
    """About once a second, and without the lock of what it waits for."""
    monkeypatch.setattr(waits, "_LOOK_S", 0.01)
    condition, future, calls = threading.Condition(), Future(), []

    def look():
        with ThreadPoolExecutor(1) as other:  # another thread, which needs the lock
            calls.append(other.submit(lambda: condition.acquire(timeout=120) and condition.release()))

    with condition:
        limits = {"kind": "test", "hard_limit_s": 60.0, "while_waiting": look}
        assert wait_until(condition, lambda: len(calls) >= 2, lambda: "waiting", **limits)
    assert all(call.result() is None for call in calls)
    limits["while_waiting"] = lambda: future.done() or future.set_result(7)
    assert wait_for_future(future, lambda: "waiting", **limits) == 7


def test_the_board_shows_kind_age_limit_thread_and_the_present_state():
    done = 0
    waiting = Waiting("board", lambda: f"{done} of 8 groups", hard_limit_s=math.inf)
    (before,) = eventually(lambda: of_kind("board"))
    done = 5
    time.sleep(0.05)
    (after,) = of_kind("board")
    assert (before.description, after.description) == ("0 of 8 groups", "5 of 8 groups")
    assert 0 <= before.seconds < after.seconds
    assert (after.hard_limit_s, after.thread_name) == (math.inf, "thread of board")
    waiting.give(True)


def test_the_longest_wait_comes_first():
    waits = []
    for number in range(3):
        waits.append(Waiting(f"order-{number}"))
        eventually(lambda number=number: of_kind(f"order-{number}"))
    assert [each.kind for each in open_waits() if each.kind.startswith("order-")] == ["order-0", "order-1", "order-2"]
    for waiting in waits:
        waiting.give(True)


def test_a_description_that_raises_breaks_neither_the_wait_nor_the_reader(caplog):
    def describe():
        raise RuntimeError("dictionary changed size during iteration")

    waiting = Waiting("torn", describe, soft_limit_s=0.05)
    (seen,) = eventually(lambda: of_kind("torn"))
    assert isinstance(seen, OpenWait)
    assert seen.description == "torn (description failed: RuntimeError: dictionary changed size during iteration)"
    eventually(lambda: "torn (description failed" in caplog.text)
    assert waiting.give(1) == 1


def test_an_event_loop_that_waits_is_on_the_board_too():
    async def wait():
        release = asyncio.Event()
        waiting = asyncio.ensure_future(
            named_wait(release.wait(), lambda: "engine 1 loads", kind="engine_start", hard_limit_s=math.inf)
        )
        await asyncio.sleep(0.01)
        seen = of_kind("engine_start")
        release.set()
        await waiting
        return seen, of_kind("engine_start")

    seen, left = asyncio.run(wait())
    assert [each.description for each in seen] == ["engine 1 loads"]
    assert left == []


def test_a_wait_that_is_cancelled_leaves_the_board():
    async def wait():
        waiting = asyncio.ensure_future(
            named_wait(asyncio.sleep(60), lambda: "", kind="cancelled", hard_limit_s=60, soft_limit_s=math.inf)
        )
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(wait())
    assert not of_kind("cancelled")


def test_a_soft_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="soft_limit_s = 0"):
        wait_for_future(Future(), lambda: "", kind="x", hard_limit_s=1, soft_limit_s=0)


def test_waits_are_cheap():
    condition = threading.Condition()

    def once():
        start = time.thread_time()
        for _ in range(2000):
            answers = iter((False, True))
            wait_until(condition, lambda answers=answers: next(answers), lambda: "", kind="cheap", hard_limit_s=600)
        return (time.thread_time() - start) / 2000

    # Without its own lock a condition's wait is all that costs; here it returns at once.
    condition.wait = lambda timeout: True
    with condition:
        assert min(once() for _ in range(5)) < 200e-6


PROGRAM = """
import signal, sys, threading
from concurrent.futures import Future
from headwater.core.waits import wait_for_future, wait_until
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
condition = threading.Condition()
try:
    print("waiting", flush=True)  # from here on, the signal may come
    if sys.argv[1] == "condition":
        with condition:
            wait_until(condition, lambda: False, lambda: "", kind="x", hard_limit_s=600)
    else:
        wait_for_future(Future(), lambda: "", kind="x", hard_limit_s=600)
except KeyboardInterrupt:
    print("heard", flush=True)
"""


@pytest.mark.parametrize("what", ["condition", "future"])
def test_ctrl_c_is_heard(what):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, what], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=300)[0] == "heard\n"
        assert child.returncode == 0


def test_a_call_in_a_thread_has_begun_when_the_future_is_there_and_cannot_be_cancelled():
    release = threading.Event()
    done = start_in_thread(lambda: release.wait(120), "test")
    assert not done.cancel()
    release.set()
    assert done.result(120) is True
    with pytest.raises(ZeroDivisionError):
        start_in_thread(lambda: 1 / 0, "test").result(120)
