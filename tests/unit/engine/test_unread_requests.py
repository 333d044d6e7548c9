"""Requests whose pictures have been read wait for those whose pictures are being read, within limits."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from engine.engine_parts import LIMIT_S, until
from engine.vision_parts import asking, full_pass, picture, running

from headwater.engine.media import MediaEncoder
from headwater.engine.media_reader import MediaReader, Reading
from headwater.engine.prompts import UnreadRequests
from headwater.engine.sequence import EngineSequence

NAME = "qwen2_5_vl"


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("headwater.engine.prompts.monotonic", lambda: self.now)


def sequence(number, num_samples=1):
    """Samples of a prompt with one picture, and how to say that it was read."""
    request, done = asking(NAME, [picture(number)], number), Future()
    check = Future()
    check.set_result(done)
    reading = Reading(request, [check])
    made = [EngineSequence(request, (), number, lambda _: None, reading=reading) for _ in range(num_samples)]
    return made, lambda: done.set_result(None)


def test_those_that_were_read_wait_for_the_others(monkeypatch):
    clock, unread = Clock(monkeypatch), UnreadRequests(enough_tokens=10**6)
    parts = [sequence(number) for number in range(3)]
    first, second, third = (made[0] for made, _ in parts)
    for each in (first, second, third):
        unread.add(each)
    assert not unread.is_due
    assert unread.until_due(0.5) == 0.5
    parts[1][1]()
    unread.has_news = True
    assert list(unread.take_read()) == []
    assert [item.content for item in unread.read_media()] == [second.request.media[0].content]
    assert not unread.is_due
    assert 0 < unread.until_due(0.5) < 0.5
    for _, tell in (parts[0], parts[2]):
        tell()
    unread.has_news = True
    assert list(unread.take_read()) == [first, second, third], "all were read: in the order of their arrival"
    assert list(unread.read_media()) == []
    clock.now += 100
    assert not unread.is_due


def test_how_long_requests_waited(monkeypatch):
    clock, unread = Clock(monkeypatch), UnreadRequests(enough_tokens=10**6)
    ((first,), tell_first), ((second,), tell_second) = sequence(0), sequence(1)
    clock.now += 5
    assert unread.waited_s == 0
    unread.add(first)
    clock.now += 2
    unread.add(second)
    clock.now += 1
    assert unread.waited_s == 3, "both wait at the same time"
    tell_first()
    tell_second()
    assert list(unread.take_read()) == [first, second]
    clock.now += 10
    assert unread.waited_s == 3
    ((third,), _) = sequence(2)
    unread.add(third)
    clock.now += 4
    assert unread.take_out(lambda _: True) == [third]
    assert unread.waited_s == 7


def test_they_wait_for_a_short_time_only(monkeypatch):
    clock, unread = Clock(monkeypatch), UnreadRequests(enough_tokens=10**6)
    (slow, _), (fast, tell) = sequence(1), sequence(2)
    unread.add(slow[0])
    unread.add(fast[0])
    tell()
    assert list(unread.take_read()) == []
    clock.now += unread.until_due(1.0)
    assert unread.is_due
    assert unread.until_due(1.0) == 0
    assert list(unread.take_read()) == fast
    assert len(unread) == 1
    assert not unread.is_due
    clock.now += 100
    assert not unread.is_due, "nothing has been read that could wait"


def test_they_do_not_wait_if_they_are_enough_for_the_engine(monkeypatch):
    Clock(monkeypatch)
    (samples, tell), (others, _) = sequence(1, num_samples=4), sequence(2)
    num_tokens = len(samples[0].request.input_tokens)
    for enough, expected in ((num_tokens, samples), (num_tokens + 1, [])):
        unread = UnreadRequests(enough)
        for each in [*samples, *others]:
            unread.add(each)
        if not samples[0].reading.is_done:
            tell()
        assert list(unread.take_read()) == expected, "samples of a prompt are computed once"


def test_they_do_not_wait_for_requests_that_were_aborted(monkeypatch):
    Clock(monkeypatch)
    unread = UnreadRequests(10**6)
    (slow, _), (fast, tell) = sequence(1), sequence(2)
    unread.add(slow[0])
    unread.add(fast[0])
    tell()
    assert list(unread.take_read()) == []
    assert unread.take_out(slow.__contains__) == slow
    assert unread.is_due
    assert list(unread.take_read()) == fast


def test_nothing_is_due_if_those_that_were_read_have_been_aborted(monkeypatch):
    clock, unread = Clock(monkeypatch), UnreadRequests(10**6)
    (slow, _), (fast, tell) = sequence(1), sequence(2)
    unread.add(slow[0])
    unread.add(fast[0])
    tell()
    assert list(unread.take_read()) == []
    assert unread.take_out(fast.__contains__) == fast
    assert list(unread.take_read()) == []
    clock.now += 100
    assert not unread.is_due, "the loop would not sleep"


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_tower_computes_what_was_read_while_the_rest_is_being_read(monkeypatch, deterministic):
    monkeypatch.setattr("headwater.engine.prompts._GATHER_S", 10**6)
    monkeypatch.setattr("headwater.engine.media._AHEAD_TOKENS", 1)
    go_on, calls, batches = threading.Event(), [], []
    read, compute = MediaReader._read, MediaEncoder._computed
    early, late = (asking(NAME, [picture(number)], number) for number in (1, 2))

    def slow(reader, content):
        if content == late.media[0].content:
            assert go_on.wait(LIMIT_S)
        read(reader, content)

    def counted(encoder, inputs):
        calls.extend(inputs)
        return compute(encoder, inputs)

    monkeypatch.setattr(MediaReader, "_read", slow)
    monkeypatch.setattr(MediaEncoder, "_computed", counted)
    with running(NAME, deterministic=deterministic) as engine:
        prefill = engine._runner.prefill
        engine._runner.prefill = lambda batch, *rest: batches.append(batch.query_lens) or prefill(batch, *rest)
        answers = []
        caller = threading.Thread(target=lambda: answers.extend(engine.generate([early, late])))
        caller.start()
        until(lambda: calls, "the first picture is not computed")
        assert not batches
        go_on.set()
        caller.join(LIMIT_S)
        told = engine.status().metrics
    assert calls == [each.media[0].content.digest for each in (early, late)]
    assert (told["num_media_computed"], told["num_media_cached"]) == (2, 0), "what is computed early is used, not found"
    assert batches == [[len(each.input_tokens) for each in (early, late)]], "both prompts in one batch"
    for asked, response in zip((early, late), answers, strict=True):
        assert response.output_logprobs == pytest.approx(full_pass(NAME, asked, response), abs=1e-4)
