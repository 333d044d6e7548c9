"""The requests that are in progress, with every token that has arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headwater.backends.vllm.wire import Chunk, Garbage, Span
from headwater.core.errors import HeadwaterError
from headwater.core.records import ModelRequest, ModelResponse, StopReason

MAX_STUCK = 4
"""How often the stream of a request may break without a new token in between."""


@dataclass(eq=False)
class OpenRequest:
    """A request, and the tokens that have arrived so far, over one stream after the other."""

    number: int
    request: ModelRequest
    deliver: Callable[[ModelResponse | HeadwaterError], None]
    """Called once, with the response or the error."""
    has_ended: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reading: asyncio.Task[StopReason] | None = None
    """Reads the present stream. Cancelling it sends the rest of the request again."""
    num_before: int = 0
    """How many tokens came before the present stream."""
    sent_version: int = 0
    """The version with which the present stream began."""
    num_certain: int | None = None
    """Set when the weights change during the present stream: the tokens whose version is known before it ends."""
    num_sent: int = 0
    num_stuck: int = 0
    """How often its stream broke since the last token arrived. Updates that interrupt it are not counted."""
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    """When the first tokens arrived."""

    @property
    def stream_id(self) -> str:
        return f"{self.request.request_id}-{self.number}-{self.num_sent}"

    def rest(self) -> ModelRequest:
        """The request for the tokens that are still missing."""
        given = (*self.request.given_tokens, *self.tokens)
        return replace(self.request, request_id=self.stream_id, given_tokens=given)

    def begin(self, version: int) -> None:
        """A stream begins. Tokens of the last one whose version is not known are generated again."""
        if self.num_certain is not None:
            self.cut(self.num_certain)
        self.num_certain = None
        self.num_before = len(self.tokens)
        self.num_sent += 1
        self.sent_version = version

    def extend(self, chunk: Chunk) -> None:
        if not chunk.tokens:
            return
        if self.started is None:
            self.started = time.perf_counter()
        self.num_stuck = 0
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += [self.sent_version] * len(chunk.tokens)

    def weights_change(self) -> None:
        """The stream continues under other weights. Tokens may be on their way, so only its end tells the versions."""
        if self.num_certain is None:
            self.num_certain = len(self.tokens)

    def end_stream(self, spans: tuple[Span, ...], version_of: Mapping[str, int]) -> None:
        """Take the versions of the stream's tokens from its labels."""
        labelled: list[int] = []
        for span in spans:
            if span.label not in version_of:
                raise Garbage(f"tokens of weights labelled {span.label!r}, which this run did not publish")
            if span.start != len(labelled):
                raise Garbage(f"labels of tokens that begin at {span.start} after {len(labelled)} tokens")
            labelled += [version_of[span.label]] * (span.end - span.start)
        if len(labelled) != len(self.tokens) - self.num_before:
            raise Garbage(f"labels of {len(labelled)} tokens for {len(self.tokens) - self.num_before}")
        self.versions[self.num_before :] = labelled
        self.num_certain = None

    def cut(self, count: int) -> None:
        del self.tokens[count:], self.logprobs[count:], self.versions[count:]

    def partial(self) -> ModelResponse:
        """What has arrived, without tokens whose version is not known."""
        if self.num_certain is not None:
            self.cut(self.num_certain)
        return self._response("abort")

    def finish(self, reason: StopReason) -> None:
        self._end(self.partial() if reason == "abort" else self._response(reason))

    def fail(self, error: HeadwaterError) -> None:
        self._end(error)

    def _end(self, result: ModelResponse | HeadwaterError) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.deliver(result)

    def _response(self, reason: StopReason) -> ModelResponse:
        now = time.perf_counter()
        started = now if self.started is None else self.started
        return ModelResponse(
            input_tokens=self.request.input_tokens,
            output_tokens=tuple(self.tokens),
            output_logprobs=tuple(self.logprobs),
            output_versions=tuple(self.versions),
            stop_reason=reason,
            queue_s=started - self.arrived,
            generate_s=now - started,
        )


def given_whole(request: ModelRequest, end_tokens: Sequence[int]) -> ModelResponse | None:
    """The answer to a request whose given tokens are already a complete response."""
    given, sampling = request.given_tokens, request.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_end else end_tokens)}
    if given and len(given) > sampling.min_new_tokens and given[-1] in ends:
        return ModelResponse(request.input_tokens, (), (), (), "stop")
    if len(given) >= sampling.max_new_tokens:
        return ModelResponse(request.input_tokens, (), (), (), "length")
    return None
