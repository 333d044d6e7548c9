"""Every wait has a limit, callers do not delay each other, and a caller that stops waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cases import case
from engine.engine_parts import LIMIT_S, Held, assert_nothing_is_held, request, run, running, stepped, tokens_of, until

from headwater.core import waits
from headwater.core.errors import QueueFull, RequestError, RolloutFailed, WaitTimeout
from headwater.core.waits import open_waits
from headwater.engine import delivery, intake
from headwater.engine.delivery import Gathering, Mailbox, wait_for
from headwater.engine.loop import MAX_PREFILLS_PER_ROUND

LONG = request(tokens_of(9), 1, "long", max_new_tokens=240)


def recorded(engine):
    """Records the order of the runner's calls."""
    order = []
    for name in ("prefill", "decode"):
        work = getattr(engine._runner, name)

        def note(*arguments, name=name, work=work):
            order.append(name)
            return work(*arguments)

        setattr(engine._runner, name, note)
    return order


# Prompts beside streams and control calls


def test_streams_go_on_while_a_long_prompt_is_computed():
    with stepped(max_prefill_tokens=4, decode_steps=1) as slow:
        slow.submit(LONG)
        slow.turn(4)
        order = recorded(slow.engine)
        slow.submit(request(tokens_of(200), max_new_tokens=2))
        slow.turn(8)
        assert order == [*["prefill"] * MAX_PREFILLS_PER_ROUND, "decode"] * 8


def test_a_control_call_waits_for_one_batch_of_prompts_and_not_for_all_that_may_be_computed_in_a_round():
    with stepped(max_prefill_tokens=4) as slow:
        order = recorded(slow.engine)
        prefill = slow.engine._runner.prefill

        def called_meanwhile(*arguments):
            if not order:
                slow.engine._loop.call(lambda: order.append("call"))
            return prefill(*arguments)

        slow.engine._runner.prefill = called_meanwhile
        slow.submit(request(tokens_of(200), max_new_tokens=2))
        slow.turn(2)
        assert order[:3] == ["prefill", "call", "prefill"]


def test_calls_without_end_do_not_keep_prompts_from_being_computed():
    with stepped(max_prefill_tokens=4) as slow:
        answer = slow.submit(request(tokens_of(40), max_new_tokens=2))
        for _ in range(15):
            slow.engine._loop.call(lambda: None)
            slow.turn()
        slow.settle()
        assert answer.done()


# Callers that stop waiting


class Interrupted(Gathering):
    """A caller that presses Ctrl-C as soon as its requests run."""

    def wait(self, progress):
        until(lambda: progress()[0], "no token is made")
        raise KeyboardInterrupt


def test_what_ends_the_wait_for_a_list_of_requests_ends_the_requests(monkeypatch):
    monkeypatch.setattr("headwater.engine.engine.Gathering", Interrupted)
    with running(decode_steps=1) as engine:
        held = Held(engine, at=5)  # or else they might end before the caller gets its turn
        with pytest.raises(KeyboardInterrupt):
            engine.generate([LONG, request(tokens_of(5), 2, max_new_tokens=240)])
        held.go_on()
        until(lambda: not engine._intake.num_open, "the abandoned requests go on")
        assert engine.metrics().num_aborted == 2
        assert_nothing_is_held(engine)


def test_a_list_that_is_refused_half_way_leaves_no_request_and_no_place_in_the_queue_taken(monkeypatch):
    monkeypatch.setattr(intake, "_ENTER_AT_ONCE", 2)
    with running(decode_steps=1) as engine:
        add, num_calls = engine._loop.add, []

        def closes(sequences):
            num_calls.append(1)
            if len(num_calls) == 2:
                raise RolloutFailed("the engine is closed")
            add(sequences)

        engine._loop.add = closes
        held = Held(engine, at=1)
        with pytest.raises(RolloutFailed, match="closed"):
            engine.generate([request(tokens_of(5), key, max_new_tokens=240) for key in range(7)])
        held.go_on()
        until(lambda: not engine._intake.num_open, "places in the queue are lost, or requests go on")
        assert engine.metrics().num_aborted == 2, "those of the first slice"
        assert_nothing_is_held(engine)


def test_requests_that_begin_together_are_answered_or_refused_one_by_one():
    async def begin(engine, requests):
        answers = [asyncio.get_running_loop().create_future() for _ in requests]
        leaving = engine.begin(requests, answers)
        return answers, leaving, await asyncio.gather(*answers, return_exceptions=True)

    wanted = [request(tokens_of(5), key, max_new_tokens=3) for key in range(4)]
    wrong = replace(wanted[1], input_tokens=(10**6,))
    with running(max_queue=3) as engine:
        assert engine.capabilities.joint_start, "otherwise a run does not use it"
        alone = [run(engine.agenerate(each)) for each in wanted[:3]]
        _, leaving, found = run(begin(engine, [wanted[0], wrong, wanted[1], wanted[2], wanted[3]]))
        assert isinstance(found[1], RequestError)
        assert isinstance(found[4], QueueFull)
        together = [found[place].output_tokens for place in (0, 2, 3)]
        assert together == [each.output_tokens for each in alone]
        for leave in leaving:
            leave()  # too late, and without effect
        assert engine.metrics().num_aborted == 0
        assert_nothing_is_held(engine)
    _, _, found = run(begin(engine, wanted[:2]))  # it is closed
    assert [type(each) for each in found] == [RolloutFailed, RolloutFailed]
    assert engine._intake.num_open == 0


def test_a_request_that_began_with_others_can_be_left_alone():
    async def scenario(engine):
        answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
        held = Held(engine, at=1)
        leaving = engine.begin([LONG, request(tokens_of(5), 2, max_new_tokens=3)], answers)
        leaving[0]()
        held.go_on()
        return await asyncio.gather(*answers)

    with running(decode_steps=1) as engine:
        left, other = run(scenario(engine))
        assert (left.stop_reason, other.stop_reason) == ("abort", "length")
        assert_nothing_is_held(engine)


def test_many_callers_that_go_away_are_looked_for_once():
    async def scenario(engine):
        go_on = threading.Event()
        engine._loop.call(lambda: go_on.wait(LIMIT_S))  # it looks after all of them have gone
        tasks = [asyncio.ensure_future(engine.agenerate(request(tokens_of(5), key))) for key in range(2000)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        go_on.set()

    with running() as engine:
        engine.pause()
        looks, abort = [], engine._loop.abort
        engine._loop.abort = lambda wanted: looks.append(1) or abort(wanted)
        run(scenario(engine))
        until(lambda: not engine._intake.num_open, "the abandoned requests stay")
        assert len(looks) == 1
        assert engine.metrics().num_aborted == 2000
        assert_nothing_is_held(engine)


def test_a_request_that_is_abandoned_before_the_loop_has_taken_it_in_ends_as_well():
    with stepped() as slow:
        first, second = (slow.submit(request(tokens_of(5), key, max_new_tokens=240)) for key in range(2))
        for each in (second, first):
            each.cancel()
        slow.settle()
        slow.turn()
        assert_nothing_is_held(slow.engine)


def test_requests_are_aborted_by_their_ids():
    with stepped() as slow:
        answers = [slow.submit(request(tokens_of(5), key, str(key), max_new_tokens=100)) for key in range(4)]
        slow.turn(2)
        assert [slow.call(lambda name=name: slow.engine.abort(name)) for name in ("0", "2", "nobody")] == [1, 1, 0]
        slow.finish()
        assert [each.result(LIMIT_S).stop_reason for each in answers] == ["abort", "length", "abort", "length"]


# Limits


def test_waiting_for_an_engine_that_computes_nothing_has_an_end_and_says_so(monkeypatch):
    monkeypatch.setattr(waits, "_LOOK_S", 0.01)
    monkeypatch.setattr(delivery, "_STALL_LIMIT_S", 0.1)
    with running() as engine:
        release = threading.Event()
        decode = engine._runner.decode
        engine._runner.decode = lambda *arguments: release.wait(LIMIT_S) and decode(*arguments)
        try:
            with pytest.raises(WaitTimeout, match=r"2 of 2 requests.*computed nothing for"):
                engine.generate([LONG, LONG])
        finally:
            release.set()
        until(lambda: not engine._intake.num_open, "the abandoned requests go on")


def test_waiting_for_a_list_of_requests_has_a_name_and_a_limit_in_every_state(monkeypatch):
    monkeypatch.setattr(waits, "_LOOK_S", 0.01)
    monkeypatch.setattr(delivery, "_GENERATE_LIMIT_S", 0.5)
    with running() as engine:
        engine.pause()
        failures = []

        def generate():
            try:
                engine.generate([LONG])
            except WaitTimeout as error:
                failures.append(str(error))

        caller = threading.Thread(target=generate)
        caller.start()
        name = "Engine.generate waits for 1 of 1 requests; the engine is paused"
        until(lambda: failures or any(name in each.description for each in open_waits()), "the wait has no name")
        caller.join(LIMIT_S)
        assert [name in each for each in failures] == [True], "a paused engine is not waited for without end"
        until(lambda: not engine._intake.num_open, "the abandoned request stays")


def test_slow_progress_and_a_stopped_engine_may_be_waited_for_as_long_as_it_takes(monkeypatch):
    """Ten checks, five minutes apart: much longer than the limit of ten minutes without progress."""
    clock = iter(range(0, 10**6, 300))
    monkeypatch.setattr(waits, "_LOOK_S", 0.001)
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for name, value in (("slow", lambda looks: looks // 2), ("stopped", lambda _: None)):
        with case(name):
            gathering, looks = Gathering(1), []

            def progress(value=value, gathering=gathering, looks=looks):
                looks.append(1)
                if len(looks) == 10:
                    gathering.take(0, SimpleNamespace(error=None, response=lambda: "done"))
                return value(len(looks))

            assert gathering.wait(progress) == ["done"]


def test_an_engine_that_is_paused_or_asleep_reports_no_progress():
    with running() as engine:
        assert engine._loop.progress() is not None
        for stop, go_on in (("pause", "resume"), ("sleep", "wake")):
            with case(stop):
                getattr(engine, stop)()
                assert engine._loop.progress() is None
                getattr(engine, go_on)()
                assert engine._loop.progress() is not None


def test_closing_an_engine_that_hangs_has_an_end(monkeypatch):
    monkeypatch.setattr("headwater.engine.loop._CLOSE_LIMIT_S", 0.1)
    with running() as engine:
        release = threading.Event()
        engine._loop.call(lambda: release.wait(LIMIT_S))
        with pytest.raises(WaitTimeout, match="closing the engine"):
            engine.close()
        release.set()
        engine._loop._thread.join(LIMIT_S)


def test_closing_an_engine_is_a_wait_that_others_can_see():
    with running() as engine:
        release = threading.Event()
        engine._loop.call(lambda: release.wait(LIMIT_S))
        closing = threading.Thread(target=engine.close)
        closing.start()
        until(lambda: any("closing the engine" in each.description for each in open_waits()), "the wait has no name")
        release.set()
        closing.join(LIMIT_S)
        assert not engine._loop._thread.is_alive()


def test_a_control_call_that_does_not_end_says_whether_it_has_begun(monkeypatch):
    monkeypatch.setattr(delivery, "_CONTROL_LIMIT_S", 0.1)
    with running() as engine:
        release, begun = threading.Event(), threading.Event()
        first = engine._loop.call(lambda: begun.set() or release.wait(LIMIT_S))
        assert begun.wait(LIMIT_S)
        with pytest.raises(WaitTimeout, match="pausing was waiting for running requests and is cancelled"):
            engine.pause()
        with pytest.raises(WaitTimeout, match="resting has started"):
            wait_for(first, "resting")
        release.set()
    assert not engine.is_paused


# Delivery


def test_one_delivery_that_fails_does_not_keep_the_others_from_arriving():
    async def scenario():
        loop, heard, arrived = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, context: heard.append(context["exception"]))
        mailbox = Mailbox(loop)
        mailbox.post(lambda: arrived.append("one"))
        mailbox.post(lambda: 1 / 0)
        mailbox.post(lambda: arrived.append("two"))
        await asyncio.sleep(0.01)
        return heard, arrived

    heard, arrived = run(scenario())
    assert arrived == ["one", "two"]
    assert [type(each) for each in heard] == [ZeroDivisionError]
