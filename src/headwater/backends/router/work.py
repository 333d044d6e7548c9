"""One request on its way: what servers have generated for it so far, and the request for the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.core.requests import Alternatives, Delta, ModelRequest, ModelResponse, PromptScores, StopReason


@dataclass(eq=False, slots=True)
class Work:
    """Belongs to the event loop of its caller."""

    key: int
    request: ModelRequest
    loop: asyncio.AbstractEventLoop
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    queue_s: float = 0.0
    generate_s: float = 0.0
    num_tries: int = 0
    """How often it has asked for a server."""
    is_in_policy: bool = False
    """Whether it waits for a server or has one."""
    is_aborted: bool = False
    """Its caller wants what there is."""
    num_stuck: int = 0
    """How many servers in a row were lost with it before it got a token."""
    place: asyncio.Future[str] | None = None
    """While it waits: the name of the server that it gets."""
    server: str | None = None
    """The server that works on it."""
    caller: asyncio.Task[Any] | None = None
    """The task that waits for that server."""
    is_moved: bool = False
    """The caller was interrupted, because the server does not return what it has. Another one continues."""
    refused_since: float | None = None
    """When a server first refused it because its queue was full, if none has taken it since."""
    short_since: float | None = None
    """Since when all servers that serve have had older weights than it has seen."""
    whole: ModelResponse | None = None
    """The response, if one server has generated all of it. Nothing is copied then."""

    @property
    def newest_version(self) -> int | None:
        return max(self.whole.output_versions if self.whole is not None else self.versions, default=None)

    @property
    def has_all_tokens(self) -> bool:
        """Whether nothing is missing but the word that it has ended."""
        num_given = len(self.request.given_tokens) + len(self.tokens)
        return bool(self.tokens) and num_given >= self.request.sampling.max_new_tokens

    def take(self, part: ModelResponse | Delta) -> None:
        """Keep what a server has generated."""
        if isinstance(part, ModelResponse):
            if part.stop_reason != "abort" and not self.tokens and part.input_tokens == self.request.input_tokens:
                self.whole = part
                return
            self.queue_s += part.queue_s
            self.generate_s += part.generate_s
            part = Delta.of(part)
        if part.tokens:
            self.num_stuck, self.refused_since = 0, None
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.top_logprobs += part.top_logprobs
        self.prompt_scores = self.prompt_scores or part.prompt_scores

    def rest(self, *, resumable: bool) -> ModelRequest:
        """The request for the missing tokens.

        A server that cannot continue a response gets the tokens so far as the end of its prompt.
        """
        request = self.request
        given = (*request.given_tokens, *self.tokens)
        if not given:
            return request
        sampling = request.sampling
        if self.prompt_scores is not None:
            sampling = replace(sampling, prompt_logprobs=False)
        if resumable:
            return replace(request, given_tokens=given, sampling=sampling)
        sampling = replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - len(given),
            min_new_tokens=max(0, sampling.min_new_tokens - len(given)),
        )
        return replace(request, input_tokens=(*request.input_tokens, *given), given_tokens=(), sampling=sampling)

    def start_again(self) -> None:
        """Discard what there is, for a server that could not continue it."""
        self.tokens, self.logprobs, self.versions, self.top_logprobs = [], [], [], []
        self.prompt_scores = None

    def interrupt(self, server: str, num_tries: int) -> None:
        """Stop waiting for a server, unless it has returned the work. Called on the event loop of the caller."""
        is_same = (self.server, self.num_tries) == (server, num_tries)
        if is_same and self.caller is not None and not self.is_moved:
            self.is_moved = True
            self.caller.cancel()

    def response(self, reason: StopReason) -> ModelResponse:
        if self.whole is not None:
            return self.whole
        return ModelResponse(
            input_tokens=self.request.input_tokens,
            output_tokens=tuple(self.tokens),
            output_logprobs=tuple(self.logprobs),
            output_versions=tuple(self.versions),
            stop_reason=reason,
            queue_s=self.queue_s,
            generate_s=self.generate_s,
            output_top_logprobs=tuple(self.top_logprobs),
            prompt_scores=self.prompt_scores,
        )
