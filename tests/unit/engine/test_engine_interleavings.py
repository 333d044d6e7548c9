"""For any order of operations, no token is lost, repeated or attributed to the wrong weights."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

from engine.engine_parts import (
    LIMIT_S,
    assert_nothing_is_held,
    like_a_gpu,
    make_model,
    request,
    running,
    stepped,
    tokens_of,
    until,
    weights,
)
from engine.play import MODES, TAGS, Play, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.core.errors import WeightsError
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.engine.engine import Engine

NUM_PAGES = 13
SMALL = {"num_pages": NUM_PAGES, "page_tokens": 4, "max_sequences": 4, "max_prefill_tokens": 7, "decode_steps": 3}
"""Room for about two of the longest requests, so that sequences are preempted."""
STOPS = tuple(range(6, 24))
"""More stop tokens than the device checks. The first eight fit."""
STOP_TEXTS = ("w", "e ")
"""The second is rarely a single token."""
PROMPTS = (tokens_of(1), tokens_of(3), tokens_of(8), tokens_of(8) + tokens_of(5), tokens_of(17))

NO_CUT: dict[str, Any] = {}
CUTS = (NO_CUT, NO_CUT, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01})

requests = st.builds(
    lambda prompt, key, new, least, temperature, cut, stops, texts: request(
        prompt,
        key,
        max_new_tokens=new,
        min_new_tokens=min(new, least),
        temperature=temperature,
        stop_token_ids=stops,
        stop_strings=texts,
        **cut,
    ),
    st.sampled_from(PROMPTS),
    st.integers(0, 3),
    st.sampled_from((1, 2, 5, 16, 30)),
    st.sampled_from((0, 0, 1, 4, 9)),
    st.sampled_from((1.0, 1.0, 0.0, 0.6)),
    st.sampled_from(CUTS),
    st.sampled_from(((), STOPS, STOPS[:8])),
    st.sampled_from(((), (), STOP_TEXTS)),
)


def operations(modes: tuple[str, ...]) -> Any:
    return st.lists(
        st.one_of(
            st.tuples(st.just("submit"), requests, st.integers(1, 3)),
            st.tuples(st.just("stream"), requests, st.just(1)),
            st.tuples(st.just("turn"), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 9)),
            st.tuples(st.just("leave"), st.integers(0, 9)),
            st.tuples(st.just("pause")),
            st.tuples(st.just("resume")),
            st.tuples(st.just("update"), st.sampled_from(modes), st.integers(0, 1)),
            st.tuples(st.just("set_version")),
            st.tuples(st.just("sleep"), st.sampled_from(TAGS)),
            st.tuples(st.just("wake"), st.sampled_from(TAGS)),
        ),
        min_size=3,
        max_size=25,
    )


EXAMPLES = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(operations(("interrupt", "drain")), st.booleans())
def test_every_request_ends_once_and_every_token_is_of_the_weights_it_names(steps, gpu_like):
    with stepped(gpu_like=gpu_like, **SMALL) as engine:
        play = Play(engine)
        check(play, play.play(steps), logprobs_too=True)


@EXAMPLES
@given(operations(MODES), st.booleans())
def test_keeping_the_cache_across_updates_loses_nothing_either(steps, gpu_like):
    with stepped(gpu_like=gpu_like, **SMALL) as engine:
        play = Play(engine)
        check(play, play.play(steps), logprobs_too=False)


@settings(EXAMPLES, max_examples=6)
@given(operations(MODES), st.booleans())
def test_deterministic_responses_are_to_the_bit_what_they_are_alone(steps, gpu_like):
    same = [("update", step[1], 0) if step[0] == "update" else step for step in steps]
    with stepped(gpu_like=gpu_like, deterministic=True, **SMALL) as engine:
        play = Play(engine)
        responses = play.play(same)
        check(play, responses, logprobs_too=False)
    with running(deterministic=True, page_tokens=SMALL["page_tokens"]) as alone:
        for sent, response in responses:
            [expected] = alone.generate([sent.request])
            count = len(response.output_tokens)
            assert response.output_tokens == expected.output_tokens[:count]
            assert response.output_logprobs == expected.output_logprobs[:count]
            assert sent.aborted or count == len(expected.output_tokens)


def test_the_small_cache_makes_requests_give_way():
    """The tests above rely on this: with so few pages, sequences are preempted."""
    with stepped(**SMALL) as engine:
        answers = [engine.submit(request(prompt, max_new_tokens=30)) for prompt in PROMPTS[1:]]
        engine.finish()
        assert engine.engine.metrics().num_preempted > 0
        assert [len(answer.result(LIMIT_S).output_tokens) for answer in answers] == [30] * 4


def give_up_on(engine: Engine) -> None:
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(engine.agenerate(request(PROMPTS[-1], max_new_tokens=30)), 0.005))


@settings(EXAMPLES, max_examples=5)
@given(operations(MODES), st.randoms(use_true_random=False))
def test_nothing_is_lost_when_everyone_calls_at_once(steps, random):
    """The same with a freely running loop and one thread per caller."""
    with running(make_model(), **SMALL) as engine:
        engine = like_a_gpu(engine) if random.random() < 0.5 else engine
        responses: list[tuple[ModelRequest, ModelResponse]] = []
        failures: list[Exception] = []
        versions = iter(range(1, 100))

        def act(step: tuple[Any, ...]) -> None:
            name, *arguments = step
            try:
                if name in ("submit", "stream"):
                    asked, count = arguments
                    responses.extend(zip([asked] * count, engine.generate([asked] * count), strict=True))
                elif name == "update":
                    engine.update_weights(weights(arguments[1], next(versions)), arguments[0]).result(LIMIT_S)
                elif name in ("sleep", "wake"):
                    getattr(engine, name)(arguments[0])
                elif name in ("pause", "resume"):
                    getattr(engine, name)()
                elif name == "abort":
                    engine.abort()
                elif name == "leave":
                    give_up_on(engine)
                engine.metrics()
            except WeightsError as error:
                if "asleep" not in str(error):
                    failures.append(error)
            except Exception as error:  # noqa: BLE001  shown below
                failures.append(error)

        threads = [threading.Thread(target=act, args=(step,), daemon=True) for step in steps]
        for thread in threads:
            thread.start()
        for thread, (name, *_) in zip(threads, steps, strict=True):
            if name not in ("submit", "stream", "update"):
                thread.join(LIMIT_S)
        engine.wake()
        engine.resume()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a call hangs"
        assert not failures
        for asked, response in responses:
            assert response.stop_reason != "length" or len(response.output_tokens) == asked.sampling.max_new_tokens
        until(lambda: not engine._intake.num_open, "an abandoned request goes on")
        assert_nothing_is_held(engine)
