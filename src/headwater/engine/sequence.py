"""One request on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.core.media import identity_tokens
from headwater.core.new_tokens import NewTokens
from headwater.core.records import NOT_SAMPLED
from headwater.core.requests import Alternatives, Delta, ModelRequest, ModelResponse, PromptScores, StopReason
from headwater.engine.guides import Guide
from headwater.engine.media_reader import Reading
from headwater.engine.plans import MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class Following:
    """A caller that takes the new tokens of many requests together, once per round, and its number for this one."""

    feed: int
    """Identifies the caller. The requests of one caller are passed on together. Positive."""
    number: int
    put: Callable[[NewTokens], None]
    """Called on the engine's thread with the new tokens of all requests of this caller."""


@dataclass(eq=False, slots=True)
class EngineSequence:
    """A request, the tokens generated for it so far, and the callbacks of its caller.

    The scheduler decides where a sequence is on the device (lane, row, pages); that changes when the sequence is
    preempted or interrupted. The tokens here are never lost: to resume, the engine computes their keys and values
    again. A request with given tokens enters like a sequence that was interrupted after them.
    """

    request: ModelRequest
    stop_ids: tuple[int, ...]
    order: int
    """Arrival number: older requests run first, younger ones are preempted first."""
    on_end: Callable[[EngineSequence], None]
    on_delta: Callable[[Delta], None] | None = None
    following: Following | None = None
    guide: Guide | None = None
    """For a request with a bias, a penalty, a grammar or alternatives."""
    reading: Reading | None = None
    """Other threads read its images and videos. It enters the queue when they are done."""
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    """Per token, if requested."""
    prompt_scores: PromptScores | None = None
    stop_reason: StopReason | None = None
    num_streamed: int = 0
    num_checked: int = 0
    """Number of tokens that have been searched for stop strings."""
    has_stopped: bool = False
    """Whether it ended with a stop token or stop string, and not at its token limit."""
    error: Exception | None = None

    def __post_init__(self) -> None:
        num_given = len(self.request.given_tokens)
        if not num_given:
            return
        # The log-probs and versions of given tokens are never returned; they only keep the lists equally long.
        self.extend([*self.request.given_tokens], [0.0] * num_given, [NOT_SAMPLED] * num_given)
        self.top_logprobs += [()] * (num_given if self.request.sampling.num_top_logprobs else 0)
        self.num_streamed = num_given
        # The last given token may still end the response; the tokens before it did not.
        self.num_checked = max(0, num_given - 1)

    @property
    def is_watched(self) -> bool:
        """Whether the host must inspect new tokens while the sequence runs."""
        return self.on_delta is not None or bool(self.request.sampling.stop_strings) or self.has_many_stop_ids

    @property
    def has_many_stop_ids(self) -> bool:
        return len(self.stop_ids) > MAX_STOP_IDS

    @property
    def num_left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def all_tokens(self) -> NDArray[np.int32]:
        """The prompt and all generated tokens: what must be in the cache before the next token.

        Negative numbers stand for media (``core.media.identity_tokens``). So sequences with the same numbers are the
        same input for the model, and ``np.maximum(numbers, 0)`` are token ids whose embeddings media replace.
        """
        prompt, media = self.request.input_tokens, self.request.media
        if not media:
            return np.array([*prompt, *self.tokens], np.int32)
        return np.concatenate([identity_tokens(prompt, media), np.array(self.tokens, np.int32)])

    def extend(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions

    def truncate(self, num_tokens: int) -> None:
        """Discard tokens that were sampled after the end of the response."""
        del self.tokens[num_tokens:], self.logprobs[num_tokens:], self.versions[num_tokens:]
        del self.top_logprobs[num_tokens:]

    def stream(self) -> None:
        """Pass new tokens to the caller that streams this request, if there is one."""
        if self.on_delta is not None and (len(self.tokens) > self.num_streamed or self.stop_reason is not None):
            first, new = self.num_streamed, slice(self.num_streamed, None)
            self.num_streamed = len(self.tokens)
            self.on_delta(
                Delta(
                    tuple(self.tokens[new]),
                    tuple(self.logprobs[new]),
                    tuple(self.versions[new]),
                    self.stop_reason,
                    tuple(self.top_logprobs[new]),
                    self.prompt_scores if first == len(self.request.given_tokens) else None,
                )
            )

    def response(self) -> ModelResponse:
        now = time.perf_counter()
        started = self.started if self.started is not None else now
        assert self.stop_reason is not None, "a response exists once the sequence has ended"
        tokens, logprobs, versions = self.tokens, self.logprobs, self.versions
        num_given = len(self.request.given_tokens)
        if num_given:
            tokens, logprobs, versions = tokens[num_given:], logprobs[num_given:], versions[num_given:]
        return ModelResponse(
            input_tokens=self.request.input_tokens,
            output_tokens=tuple(tokens),
            output_logprobs=tuple(logprobs),
            output_versions=tuple(versions),
            stop_reason=self.stop_reason,
            queue_s=started - self.arrived,
            generate_s=now - started,
            output_top_logprobs=tuple(self.top_logprobs[num_given:]),
            prompt_scores=self.prompt_scores,
        )
