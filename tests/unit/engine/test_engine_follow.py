"""Requests whose tokens are passed on round by round: nothing is lost, repeated or sent after the end."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from cases import case
from engine.engine_parts import (
    LIMIT_S,
    Held,
    assert_nothing_is_held,
    like_a_gpu,
    request,
    run,
    running,
    tokens_of,
    weights,
)
from tiny import tokenizer

from headwater.core.errors import RequestError, RolloutFailed
from headwater.core.new_tokens import TOKEN

LENGTHS = (5, 9, 5, 14, 3, 20)


class Sink:
    """Keeps what arrives, by request."""

    def __init__(self):
        self.output, self.ends, self.errors = {}, {}, {}
        self.num_rounds = 0

    def take(self, new):
        self.num_rounds += 1
        for number, tokens in new.rows():
            assert number not in self.ends, "a token after the end"
            self.output.setdefault(number, bytearray()).extend(tokens)

    def ended(self, number, reason):
        assert number not in self.ends, "a second end"
        self.ends[number] = reason

    def failed(self, number, error):
        self.ended(number, "failed")
        self.errors[number] = error

    def columns(self, number):
        found = np.frombuffer(bytes(self.output.get(number, b"")), TOKEN)
        return tuple(tuple(found[name].tolist()) for name in ("token", "logprob", "version"))

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition(self):  # noqa: ASYNC110  the engine's thread cannot be awaited
                await asyncio.sleep(0.002)


def varied(engine):
    """Requests that end in every way, some of them in the middle of a round."""
    plain = [request(tokens_of(length), key, max_new_tokens=40 + key) for key, length in enumerate(LENGTHS)]
    free = engine.generate(plain)
    stops = [tokenizer().decode(list(each.output_tokens[20:23])) for each in free]
    with_text = [
        replace(each, request_id=f"text {place}", sampling=replace(each.sampling, stop_strings=(stop, "never")))
        for place, (each, stop) in enumerate(zip(plain, stops, strict=True))
        if stop
    ]
    with_ids = [
        replace(each, request_id=f"ids {place}", sampling=replace(each.sampling, stop_token_ids=tuple(range(6, 30))))
        for place, each in enumerate(plain)
    ]
    given = [
        replace(plain[0], request_id="given", given_tokens=free[0].output_tokens[:11]),
        replace(plain[0], request_id="nothing left", given_tokens=free[0].output_tokens),
    ]
    return [*plain, *with_text, *with_ids, *given]


@pytest.mark.parametrize("settings", [{}, {"num_pages": 30}])
def test_what_is_passed_on_is_the_response(settings):
    """With a small cache sequences are preempted; the update interrupts all of them. Both keep what was passed on."""

    async def scenario(engine, asked):
        sink, sequences = Sink(), {}
        follower, held = engine.follow(sink), Held(engine, at=7)
        engine.pause()  # so that all begin together
        for number, each in enumerate(asked):
            follower.enter(number, each)
        sequences.update(follower._open)
        engine.resume()
        await sink.until(lambda sink: sink.num_rounds > 3)
        updated = engine.update_weights(weights(1, 7), "interrupt")
        held.go_on()
        await asyncio.to_thread(updated.result, LIMIT_S)
        await sink.until(lambda sink: len(sink.ends) == len(asked))
        for number, each in enumerate(asked):
            with case(each.request_id):
                response = sequences[number].response()
                expected = response.output_tokens, response.output_logprobs, response.output_versions
                assert sink.columns(number) == expected
                assert sink.ends[number] == response.stop_reason
        return sink

    with running(decode_steps=4, **settings) as engine:
        asked = varied(like_a_gpu(engine))
        sink = run(scenario(engine, asked))
        metrics = engine.metrics()
        assert_nothing_is_held(engine)
    assert {"stop", "length"} <= set(sink.ends.values())
    assert {version for number in sink.output for version in sink.columns(number)[2]} == {0, 7}
    assert bool(metrics.num_preempted) == bool(settings)
    num_streams = sum(-(-len(each) // TOKEN.itemsize // 4) for each in sink.output.values())
    assert settings or sink.num_rounds < num_streams / 3, "the requests of a round are passed on together"


def test_leaving_aborting_and_failing_end_a_request_once():
    async def scenario(engine):
        sink, other = Sink(), Sink()
        follower, followed = engine.follow(sink), engine.follow(other)
        held = Held(engine, at=9)
        long = [request(tokens_of(5), key, f"r{key}", max_new_tokens=200) for key in range(4)]
        for number, each in enumerate(long[:3]):
            follower.enter(number, each)
        followed.enter(0, long[3])
        with pytest.raises(RequestError, match="exceed"):
            follower.enter(9, request(tokens_of(5), max_new_tokens=10_000))
        await sink.until(lambda sink: len(sink.output) == 3)
        await other.until(lambda sink: sink.output)
        await held.wait()
        follower.leave(0)
        follower.leave(0)
        follower.leave(77)
        aborting = asyncio.ensure_future(asyncio.to_thread(engine.abort, "r1"))
        await sink.until(lambda _: engine._loop._inbox)

        def fail(*_):
            raise ValueError("the device is gone")

        engine._runner.decode = fail  # from the round after the one that is held
        held.go_on()
        assert await aborting == 1
        await sink.until(lambda sink: len(sink.ends) == 3)
        await other.until(lambda sink: 0 in sink.ends)
        assert sink.ends == {0: "abort", 1: "abort", 2: "failed"}
        assert "the device is gone" in str(sink.errors[2])
        assert set(other.output) == {0}, "each caller gets its own requests"
        with pytest.raises(RolloutFailed, match="the device is gone"):
            follower.enter(3, long[0])

    with running(decode_steps=1) as engine:
        run(scenario(engine))
    assert not [each for each in threading.enumerate() if each is engine._loop._thread and each.is_alive()]
