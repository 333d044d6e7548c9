"""Requests whose new tokens are passed on together, once per round, instead of as one stream per request."""

from __future__ import annotations

import itertools

from headwater.core.new_tokens import NewTokens
from headwater.core.protocols import RoundSink
from headwater.core.records import ModelRequest
from headwater.engine.delivery import Mailbox, failure_of
from headwater.engine.intake import Intake
from headwater.engine.sequence import EngineSequence, Following

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
            self._mailbox.post(lambda: self._end(number, ended))

        following = Following(self._feed, number, self._put)
        [self._open[number]] = self._intake.enter([request], on_end, following=following)

    def leave(self, number: int) -> None:
        sequence = self._open.get(number)
        if sequence is not None:
            self._intake.leave([sequence])

    def _put(self, new: NewTokens) -> None:
        self._mailbox.post(lambda: self._sink.take(new))

    def _end(self, number: int, ended: EngineSequence) -> None:
        del self._open[number]
        if ended.error is not None:
            self._sink.failed(number, failure_of(ended))
        else:
            assert ended.stop_reason is not None, "it has ended"
            self._sink.ended(number, ended.stop_reason)
