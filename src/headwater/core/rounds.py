"""New tokens of many requests together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headwater.core.request import ModelRequest
from headwater.core.response import StopReason

if TYPE_CHECKING:
    from headwater.core.new_tokens import NewTokens


class RoundSink(Protocol):
    """Takes what an engine generates for many requests. Called on one event loop.

    Every request ends with exactly one ``ended`` or ``failed``, also one that was left.
    """

    def take(self, new: NewTokens) -> None:
        """New tokens of some requests."""
        ...

    def ended(self, number: int, reason: StopReason) -> None: ...
    def failed(self, number: int, error: Exception) -> None: ...


class Follower(Protocol):
    """The requests of one ``RoundSink``, by its numbers."""

    def enter(self, number: int, request: ModelRequest) -> None:
        """Start a request. Raises as ``agenerate`` does for a request that is refused."""
        ...

    def leave(self, number: int) -> None:
        """The sink no longer wants this request. Tokens may still arrive until it has ended."""
        ...


class RoundEngine(Protocol):
    """An engine that can pass on the new tokens of many requests together (``Capabilities.rounds``)."""

    def follow(self, sink: RoundSink) -> Follower:
        """Called on the event loop that the sink belongs to."""
        ...
