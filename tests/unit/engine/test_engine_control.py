"""Pausing, resuming, aborting, cancelling, failing and closing."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine.engine_parts import (
    LIMIT_S,
    Held,
    assert_nothing_is_held,
    assert_same,
    collect,
    make_model,
    request,
    run,
    running,
    stepped,
    texts,
    tokens_of,
    until,
    weights,
)
from tiny import tokenizer

from headwater.core.errors import QueueFull, RolloutFailed, WeightsError
from headwater.engine import delivery
from headwater.engine.delivery import Gathering, Throughput

LONG = request(tokens_of(9), 1, "long", max_new_tokens=100)


@pytest.fixture(scope="module")
def whole():
    with running() as engine:
        [response] = engine.generate([LONG])
    return response


# Pausing


@pytest.mark.parametrize("gpu_like", [False, True])
def test_no_token_comes_while_paused_and_all_the_others_afterwards(whole, gpu_like):
    with stepped(gpu_like=gpu_like) as slow:
        streamed, answer = slow.stream(LONG)
        slow.turn(3)
        slow.call(slow.engine.pause)
        slow.settle()
        before = streamed.tokens
        assert 0 < len(before) < 100
        slow.turn(5)
        slow.settle()
        assert streamed.tokens == before
        assert slow.engine.is_paused
        assert slow.engine.metrics().num_tokens_generated == len(before)
        slow.call(slow.engine.resume)
        slow.finish()
        assert_same([answer.result(LIMIT_S)], [whole])
        assert slow.engine.metrics().num_tokens_prefilled == 9, "the cache of a paused request stays"


def test_pausing_and_resuming_twice_is_the_same_as_once(whole):
    with running() as engine:
        for call in (engine.resume, engine.pause, engine.pause, engine.resume, engine.resume):
            call()
        assert_same(engine.generate([LONG]), [whole])


def test_a_request_that_comes_while_paused_waits():
    async def scenario(engine):
        engine.pause()
        waiting = asyncio.ensure_future(engine.agenerate(LONG))
        await asyncio.to_thread(until, lambda: engine.metrics().num_waiting == 1, "the request does not arrive")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert engine.metrics().num_waiting == 1
        assert engine.metrics().num_tokens_prefilled == 0
        engine.resume()
        return await waiting

    with running() as engine:
        assert len(run(scenario(engine)).output_tokens) == 100


def test_a_paused_engine_runs_no_rounds():
    with running() as engine:
        engine.pause()
        thread = threading.Thread(target=engine.generate, args=([LONG],))
        thread.start()
        until(lambda: engine.metrics().num_waiting == 1, "the request does not arrive")
        engine.pause()  # the round in which it arrived has ended
        rounds, run_round = [], engine._loop._round
        engine._loop._round = lambda: rounds.append(1) or run_round()
        time.sleep(0.1)
        assert not rounds
        engine.resume()
        thread.join(LIMIT_S)


# Aborting


def test_an_aborted_request_keeps_its_tokens_and_gives_its_pages_back(whole):
    with stepped() as slow:
        answer = slow.submit(LONG)
        slow.turn(3)
        assert slow.engine.metrics().kv_pages_used > 0
        assert slow.call(lambda: slow.engine.abort("long"))
        response = answer.result(LIMIT_S)
        assert response.stop_reason == "abort"
        assert 0 < len(response.output_tokens) < 100
        assert response.output_tokens == whole.output_tokens[: len(response.output_tokens)]
        assert_nothing_is_held(slow.engine)
        assert slow.engine.metrics().num_aborted == 1


def test_an_aborted_stream_hands_out_everything_and_says_so(whole):
    with stepped() as slow:
        streamed, answer = slow.stream(LONG)
        slow.turn(2)
        slow.call(lambda: slow.engine.abort("long"))
        assert answer.result(LIMIT_S).stop_reason == "abort"
        assert streamed.tokens == whole.output_tokens[: len(streamed.tokens)]


def test_a_request_that_has_not_started_can_be_aborted():
    with stepped(max_sequences=1) as slow:
        running_one = slow.submit(LONG)
        slow.turn(2)
        waiting = slow.submit(request(tokens_of(4), 2, "waiting"))
        assert slow.call(lambda: slow.engine.abort("waiting"))
        assert (waiting.result(LIMIT_S).output_tokens, waiting.result(LIMIT_S).stop_reason) == ((), "abort")
        slow.finish()
        assert len(running_one.result(LIMIT_S).output_tokens) == 100


def test_a_request_whose_prompt_is_half_computed_can_be_aborted():
    with stepped(max_prefill_tokens=1) as slow:
        answers = [slow.submit(request(tokens_of(60), key, name)) for key, name in enumerate(("one", "two"))]
        slow.turn()
        assert slow.call(lambda: slow.engine.abort("one"))
        assert answers[0].result(LIMIT_S).stop_reason == "abort"
        assert slow.call(lambda: slow.engine.abort("two"))
        assert answers[1].result(LIMIT_S).stop_reason == "abort"
        assert_nothing_is_held(slow.engine)


def test_aborting_what_is_not_there_says_so_and_harms_nobody(whole):
    with running() as engine:
        assert engine.abort("nobody") == 0
        [response] = engine.generate([LONG])
        assert engine.abort("long") == 0, "it has ended"
        assert_same([response], [whole])


def test_a_request_can_be_aborted_while_paused():
    with stepped() as slow:
        answer = slow.submit(LONG)
        slow.turn(2)
        slow.call(slow.engine.pause)
        assert slow.call(lambda: slow.engine.abort("long"))
        assert answer.result(LIMIT_S).stop_reason == "abort"
        assert_nothing_is_held(slow.engine)


def test_abort_all_ends_what_runs_and_what_waits():
    with stepped(max_sequences=2, max_prefill_tokens=20) as slow:
        answers = [slow.submit(request(tokens_of(9 + key), key, max_new_tokens=50)) for key in range(6)]
        slow.turn(2)
        assert slow.call(slow.engine.abort) == 6
        slow.finish()
        assert [answer.result(LIMIT_S).stop_reason for answer in answers] == ["abort"] * 6
        assert_nothing_is_held(slow.engine)
        assert slow.call(slow.engine.abort) == 0


# Callers that go away


def test_a_cancelled_caller_frees_the_pages_of_its_request():
    async def scenario(engine):
        held = Held(engine)
        task = asyncio.ensure_future(engine.agenerate(request(tokens_of(9), max_new_tokens=240)))
        await held.wait()
        assert engine.metrics().num_running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.go_on()

    with running() as engine:
        run(scenario(engine))
        until(lambda: not engine._intake.num_open, "the abandoned request goes on")
        assert engine.metrics().num_tokens_generated < 240
        assert_nothing_is_held(engine)


def test_a_stream_that_is_closed_early_frees_the_pages_of_its_request():
    async def scenario(engine):
        held = Held(engine, at=5)
        stream = engine.astream(request(tokens_of(9), max_new_tokens=240))
        first = await anext(stream)
        await stream.aclose()
        held.go_on()
        return first

    with running(decode_steps=1) as engine:
        assert run(scenario(engine)).tokens
        until(lambda: not engine._intake.num_open, "the abandoned request goes on")
        assert engine.metrics().num_tokens_generated < 240
        assert_nothing_is_held(engine)


def test_a_request_no_longer_counts_when_its_last_tokens_arrive():
    """A caller that streams with the longest queue the engine allows may send the next request at once."""
    seen = []

    def on_delta(delta):
        seen.append((engine._intake.num_open, delta.stop_reason))

    with running() as engine:
        gathering = Gathering(1)
        engine._intake.enter([request(tokens_of(9), max_new_tokens=20)], gathering.take, on_delta)
        gathering.wait(engine._loop.progress)
    assert seen[-1] == (0, "length")
    assert set(seen[:-1]) == {(1, None)}


def test_two_requests_of_one_name_are_two_requests_when_a_caller_goes_away():
    async def scenario(engine):
        held = Held(engine)
        tasks = [asyncio.ensure_future(engine.agenerate(LONG)) for _ in range(2)]
        await held.wait()
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        held.go_on()
        return await tasks[1]

    with running() as engine:
        assert run(scenario(engine)).stop_reason == "length"


class ClosesWhenLookedAt(asyncio.SelectorEventLoop):
    """A loop whose owner ends it just after the engine has seen that it is open."""

    def __init__(self):
        super().__init__()
        self.was_ended = False

    def end_for(self, thread):
        if thread.name == "headwater-engine" and not self.was_ended:
            self.was_ended = True  # first: closing looks whether it is closed
            self.close()

    def is_closed(self):
        closed = super().is_closed()
        self.end_for(threading.current_thread())
        return closed

    def call_soon_threadsafe(self, *arguments, **context):
        self.end_for(threading.current_thread())
        return super().call_soon_threadsafe(*arguments, **context)


def test_an_event_loop_that_ends_at_the_wrong_moment_does_not_harm_the_engine():
    with running() as engine:
        loop = ClosesWhenLookedAt()

        async def ask():
            return await engine.agenerate(request(tokens_of(3)))

        task = loop.create_task(ask())
        loop.call_soon(loop.stop)
        loop.run_forever()  # one turn: the request is sent
        until(lambda: not engine._intake.num_open, "the request has not ended")
        until(loop.is_closed, "the engine has not looked at the loop")
        assert engine.is_alive
        assert len(engine.generate([LONG])) == 1
        task._log_destroy_pending = False


def test_a_control_call_that_its_caller_gave_up_is_not_carried_out_and_harms_nobody(whole):
    with stepped() as slow:
        update = slow.engine.update_weights(weights(1, 1))
        assert update.cancel()
        answer = slow.submit(LONG)
        slow.finish()
        assert slow.engine.is_alive
        assert slow.engine.get_version() == 0
        assert_same([answer.result(LIMIT_S)], [whole])


# Failing


def broken(engine, part, calls=1):
    """Make a part of the runner raise at its n-th call from now."""
    work, left = getattr(engine._runner, part), [calls]

    def fail(*arguments):
        left[0] -= 1
        if left[0] <= 0:
            raise RuntimeError("the device is on fire")
        return work(*arguments)

    setattr(engine._runner, part, fail)


@pytest.mark.parametrize(("part", "calls"), [("prefill", 1), ("decode", 1), ("decode", 3)])
def test_when_the_device_fails_every_request_fails_with_the_cause_and_so_does_every_later_call(part, calls):
    async def scenario(engine):
        requests = [request(tokens_of(5 + key), key, max_new_tokens=50) for key in range(4)]
        waiting = [asyncio.ensure_future(engine.agenerate(each)) for each in requests]
        streams = [asyncio.ensure_future(collect(engine.astream(LONG)))]
        return await asyncio.gather(*waiting, *streams, return_exceptions=True)

    with running(max_sequences=2) as engine:
        broken(engine, part, calls)
        for error in run(scenario(engine)):
            assert isinstance(error, RolloutFailed)
            assert "the device is on fire" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        assert not engine.is_alive
        calls = [
            lambda: engine.generate([LONG]),
            engine.pause,
            engine.resume,
            engine.abort,
            lambda: engine.abort("long"),
            lambda: engine.update_weights(weights(1, 1)).result(LIMIT_S),
            lambda: engine.set_version(3),
            engine.sleep,
            engine.wake,
            lambda: run(engine.agenerate(LONG)),
            lambda: run(collect(engine.astream(LONG))),
        ]
        for call in calls:
            with pytest.raises(RolloutFailed, match="the device is on fire"):
                call()


def cannot_stop_rows(engine, monkeypatch):
    """Make the device fail when it is told to stop a row."""
    kill = engine._runner.rows.kill

    def fail(rows):
        if len(rows):
            raise RuntimeError("the device is on fire")
        kill(rows)

    monkeypatch.setattr(engine._runner.rows, "kill", fail)


def test_requests_whose_rows_cannot_be_stopped_fail_with_the_engine(whole, monkeypatch):
    with stepped(max_sequences=2) as slow:
        answers = [slow.submit(replace(LONG, request_id=name)) for name in ("aborted", "other", "waiting")]
        slow.turn(3)
        cannot_stop_rows(slow.engine, monkeypatch)
        with pytest.raises(RuntimeError, match="on fire"):
            slow.call(lambda: slow.engine.abort("aborted"))
        for answer in answers:
            with pytest.raises(RolloutFailed, match="on fire"):
                answer.result(LIMIT_S)
        assert not slow.engine.is_alive
    stop = tokenizer().decode(whole.output_tokens[40:44])
    with running() as engine:
        cannot_stop_rows(engine, monkeypatch)
        sampling = replace(LONG.sampling, stop_strings=(stop,))
        with pytest.raises(RolloutFailed, match="on fire"):
            engine.generate([replace(LONG, sampling=sampling)])


def test_a_control_call_in_the_queue_fails_with_the_engine():
    with stepped() as slow:
        answer = slow.submit(LONG)
        slow.turn(2)
        broken(slow.engine, "decode")
        drained = slow.engine.update_weights(weights(1, 1), "drain")
        slow.turn(2)
        with pytest.raises(RuntimeError, match="on fire"):
            drained.result(LIMIT_S)
        with pytest.raises(RolloutFailed, match="on fire"):
            answer.result(LIMIT_S)


def test_a_control_call_is_answered_when_reading_the_queued_rounds_fails():
    """With rounds queued ahead the failure shows only when their output is read, which a control call does first."""
    with stepped(gpu_like=True) as slow:
        answer = slow.submit(LONG)
        slow.turn(2)
        assert slow.engine._loop._rounds
        slow.engine._loop._read = fail
        update = slow.engine.update_weights(weights(1, 1))
        slow.turn()
        for future in (update, answer):
            with pytest.raises((RuntimeError, RolloutFailed), match="on fire"):
                future.result(LIMIT_S)


def test_a_control_call_that_was_given_up_does_not_keep_the_failure_from_others():
    with stepped() as slow:
        answer = slow.submit(LONG)
        slow.turn(2)
        broken(slow.engine, "decode")
        given_up, waiting = (slow.engine.update_weights(weights(1, version), "drain") for version in (1, 2))
        assert given_up.cancel()
        slow.turn(2)
        for future in (waiting, answer):
            with pytest.raises((RuntimeError, RolloutFailed), match="on fire"):
                future.result(LIMIT_S)


def test_a_drain_that_was_called_off_drains_nothing_and_holds_nobody():
    with stepped() as slow:
        streamed, answer = slow.stream(LONG)
        slow.turn(2)
        slow.call(slow.engine.pause)
        drain = slow.engine.update_weights(weights(1, 1), "drain")
        behind = slow.engine.update_weights(weights(1, 2))
        slow.turn()
        assert drain.cancel()
        slow.turn()
        behind.result(LIMIT_S)
        slow.settle()
        before = len(streamed.tokens)
        slow.turn(3)
        slow.settle()
        assert len(streamed.tokens) == before < 100
        slow.call(slow.engine.resume)
        later = slow.submit(request(tokens_of(3), max_new_tokens=2))
        slow.turn(3)
        later.result(LIMIT_S)
        assert not answer.done()
        slow.finish()
        assert len(answer.result(LIMIT_S).output_tokens) == 100


def test_what_is_drawn_beyond_a_stop_is_not_counted(whole):
    with stepped(decode_steps=8) as slow:
        stop = tokenizer().decode(whole.output_tokens[2:3])
        answer = slow.submit(replace(LONG, sampling=replace(LONG.sampling, stop_strings=(stop,))))
        slow.finish()
        made = len(answer.result(LIMIT_S).output_tokens)
        assert made < 8
        assert slow.engine.metrics().num_tokens_generated == made


def test_a_control_call_finds_nothing_queued_on_the_device():
    """Also one that arrives while the loop is already taking requests in."""
    with stepped(gpu_like=True) as slow:
        slow.submit(LONG)
        slow.turn(3)
        loop, queued = slow.engine._loop, []
        assert loop._rounds
        add = loop.scheduler.add

        def arrives_meanwhile(sequence):
            add(sequence)
            loop.call(lambda: queued.append(len(loop._rounds)))

        loop.scheduler.add = arrives_meanwhile
        slow.submit(request(tokens_of(3)))
        slow.turn()
        loop.scheduler.add = add
        slow.finish()
        assert queued == [0]


def fail(*_):
    raise RuntimeError("the device is on fire")


@pytest.mark.parametrize("mode", ["interrupt", "drain"])
def test_an_update_that_breaks_half_way_ends_the_engine(mode):
    """Nothing may be generated from weights that are half old and half new."""
    with stepped() as slow:
        answer = slow.submit(request(tokens_of(9), max_new_tokens=12))
        slow.turn()
        slow.engine._weights.take = fail
        update, later = (slow.engine.update_weights(weights(1, version), mode) for version in (1, 2))
        waiting = slow.submit(LONG)
        slow.turn(30)
        for future in (update, later):
            with pytest.raises(RuntimeError, match="on fire"):
                future.result(LIMIT_S)
        with pytest.raises(RolloutFailed, match="on fire"):
            waiting.result(LIMIT_S)
        if mode == "drain":
            assert len(answer.result(LIMIT_S).output_tokens) == 12
        assert not slow.engine.is_alive
        assert slow.engine._intake.num_open == 0


def test_a_control_call_that_is_refused_does_not_end_the_engine(whole):
    with running() as engine:
        engine.sleep(["weights"])
        with pytest.raises(WeightsError):
            engine.update_weights(weights(1, 1)).result(LIMIT_S)
        engine.wake()
        assert_same(engine.generate([LONG]), [whole])


@pytest.mark.parametrize("takes_it_first", [False, True])
def test_a_request_that_the_scheduler_cannot_take_fails_with_the_engine_and_only_once(takes_it_first):
    with stepped() as slow:
        running_one = slow.submit(LONG)
        slow.turn(2)
        scheduler = slow.engine._loop.scheduler
        add = scheduler.add
        scheduler.add = lambda sequence: (takes_it_first and add(sequence)) or fail()
        answers = [running_one, *(slow.submit(request(tokens_of(4), key)) for key in range(2))]
        slow.turn()
        for answer in answers:
            with pytest.raises(RolloutFailed, match="on fire"):
                answer.result(LIMIT_S)
        assert slow.engine._intake.num_open == 0


def test_a_failed_engine_can_be_closed():
    with running() as engine:
        broken(engine, "prefill")
        with pytest.raises(RolloutFailed):
            engine.generate([LONG])
        engine.close()
        engine.close()


# Closing


def test_closing_ends_every_request_with_what_it_has(whole):
    with stepped(max_sequences=2) as slow:
        answers = [slow.submit(LONG), *(slow.submit(request(tokens_of(4), key, max_new_tokens=50)) for key in range(3))]
        _, stream_end = slow.stream(request(tokens_of(5), max_new_tokens=50))
        slow.turn(2)
        slow.let_go()
        slow.engine.close()
        responses = [answer.result(LIMIT_S) for answer in (*answers, stream_end)]
    assert [each.stop_reason for each in responses] == ["abort"] * 5
    assert 0 < len(responses[0].output_tokens) < 100
    assert responses[0].output_tokens == whole.output_tokens[: len(responses[0].output_tokens)]


def test_a_closed_engine_refuses_everything_and_can_be_closed_again():
    with running() as engine:
        engine.close()
        engine.close()
        assert not engine.is_alive
        for call in (lambda: engine.generate([LONG]), engine.pause, engine.abort, engine.sleep):
            with pytest.raises(RolloutFailed, match="closed"):
                call()


@pytest.mark.parametrize("prepare", ["pause", "sleep"])
def test_a_paused_or_sleeping_engine_with_requests_can_be_closed(prepare):
    with stepped() as slow:
        answer = slow.submit(LONG)
        slow.turn(2)
        slow.call(getattr(slow.engine, prepare))
        slow.let_go()
        slow.engine.close()
        assert answer.result(LIMIT_S).stop_reason == "abort"


def test_closing_answers_an_update_that_waits_for_a_drain():
    with stepped() as slow:
        slow.submit(LONG)
        slow.turn(2)
        update = slow.engine.update_weights(weights(1, 1), "drain")
        slow.turn(1)
        assert not update.done()
        slow.let_go()
        slow.engine.close()
        update.exception(LIMIT_S)


def test_no_request_is_forgotten_however_it_races_with_closing():
    """Each gets a response or an error; none waits for ever."""
    for _ in range(8):
        with running() as engine:
            ends = []

            def ask(engine=engine, ends=ends):
                try:
                    ends.append(engine.generate([request(tokens_of(3))])[0].stop_reason)
                except RolloutFailed as error:
                    ends.append(str(error))

            threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
            for thread in threads:
                thread.start()
            engine.close()
            for thread in threads:
                thread.join(LIMIT_S)
            assert len(ends) == 6, "a request was forgotten"


def test_closing_and_asking_at_the_very_same_moment():
    """A request that is queued after the last abort and before the door is shut must not be forgotten."""
    with stepped() as slow:
        loop = slow.engine._loop
        wakeup, late = loop._wakeup, []

        class Door:
            """The loop's lock; whoever has just left it for the first time in ``close`` is overtaken by a request."""

            def __enter__(self):
                return wakeup.__enter__()

            def __exit__(self, *error):
                wakeup.__exit__(*error)
                if threading.current_thread().name == "closer" and not late:
                    late.append(True)
                    try:
                        late.append(slow.submit(request(tokens_of(3))))
                    except RolloutFailed:
                        late.append(None)

            def __getattr__(self, name):
                return getattr(wakeup, name)

        loop._wakeup = Door()
        closer = threading.Thread(target=slow.engine.close, name="closer", daemon=True)
        closer.start()
        until(lambda: len(late) == 2, "closing hangs")
        slow.let_go()
        closer.join(LIMIT_S)
        assert not closer.is_alive()
        with pytest.raises(RolloutFailed, match="closed"):
            late[1].result(LIMIT_S)


# The queue


def test_a_full_queue_refuses_what_is_too_much_and_goes_on_serving():
    with running(max_queue=3) as engine:
        many = [request(tokens_of(3), key) for key in range(4)]
        with pytest.raises(QueueFull, match=r"engine\.max_queue = 3"):
            engine.generate(many)
        assert len(engine.generate(many[:3])) == 3
        assert_nothing_is_held(engine)


def test_a_place_in_the_queue_is_free_again_when_its_request_ends():
    with stepped(max_queue=2) as slow:
        answers = [slow.submit(request(tokens_of(3), key)) for key in range(2)]
        with pytest.raises(QueueFull, match=r"2 .*already waiting or running.*max_queue = 2"):
            slow.submit(request(tokens_of(3), 9)).result(LIMIT_S)
        slow.call(lambda: slow.engine.abort("3/0"))
        third = slow.submit(request(tokens_of(3), 2))
        slow.finish()
        assert answers[0].result(LIMIT_S).stop_reason == "abort"
        assert len(third.result(LIMIT_S).output_tokens) == 12


# Numbers


def test_metrics_can_be_read_at_any_time_from_any_thread():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures, stop = [], threading.Event()

    def watch(engine):
        while not stop.is_set():
            try:
                engine.metrics()
            except RuntimeError as error:
                failures.append(error)

    try:
        with running(max_prefill_tokens=64) as engine:
            thread = threading.Thread(target=watch, args=(engine,))
            thread.start()
            engine.generate([request(tokens_of(5, key), key, max_new_tokens=2) for key in range(300)])
            stop.set()
            thread.join(LIMIT_S)
    finally:
        sys.setswitchinterval(interval)
    assert not failures


def test_metrics_count_what_happened(monkeypatch):
    monkeypatch.setattr(delivery, "_WINDOW_S", LIMIT_S)  # however long the machine takes until they are read
    with running() as engine:
        responses = engine.generate([request(tokens_of(20), key) for key in range(3)])
        engine.update_weights(weights(1, 4)).result(LIMIT_S)
        metrics = engine.metrics()
    assert (metrics.num_tokens_prefilled, metrics.num_tokens_generated) == (20, sum(map(len, texts(responses))))
    assert (metrics.version, metrics.num_weight_updates, metrics.num_interrupted) == (4, 1, 0)
    assert (metrics.num_waiting, metrics.num_running, metrics.kv_pages_used) == (0, 0, 0)
    assert metrics.num_finished == 3
    assert metrics.tokens_per_s > 0
    assert metrics.last_update_pause_s > 0


def test_throughput_is_over_the_window_and_not_over_the_first_moment(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    counted = Throughput()
    assert counted.per_second() == 0
    clock[0] += 2
    counted.add(1000)
    assert counted.per_second() == 500, "two seconds old"
    clock[0] += 100
    assert counted.per_second() == 0
    counted.add(1000)
    assert counted.per_second() == 200, "five seconds of which it was idle for most"
    clock[0] += 4
    counted.add(500)
    assert counted.per_second() == 300
    clock[0] += 2
    assert counted.per_second() == 100, "the first thousand is forgotten"
    assert counted.total == 2500


def test_many_engines_in_one_process_do_not_disturb_each_other(whole):
    with running() as one, running(make_model(seed=1)) as other:
        [different] = other.generate([LONG])
        assert_same(one.generate([LONG]), [whole])
        assert different.output_tokens != whole.output_tokens
