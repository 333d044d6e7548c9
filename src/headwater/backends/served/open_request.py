"""A request that a server works on, and what has come of it so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headwater.core.errors import HeadwaterError
from headwater.core.records import ModelRequest, ModelResponse, StopReason


@dataclass(eq=False)
class OpenRequest:
    """Every token that has arrived stays here, so that another server can go on after the last one."""

    number: int
    """Names it on the connection."""
    request: ModelRequest
    deliver: Callable[[ModelResponse | HeadwaterError], None]
    """Called once, with the end."""
    has_ended: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    was_sent: bool = False
    """Whether any server has been asked for it."""
    num_stuck: int = 0
    """How many servers have died with it since its last tokens came."""
    started: float | None = None
    """When the first tokens came."""

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        if self.started is None:
            self.started = time.perf_counter()
        self.num_stuck = 0
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions

    def rest(self) -> ModelRequest:
        """What is left to ask for."""
        return replace(self.request, given_tokens=(*self.request.given_tokens, *self.tokens))

    def finish(self, reason: StopReason) -> None:
        now = time.perf_counter()
        started = now if self.started is None else self.started
        self._end(
            ModelResponse(
                input_tokens=self.request.input_tokens,
                output_tokens=tuple(self.tokens),
                output_logprobs=tuple(self.logprobs),
                output_versions=tuple(self.versions),
                stop_reason=reason,
                queue_s=started - self.arrived,
                generate_s=now - started,
            )
        )

    def fail(self, error: HeadwaterError) -> None:
        self._end(error)

    def _end(self, result: ModelResponse | HeadwaterError) -> None:
        self.has_ended = True
        self.deliver(result)
