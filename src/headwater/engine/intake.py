"""How requests enter the engine: they are checked, get a place in the queue, and become sequences of the loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headwater.core.errors import QueueFull, RequestError, RolloutFailed
from headwater.core.new_tokens import NewTokens
from headwater.core.protocols import RoundSink
from headwater.core.requests import Delta, ModelRequest, ModelResponse, SamplingParams, wrong_stop
from headwater.engine.delivery import Mailbox, failure_of, settle
from headwater.engine.grammar import Grammars
from headwater.engine.guides import Guide
from headwater.engine.loop import EngineLoop
from headwater.engine.media_reader import MediaReader, Reading, refuse_media
from headwater.engine.sequence import EngineSequence, Following

_MAX_FORBIDDEN = 1024
"""Maximum number of stop tokens together with ``min_new_tokens``: the device stores this list for every sequence."""

_LEAST_TEMPERATURE = 1e-6
_GREATEST_TEMPERATURE = 1e6
"""All tokens are equally likely far below this value. An infinite temperature would turn excluded tokens into NaN."""

_ENTER_AT_ONCE = 256


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for. A request beyond these limits could never be served."""

    vocab_size: int
    max_model_tokens: int
    page_tokens: int
    num_pages: int

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of prompt and new tokens of one request together."""
        # ``check`` counts pages the same way: one is for copy-on-write, and the last token is never fed back.
        return min(self.max_model_tokens, (self.num_pages - 1) * self.page_tokens + 1)

    def check(self, request: ModelRequest) -> None:
        """Raise ``RequestError`` for a request that this engine can never serve."""
        tokens = request.input_tokens + request.given_tokens
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"request {request.request_id}: token id {wrong} is outside the vocabulary of {self.vocab_size}; "
                "use the tokenizer the model was trained with"
            )
        self._check_sampling(request)
        self.check_key(request)
        # Given tokens count as new tokens.
        num_prompt, num_new = len(request.input_tokens), request.sampling.max_new_tokens
        if num_prompt + num_new > self.max_model_tokens:
            raise RequestError(
                f"request {request.request_id}: {num_prompt} prompt tokens + {num_new} new tokens exceed the model's "
                f"{self.max_model_tokens} positions; shorten the prompt or lower max_new_tokens"
            )
        # One additional page, because every sample of a prompt copies its last page.
        num_pages = -(-(num_prompt + num_new - 1) // self.page_tokens) + 1
        if num_pages > self.num_pages:
            raise RequestError(
                f"request {request.request_id}: {num_prompt} prompt tokens + {num_new} new tokens need {num_pages} "
                f"pages of the KV cache, which has {self.num_pages}; raise engine.kv_cache_gib"
            )

    def check_key(self, request: ModelRequest) -> None:
        """The part of ``check`` in which the samples of a prompt differ."""
        if not -(2**63) <= request.rng_key < 2**63:
            name = f"request {request.request_id}"
            raise RequestError(f"{name}: rng_key = {request.rng_key}: must be a signed 64-bit number")

    def _check_sampling(self, request: ModelRequest) -> None:
        """Reject values that a record accepts but the device's tensors cannot hold. They would stop the loop."""
        sampling, name = request.sampling, f"request {request.request_id}"
        unknown = [token for token in sampling.stop_token_ids if not 0 <= token < self.vocab_size]
        if unknown:
            raise RequestError(f"{name}: stop token id {unknown[0]} is outside the vocabulary of {self.vocab_size}")
        if sampling.min_new_tokens and len(sampling.stop_token_ids) > _MAX_FORBIDDEN:
            raise RequestError(
                f"{name}: {len(sampling.stop_token_ids)} stop token ids: at most {_MAX_FORBIDDEN} are supported with "
                f"min_new_tokens = {sampling.min_new_tokens}; use fewer, or set min_new_tokens = 0"
            )
        if (wrong := wrong_stop(sampling.stop_strings)) is not None:
            raise RequestError(f"{name}: stop_strings{wrong}")
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name}: logit_bias: token id {token} is outside the vocabulary")
        if sampling.num_top_logprobs > self.vocab_size:
            raise RequestError(f"{name}: num_top_logprobs exceeds the vocabulary of {self.vocab_size}")
        if sampling.top_k >= 2**63:
            raise RequestError(f"{name}: top_k = {sampling.top_k}: must be < 2**63; use 0 to keep all tokens")
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise RequestError(
                f"{name}: temperature = {sampling.temperature:g}: must be 0 for greedy, or >= {_LEAST_TEMPERATURE:g}"
            )
        if sampling.temperature > _GREATEST_TEMPERATURE:
            raise RequestError(
                f"{name}: temperature = {sampling.temperature:g}: must be <= {_GREATEST_TEMPERATURE:g}; "
                "at that value all tokens are already equally likely"
            )


class Intake:
    """Accepts requests for the loop, up to ``max_queue`` at a time. Its methods may be called from any thread."""

    def __init__(
        self,
        loop: EngineLoop,
        limits: RequestLimits,
        grammars: Grammars,
        *,
        max_queue: int,
        end_token_ids: Sequence[int],
        media: MediaReader | None,
        model_name: str,
    ) -> None:
        """``media`` is ``None`` for a model that takes only text."""
        self._loop = loop
        self._limits = limits
        self._grammars = grammars
        self._max_queue = max_queue
        self._end_token_ids = tuple(dict.fromkeys(end_token_ids))
        self._media = media
        self._model_name = model_name
        self._last_checked: tuple[tuple[int, ...], SamplingParams | None] = (), None
        """Tokens and settings of a request. The samples of a prompt share them, and they are checked once."""
        self._numbers = itertools.count()
        self._num_accepted = 0
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        """Number of requests that wait or run."""
        return self._num_accepted - self._loop.num_ended

    def check(self, request: ModelRequest) -> None:
        tokens, sampling = self._last_checked
        is_like_last = request.input_tokens is tokens and request.sampling is sampling
        if request.media:
            self._check_media(request)
        if is_like_last and not request.given_tokens:
            self._limits.check_key(request)
            return
        self._limits.check(request)
        if request.sampling.grammar is not None:
            self._grammars.start(request.sampling.grammar)
        self._last_checked = request.input_tokens, request.sampling

    def _check_media(self, request: ModelRequest) -> None:
        if self._media is None:
            refuse_media(request, self._model_name)
        self._media.check(request)

    def enter(
        self,
        requests: Sequence[ModelRequest],
        on_end: Callable[[int, EngineSequence], None],
        on_delta: Callable[[Delta], None] | None = None,
        following: Following | None = None,
    ) -> list[EngineSequence]:
        """Accept all of ``requests`` or none. ``on_end`` receives the index of the request that has ended."""
        for request in requests:
            self.check(request)  # check every request before the first one starts
        self._reserve(len(requests))
        entered: list[EngineSequence] = []
        try:
            # In slices, so that the first requests run while the others are prepared.
            for start in range(0, len(requests), _ENTER_AT_ONCE):
                part = [
                    self._open(request, partial(on_end, start + place), on_delta, following)
                    for place, request in enumerate(requests[start : start + _ENTER_AT_ONCE])
                ]
                self._loop.add(part)
                entered += part
        except BaseException:  # including Ctrl-C: no caller will wait for the requests that have entered
            self._free(len(requests) - len(entered))
            self.leave(entered)
            raise
        return entered

    def begin(
        self, requests: Sequence[ModelRequest], answers: Sequence[asyncio.Future[ModelResponse]], mailbox: Mailbox
    ) -> list[Callable[[], None]]:
        """Accept each of ``requests`` or fail its future. Those that are accepted enter at once, in this order.

        Returns a function for each request that abandons it.
        """
        opened: list[EngineSequence] = []
        waiting: list[asyncio.Future[ModelResponse]] = []
        leaving: list[Callable[[], None]] = []
        for request, answer in zip(requests, answers, strict=True):
            if answer.done():  # its episode was cancelled
                leaving.append(_leave_nothing)
                continue
            try:
                sequence = self._accept(request, partial(mailbox.post, settle, answer))
            except Exception as refusal:  # noqa: BLE001  it belongs to the caller that waits for this answer
                answer.set_exception(refusal)
                leaving.append(_leave_nothing)
            else:
                opened.append(sequence)
                waiting.append(answer)
                leaving.append(partial(self.leave, (sequence,)))
        try:
            self._loop.add(opened)
        except RolloutFailed as failure:  # the engine has stopped
            self._free(len(opened))
            for answer in waiting:
                answer.set_exception(failure)
        return leaving

    def _accept(self, request: ModelRequest, on_end: Callable[[EngineSequence], None]) -> EngineSequence:
        self.check(request)
        self._reserve(1)
        try:
            return self._open(request, on_end, None, None)
        except BaseException:
            self._free(1)
            raise

    def leave(self, sequences: Sequence[EngineSequence]) -> None:
        """The caller no longer waits: abandon the sequences that have not ended. Returns without waiting for that."""
        left = [each for each in sequences if each.stop_reason is None and each.error is None]
        if left:
            self._loop.abandon(left)

    def _open(
        self,
        request: ModelRequest,
        on_end: Callable[[EngineSequence], None],
        on_delta: Callable[[Delta], None] | None,
        following: Following | None,
    ) -> EngineSequence:
        """Create the sequence that the loop runs for ``request``."""
        return EngineSequence(
            request,
            stop_ids=self._stop_ids(request.sampling),
            order=next(self._numbers),
            on_end=on_end,
            on_delta=on_delta,
            following=following,
            guide=self._guide(request) if request.sampling.uses_guide else None,
            reading=self._read(request),
        )

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        if not sampling.stop_token_ids and not sampling.ignore_end:
            return self._end_token_ids
        own_ends = () if sampling.ignore_end else self._end_token_ids
        return tuple(dict.fromkeys((*own_ends, *sampling.stop_token_ids)))

    def _read(self, request: ModelRequest) -> Reading | None:
        if self._media is None or not request.media:
            return None
        return self._media.begin(request, self._loop.media_read)

    def _guide(self, request: ModelRequest) -> Guide:
        grammar = request.sampling.grammar
        return Guide(request, None if grammar is None else self._grammars.start(grammar))

    def _reserve(self, num_requests: int) -> None:
        """Reserve places in the queue; raises ``QueueFull`` when there are not enough."""
        with self._lock:
            if self.num_open + num_requests > self._max_queue:
                raise QueueFull(
                    f"cannot queue {num_requests} more requests: {self.num_open} are already waiting or running and "
                    f"engine.max_queue = {self._max_queue}; send fewer at a time, retry later, or raise the limit"
                )
            self._num_accepted += num_requests

    def _free(self, num_requests: int) -> None:
        """Give up places of requests that did not enter the loop."""
        with self._lock:
            self._num_accepted -= num_requests


def _leave_nothing() -> None:
    """A request that was refused has nothing to abandon."""


_feeds = itertools.count(1)


class EngineFollower:
    """The requests of one sink, by its numbers. Used on the sink's event loop."""

    def __init__(self, intake: Intake, mailbox: Mailbox, sink: RoundSink) -> None:
        self._intake = intake
        self._mailbox = mailbox
        self._sink = sink
        self._feed = next(_feeds)
        self._open: dict[int, EngineSequence] = {}

    def enter(self, number: int, request: ModelRequest) -> None:
        def on_end(_: int, ended: EngineSequence) -> None:  # on the engine's thread, after the last tokens
            self._mailbox.post(self._end, number, ended)

        following = Following(self._feed, number, self._put)
        [self._open[number]] = self._intake.enter([request], on_end, following=following)

    def leave(self, number: int) -> None:
        sequence = self._open.get(number)
        if sequence is not None:
            self._intake.leave([sequence])

    def _put(self, new: NewTokens) -> None:
        self._mailbox.post(self._sink.take, new)

    def _end(self, number: int, ended: EngineSequence) -> None:
        del self._open[number]
        if ended.error is not None:
            self._sink.failed(number, failure_of(ended))
        else:
            assert ended.stop_reason is not None, "it has ended"
            self._sink.ended(number, ended.stop_reason)
