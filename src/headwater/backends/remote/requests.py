"""The requests that are in progress, with every token that has arrived."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from headwater.backends.remote.link import Garbage, Sending, ServerLink, Span, StreamedTokens
from headwater.backends.remote.media import NO_MEDIA, MediaPrompt, MediaPrompts
from headwater.backends.remote.model import ServedWeights
from headwater.core.errors import HeadwaterError, RequestError
from headwater.core.protocols import Tokenizer
from headwater.core.requests import Delta, ModelRequest, ModelResponse, StopReason
from headwater.engine.stops import find_stop

MAX_STUCK = 4
"""How often the stream of a request may break without a new token in between."""


_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
"""Between two attempts to send a request to a server that has no room for it."""
_REFUSED_LIMIT_S = 600.0
_ABORT_S = 3.0
"""How long the tokens of aborted requests may take to arrive."""


@dataclass(frozen=True)
class ServedModel:
    """What must be known about the model to find the end of a response."""

    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    prompts: MediaPrompts | None = None
    """Of a model that reads images."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Tells the versions of weights from those of an earlier run on the same server."""

    async def prompt(self, request: ModelRequest) -> MediaPrompt:
        """Empty for a request without images."""
        if not request.media or self.prompts is None:
            return NO_MEDIA
        return await asyncio.to_thread(self.prompts.of, request)


@dataclass(eq=False)
class OpenRequest:
    """A request, and the tokens that have arrived so far, over one stream after the other."""

    number: int
    request: ModelRequest
    deliver: Callable[[ModelResponse | HeadwaterError], None]
    """Called once, with the response or the error."""
    on_tokens: Callable[[Delta], None] | None = None
    """Called with new tokens whose version is certain."""
    num_told: int = 0
    """How many tokens it was called with."""
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
    num_refused: int = 0
    """How often the server had no room for it since the last token arrived."""
    refused_since: float = 0.0
    is_aborted: bool = False
    """It is not sent again."""
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None
    """When the first tokens arrived."""

    @property
    def stream_id(self) -> str:
        return f"{self.request.request_id}-{self.number}-{self.num_sent}"

    @property
    def is_silent(self) -> bool:
        """The present stream is being read, and no token of it has arrived."""
        return self.reading is not None and not self.reading.done() and len(self.tokens) == self.num_before

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

    def extend(self, chunk: StreamedTokens) -> None:
        if not chunk.tokens:
            return
        if self.started is None:
            self.started = time.perf_counter()
        self.num_stuck = self.num_refused = 0
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += [self.sent_version] * len(chunk.tokens)

    def refused(self) -> float | None:
        """The server has no room for it now. The seconds until the next attempt; None if there were enough."""
        now = time.monotonic()
        if not self.num_refused:
            self.refused_since = now
        self.num_refused += 1
        if now - self.refused_since > _REFUSED_LIMIT_S:
            return None
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self.num_refused - 1, 10))

    def tell(self) -> None:
        """Pass on the tokens that will not change any more."""
        end = len(self.tokens) if self.num_certain is None else self.num_certain
        if self.on_tokens is not None and self.num_told < end:
            new = slice(self.num_told, end)
            self.on_tokens(Delta(tuple(self.tokens[new]), tuple(self.logprobs[new]), tuple(self.versions[new])))
            self.num_told = end

    def weights_change(self) -> None:
        """The stream continues under other weights. Tokens may be on their way, so only its end tells the versions."""
        if self.num_certain is None:
            self.num_certain = len(self.tokens)

    def end_stream(self, spans: tuple[Span, ...], version_of: Callable[[str], int | None]) -> None:
        """Take the versions of the stream's tokens from its labels."""
        labelled: list[int] = []
        for span in spans:
            if (version := version_of(span.label)) is None:
                raise Garbage(f"tokens of weights labelled {span.label!r}, which this run did not publish")
            if span.start != len(labelled):
                raise Garbage(f"labels of tokens that begin at {span.start} after {len(labelled)} tokens")
            labelled += [version] * (span.end - span.start)
        if len(labelled) != len(self.tokens) - self.num_before:
            raise Garbage(f"labels of {len(labelled)} tokens for {len(self.tokens) - self.num_before}")
        self.versions[self.num_before :] = labelled
        self.num_certain = None

    def cut(self, count: int) -> None:
        del self.tokens[count:], self.logprobs[count:], self.versions[count:]

    def end_after(self, num_checked: int, model: ServedModel) -> int | None:
        """The number of new tokens up to the one that completes a stop string; None if none does."""
        sampling, given = self.request.sampling, self.request.given_tokens
        if not sampling.stop_strings:
            return None
        first = max(len(given) + num_checked, sampling.min_new_tokens)
        tokens = [*given, *self.tokens]
        if first >= len(tokens):
            return None
        found = find_stop(model.tokenizer, tokens, first, sampling.stop_strings)
        return None if found is None else found - len(given)

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
            self.tell()
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


async def read_stream(
    opened: OpenRequest, link: ServerLink, model: ServedModel, weights: ServedWeights, *, labels_tokens: bool
) -> StopReason:
    """Read one stream to its end. ``abort`` means that the rest of the response is missing."""
    rest, has_stopped = opened.rest(), False
    sending = Sending(
        rest,
        model.end_tokens,
        f"{model.run}-{weights.cache_name(opened.sent_version)}",
        streams=opened.on_tokens is not None,
        prompt=await model.prompt(rest),
        has_adapters=bool(weights.adapter_folder),
    )
    num_checked = len(opened.tokens)
    spans: tuple[Span, ...] | None = None
    reason: StopReason = "abort"  # older versions send no last chunk for a request that was aborted
    async with aclosing(link.stream(sending)) as chunks:
        async for chunk in chunks:
            if opened.num_certain is None:  # otherwise it spans an update, and is checked at its end
                weights.check(chunk.label)
            weights.seen = chunk.label or weights.seen
            if rest.media:
                check_prompt(rest, chunk)
            opened.extend(chunk)
            if chunk.stop_reason is not None:
                spans, reason = chunk.spans, chunk.stop_reason
                break
            if not has_stopped and (end := opened.end_after(num_checked, model)) is not None:
                has_stopped = True
                if opened.num_certain is None:
                    opened.cut(end)
                    return "stop"
                # Only the last chunk tells the versions.
                await link.abort(rest.request_id)
            elif not has_stopped:
                opened.tell()
            num_checked = len(opened.tokens)
    if spans is not None and labels_tokens:
        opened.end_stream(spans, weights.version_of)
    end = opened.end_after(opened.num_before, model)
    if end is None:
        return reason
    opened.cut(end)
    return "stop"


def check_prompt(request: ModelRequest, chunk: StreamedTokens) -> None:
    """Raise if the server makes other tokens of the images than the run, which would train on other tokens."""
    whole = (*request.input_tokens, *request.given_tokens)
    count = chunk.num_prompt if chunk.prompt is None else len(chunk.prompt)
    if count is None or (count == len(whole) and chunk.prompt in (None, whole)):
        return
    raise RequestError(
        f"request {request.request_id}: the server makes {count} tokens of a prompt with images that has {len(whole)} "
        "here; start it with the same preprocessor_config.json and limits of pixels as the run's model"
    )


async def fetch_tokens(wanted: Sequence[OpenRequest], link: ServerLink) -> None:
    """Let the server end requests, and wait a moment for the tokens of those that it answers only at their end."""

    async def end(opened: OpenRequest, reading: asyncio.Task[StopReason]) -> None:
        await link.abort(opened.stream_id)
        await asyncio.wait({reading})

    ending = [asyncio.create_task(end(each, each.reading)) for each in wanted if each.reading and each.is_silent]
    if not ending:
        return
    try:
        await asyncio.wait(ending, timeout=_ABORT_S)
    finally:
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def given_whole(request: ModelRequest, end_tokens: Sequence[int]) -> ModelResponse | None:
    """The answer to a request whose given tokens are already a complete response."""
    given, sampling = request.given_tokens, request.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_end else end_tokens)}
    if given and len(given) > sampling.min_new_tokens and given[-1] in ends:
        return ModelResponse(request.input_tokens, (), (), (), "stop")
    if len(given) >= sampling.max_new_tokens:
        return ModelResponse(request.input_tokens, (), (), (), "length")
    return None
