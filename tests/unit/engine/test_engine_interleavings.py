"""Whatever happens to the engine in whatever order, no token is lost, repeated or credited to the wrong weights."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engine.engine_parts import (
    LIMIT_S,
    Stepped,
    Streamed,
    assert_nothing_is_held,
    full_pass,
    like_a_gpu,
    make_model,
    reference,
    request,
    running,
    stepped,
    tokens_of,
    weights,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tokenizer

from headwater.core.errors import WeightsError
from headwater.core.protocols import ALL_TAGS
from headwater.core.records import ModelRequest, ModelResponse, SamplingParams
from headwater.engine.engine import Engine

pytestmark = pytest.mark.timeout(200)

NUM_PAGES = 13
SMALL = {"num_pages": NUM_PAGES, "page_tokens": 4, "max_sequences": 4, "max_prefill_tokens": 7, "decode_steps": 3}
"""Room for about two of the longest requests, so that what runs must make room for others."""
STOPS = tuple(range(6, 24))
"""More than the device watches for; the first few it does watch."""
STOP_TEXTS = ("w", "e ")
"""The second is seldom one token."""
PROMPTS = (tokens_of(1), tokens_of(3), tokens_of(8), tokens_of(8) + tokens_of(5), tokens_of(17))
TAGS = (("kv_cache",), ("weights",), ALL_TAGS)
MODES = ("interrupt", "in_flight", "drain")

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


@dataclass
class Sent:
    request: ModelRequest
    answer: Future[ModelResponse]
    streamed: Streamed | None = None
    aborted: bool = False
    left: bool = False
    """Whether the caller went away before the answer came."""


@dataclass
class Play:
    """Carries operations out and remembers what was asked for."""

    engine: Stepped
    kind: str = "qwen3"
    sent: list[Sent] = field(default_factory=list)
    updates: list[tuple[int, int, Future[None]]] = field(default_factory=list)
    num_versions: int = 0

    def submit(self, asked: ModelRequest, count: int) -> None:
        for _ in range(count):
            named = self._named(asked)
            self.sent.append(Sent(named, self.engine.submit(named)))

    def stream(self, asked: ModelRequest, _: int) -> None:
        named = self._named(asked)
        streamed, answer = self.engine.stream(named)
        self.sent.append(Sent(named, answer, streamed))

    def _named(self, asked: ModelRequest) -> ModelRequest:
        return ModelRequest(f"r{len(self.sent)}", asked.input_tokens, asked.sampling, asked.rng_key)

    def turn(self, count: int) -> None:
        self.engine.turn(count)

    def abort(self, place: int) -> None:
        if not self.sent:
            return
        sent = self.sent[place % len(self.sent)]
        sent.aborted |= self.engine.call(lambda: self.engine.engine.abort(sent.request.request_id))

    def leave(self, place: int) -> None:
        self.engine.settle()
        sent = self.sent[place % len(self.sent)] if self.sent else None
        if sent is None or sent.answer.done():
            return
        num_open = self.engine.engine._intake.num_open
        sent.left = sent.answer.cancel()
        self.engine.settle()
        self.engine.turn()
        assert self.engine.engine._intake.num_open < num_open, "a caller that leaves takes its request along"

    def pause(self) -> None:
        self.engine.call(self.engine.engine.pause)

    def resume(self) -> None:
        self.engine.call(self.engine.engine.resume)

    def update(self, mode: str, seed: int) -> None:
        self.num_versions += 1
        future = self.engine.engine.update_weights(weights(seed, self.num_versions, self.kind), mode)
        self.updates.append((self.num_versions, seed, future))

    def set_version(self) -> None:
        if all(future.done() for _, _, future in self.updates):  # it would wait for an update that waits for a drain
            self.num_versions += 1
            self.engine.call(lambda: self.engine.engine.set_version(self.num_versions))

    def sleep(self, tags: tuple[str, ...]) -> None:
        self.engine.call(lambda: self.engine.engine.sleep(tags))

    def wake(self, tags: tuple[str, ...]) -> None:
        self.engine.call(lambda: self.engine.engine.wake(tags))

    def play(self, steps: list[tuple[Any, ...]]) -> list[tuple[Sent, ModelResponse]]:
        """All responses that somebody waited for."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        self.engine.call(self.engine.engine.wake)
        self.engine.call(self.engine.engine.resume)
        self.engine.finish()
        return [(sent, sent.answer.result(LIMIT_S)) for sent in self.sent if not sent.left]

    def seeds(self) -> dict[int, int]:
        """Which weights every version that was ever in force stands for."""
        seeds, refused = {0: 0}, set()
        for version, seed, future in self.updates:
            error = future.exception(LIMIT_S)
            if error is None:
                seeds[version] = seed
            else:
                assert isinstance(error, WeightsError)
                assert "asleep" in str(error)
                refused.add(version)
        for version in range(1, self.num_versions + 1):
            if version not in refused and version not in seeds:
                seeds[version] = seeds[max(known for known in seeds if known < version)]
        return seeds


def num_until_stop(tokens: tuple[int, ...], sampling: SamplingParams) -> int | None:
    """Number of tokens up to the first one that ends a response; ``None`` when none of them does."""
    least = sampling.min_new_tokens
    start = len(tokenizer().decode(list(tokens[:least])).rstrip("\ufffd"))
    for end in range(least + 1, len(tokens) + 1):
        text = tokenizer().decode(list(tokens[:end]))
        completes = any(text.find(stop, max(0, start + 1 - len(stop))) >= 0 for stop in sampling.stop_strings)
        if completes or tokens[end - 1] in sampling.stop_token_ids:
            return end
    return None


def unexplained(model: Any, response: ModelResponse, sampling: SamplingParams, places: set[int]) -> dict[int, float]:
    """Log-probs at ``places`` that are not ``model``'s.

    Where a cut falls on the very edge of a token, rounding decides about the token; a cut close by is then right too.
    """
    left = {place: response.output_logprobs[place] for place in places}
    for nudge in (1.0, 1 - 1e-4, 1 + 1e-4):
        nudged = replace(sampling, top_p=min(1.0, sampling.top_p * nudge), min_p=sampling.min_p * nudge)
        expected = full_pass(model, response, nudged)
        left = {place: ours for place, ours in left.items() if ours != pytest.approx(expected[place], abs=1e-4)}
        if not left:
            break
    return left


def check(play: Play, responses: list[tuple[Sent, ModelResponse]], *, logprobs_too: bool) -> None:
    seeds = play.seeds()
    for sent, response in responses:
        sampling, tokens = sent.request.sampling, response.output_tokens
        assert num_until_stop(tokens, sampling) == (len(tokens) if response.stop_reason == "stop" else None)
        assert not set(tokens[: sampling.min_new_tokens]) & set(sampling.stop_token_ids)
        if response.stop_reason == "length":
            assert len(tokens) == sampling.max_new_tokens
        elif response.stop_reason == "abort":
            assert len(tokens) < sampling.max_new_tokens
        assert (response.stop_reason == "abort") == sent.aborted
        assert list(response.output_versions) == sorted(response.output_versions)
        assert set(response.output_versions) <= set(seeds)
        if sent.streamed is not None:
            assert all(delta.tokens or delta.stop_reason for delta in sent.streamed.deltas)
        if logprobs_too and tokens:
            for seed in {seeds[version] for version in response.output_versions}:
                places = {place for place, version in enumerate(response.output_versions) if seeds[version] == seed}
                assert not unexplained(reference(play.kind, seed), response, sampling, places)
    assert_nothing_is_held(play.engine.engine)


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
    """What the tests above count on: with this little room, preemption happens."""
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
    """The same with the loop running freely and every caller on a thread of its own."""
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
        assert_nothing_is_held(engine)
