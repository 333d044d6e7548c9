"""Applies operations to an engine step by step and checks every response. Shared by the tests on CPU and CUDA."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from engine.engine_parts import LIMIT_S, Stepped, Streamed, assert_nothing_is_held, full_pass, reference, weights
from tiny import tokenizer

from headwater.core.capabilities import ALL_TAGS
from headwater.core.errors import WeightsError
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams

TAGS = (("kv_cache",), ("weights",), ALL_TAGS)
MODES = ("interrupt", "in_flight", "drain")


@dataclass
class Sent:
    request: ModelRequest
    answer: Future[ModelResponse]
    streamed: Streamed | None = None
    aborted: bool = False
    left: bool = False
    """Whether the caller stopped waiting before the response arrived."""


@dataclass
class Play:
    """Applies operations and records the requests."""

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
        if all(future.done() for _, _, future in self.updates):  # otherwise it would wait for a drain
            self.num_versions += 1
            self.engine.call(lambda: self.engine.engine.set_version(self.num_versions))

    def sleep(self, tags: tuple[str, ...]) -> None:
        self.engine.call(lambda: self.engine.engine.sleep(tags))

    def wake(self, tags: tuple[str, ...]) -> None:
        self.engine.call(lambda: self.engine.engine.wake(tags))

    def play(self, steps: list[tuple[Any, ...]]) -> list[tuple[Sent, ModelResponse]]:
        """All responses whose callers waited for them."""
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
        self.engine.call(self.engine.engine.wake)
        self.engine.call(self.engine.engine.resume)
        self.engine.finish()
        return [(sent, sent.answer.result(LIMIT_S)) for sent in self.sent if not sent.left]

    def seeds(self) -> dict[int, int]:
        """The seed of the weights for every version that was active."""
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
