"""The requests that are in progress. Every token that arrived is kept, so that another server can continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headwater.backends.native.client import ENGINE_FAILED, RequestLink, error_of
from headwater.core.errors import HeadwaterError, RolloutFailed, ServerLost
from headwater.core.new_tokens import TOKEN, NewTokens
from headwater.core.requests import Delta, ModelRequest, ModelResponse, StopReason
from headwater.observe.spans import Spans
from headwater.serving.native.media import UNKNOWN_MEDIA
from headwater.serving.native.request import write_request

_MAX_STUCK = 4


@dataclass(eq=False)
class FramedRequest:
    """A request that a server works on, and the tokens that have arrived so far."""

    number: int
    """Identifies the request on the connection."""
    request: ModelRequest
    deliver: Callable[[ModelResponse | HeadwaterError], None]
    """Called once, with the response or the error."""
    on_tokens: Callable[[Delta], None] | None = None
    """Called with new tokens as they arrive."""
    has_ended: bool = False
    output: bytearray = field(default_factory=bytearray)
    """The tokens as they arrived, with log-probs and versions (``new_tokens.TOKEN``)."""
    arrived: float = field(default_factory=time.perf_counter)
    was_sent: bool = False
    """Whether the request was sent to any server."""
    has_sent_media: bool = False
    """Whether it was sent with the bytes of all its images and videos."""
    num_stuck: int = 0
    """How many servers have died with this request since its last tokens arrived."""
    started: float | None = None
    """When the first tokens arrived."""

    @property
    def num_tokens(self) -> int:
        """How many tokens have arrived."""
        return len(self.output) // TOKEN.itemsize

    def extend(self, tokens: memoryview) -> None:
        if self.started is None:
            self.started = time.perf_counter()
        self.num_stuck = 0
        self.output += tokens
        if self.on_tokens is not None:
            new = np.frombuffer(tokens, TOKEN)
            self.on_tokens(
                Delta(tuple(new["token"].tolist()), tuple(new["logprob"].tolist()), tuple(new["version"].tolist()))
            )

    def rest(self) -> ModelRequest:
        """The request for the tokens that are still missing."""
        if not self.output:
            return self.request
        arrived = np.frombuffer(self.output, TOKEN)["token"].tolist()
        return replace(self.request, given_tokens=(*self.request.given_tokens, *arrived))

    def finish(self, reason: StopReason) -> None:
        self._end(self._response(reason))

    def fail(self, error: HeadwaterError) -> None:
        self._end(error)

    def hand_over(self, message: str) -> None:
        """Fail with what has arrived, so that another server can continue after it."""
        self._end(ServerLost(message, self._response("abort") if self.output else None))

    def _response(self, reason: StopReason) -> ModelResponse:
        now = time.perf_counter()
        started = now if self.started is None else self.started
        output = np.frombuffer(self.output, TOKEN)
        return ModelResponse(
            input_tokens=self.request.input_tokens,
            output_tokens=tuple(output["token"].tolist()),
            output_logprobs=tuple(output["logprob"].tolist()),
            output_versions=tuple(output["version"].tolist()),
            stop_reason=reason,
            queue_s=started - self.arrived,
            generate_s=now - started,
        )

    def _end(self, result: ModelResponse | HeadwaterError) -> None:
        self.has_ended = True
        self.deliver(result)


class OpenRequests:
    """All requests in progress. Belongs to the engine's thread.

    ``link`` is the connection to the server that generates now. Without one, requests wait.
    """

    def __init__(self, spans: Spans, *, on_finish: Callable[[], None], on_failed_engine: Callable[[str], None]) -> None:
        """``on_failed_engine`` is called with the reason when a server reports that its engine has failed."""
        self.link: RequestLink | None = None
        self._open: dict[int, FramedRequest] = {}
        self._spans = spans
        self._generating = ExitStack()
        self._on_finish = on_finish
        self._on_failed_engine = on_failed_engine

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_started(self) -> int:
        """How many have tokens already."""
        return sum(bool(each.output) for each in list(self._open.values()))

    def enter(self, opened: FramedRequest) -> None:
        if not self._open:
            self._generating.enter_context(self._spans.span("generate"))
        self._open[opened.number] = opened
        self._send(opened)

    def leave(self, opened: FramedRequest) -> None:
        """The caller no longer waits for this request."""
        if opened.number in self._open:
            self._drop(opened)
            if self.link is not None:
                self.link.post({"id": opened.number, "leave": True})

    def continue_on(self, link: RequestLink) -> None:
        """Send the rest of every request to a new server."""
        self.link = link
        for opened in list(self._open.values()):
            if opened.was_sent:  # a request that arrived while no server ran has seen no death
                opened.num_stuck += 1
            if opened.num_stuck > _MAX_STUCK:
                # Other requests finish meanwhile, so the engine would be restarted again and again for this one.
                self._drop(opened)
                opened.fail(
                    RolloutFailed(
                        f"request {opened.request.request_id}: {opened.num_stuck} processes of the engine died before "
                        "its next token arrived; this request may be the cause"
                    )
                )
            else:
                self._send(opened)

    def take(self, new: NewTokens) -> None:
        """Take new tokens of some requests, and the ends of some."""
        for number, tokens in new.rows():
            opened = self._open.get(number)
            if opened is not None:  # otherwise its caller has left
                opened.extend(tokens)
        for number, reason in new.ended:
            opened = self._open.get(number)
            if opened is None:
                continue
            if reason == "abort":
                # This side did not abort it: the process was told to stop. The next server continues the request.
                self._send(opened)
            else:
                self._drop(opened)
                opened.finish(reason)
                self._on_finish()

    def refuse(self, number: int, body: Mapping[str, Any]) -> None:
        """A server could not answer a request."""
        opened = self._open.get(number)
        if opened is None:
            return
        code = body["error"]["code"]
        if code == UNKNOWN_MEDIA and not opened.has_sent_media:
            self._send(opened, with_media=True)
        elif code == ENGINE_FAILED:
            # This process will not produce another token, but the next one will, for this request too.
            self._on_failed_engine(body["error"]["message"])
        else:
            self._drop(opened)
            opened.fail(error_of(body))

    def fail_all(self, error: HeadwaterError) -> None:
        for opened in list(self._open.values()):
            self._drop(opened)
            opened.fail(error)

    def hand_over_all(self, message: str) -> None:
        """Fail every request with what has arrived, so that another server can continue it."""
        for opened in list(self._open.values()):
            self._drop(opened)
            opened.hand_over(message)

    def abort(self, request_id: str | None) -> int:
        """Answer the requests with this id, or all, with the tokens they have. Return how many there were."""
        wanted = [each for each in self._open.values() if request_id in (None, each.request.request_id)]
        for opened in wanted:
            self.leave(opened)
            opened.finish("abort")
        return len(wanted)

    def abort_all(self) -> None:
        """Answer every request with the tokens it has."""
        for opened in list(self._open.values()):
            self._drop(opened)
            opened.finish("abort")

    def _send(self, opened: FramedRequest, *, with_media: bool = False) -> None:
        """``with_media`` sends the bytes of images and videos that the server has seen and forgotten."""
        if self.link is not None:
            opened.was_sent = True
            opened.has_sent_media = with_media
            known = None if with_media else self.link.known_media
            self.link.post({"id": opened.number, "request": write_request(opened.rest(), known)})

    def _drop(self, opened: FramedRequest) -> None:
        del self._open[opened.number]
        if not self._open:
            self._generating.close()
