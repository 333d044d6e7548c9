"""One server as the router sees it: its engine, whether it may get requests, and its health."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

from headwater.core.capabilities import Capabilities, EngineStatus, ServerStatus
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.protocols import EngineLimits, InferenceEngine
from headwater.core.waits import start_in_thread
from headwater.serving.control_routes import COUNTERS

T = TypeVar("T")

_OWN_COUNTS = {"num_running", "num_waiting", "num_restarts"}
"""The status has these beside the metrics."""
_PAUSE = "last_update_pause_s"
_MAX_REFUSALS = 3
"""After this many failed weight updates in a row, a server gets no more until its process is replaced."""


@dataclass(frozen=True)
class RoutedServer:
    """A server to add to a router."""

    name: str
    """Unique within the router, for example its address."""
    engine: InferenceEngine
    url: str = ""
    """Shown in the status. Defaults to ``name`` if that is an address."""
    connect: Callable[[], InferenceEngine] | None = None
    """Connects to it anew. Without it, a server whose engine has given up is lost for good."""


@runtime_checkable
class TellsInstance(Protocol):
    """An engine that tells which process it uses, so that one server with two addresses is noticed."""

    @property
    def instance(self) -> str:
        """Different for every process; empty if that is not known. Makes no call."""
        ...


class Member:
    """The state of one server. Its router changes it while holding a lock; other threads may read it."""

    def __init__(self, server: RoutedServer) -> None:
        self.name = server.name
        self.url = server.url or (server.name if "://" in server.name else "")
        self.connect = server.connect
        self.engine = server.engine
        self.can = server.engine.capabilities
        self.limits = server.engine.limits
        self.version = server.engine.get_version()
        self.is_draining = self.is_leaving = False
        self.is_new = False
        """It has joined others and has not taken weights yet, so it may turn out to be one that cannot."""
        self.has_joined = False
        """It has joined others. What its counters say first was caused by someone else, and is not counted."""
        self.updating = ""
        """Which weights it takes now, while other servers generate; empty if none."""
        self.is_restoring = False
        """It is new or back, and is being told whether the router is paused or asleep."""
        self.lost = ""
        """Why it cannot be reached, or empty."""
        self.has_failed = False
        """Its engine has given up."""
        self.is_connecting = False
        self._tried_at = 0.0
        self.stale = ""
        """Why it does not have the newest weights, or empty. It gets no requests until it has them."""
        self.num_refusals = 0
        self.num_updates = 0
        """Weight updates that have begun. A report from before the last one says nothing about its weights."""
        self.report = EngineStatus(self.version)
        """What it last told about itself."""
        self._counted: dict[str, float] = {}
        """Its counters, which go on growing when its process is replaced."""
        self._last_counts: dict[str, float] = {}
        self._counted_restarts = 0
        self._counting = threading.Lock()
        self._asked_at = self._lost_at = 0.0
        self._asked_updates = 0
        self._pending: Future[EngineStatus] | None = None

    @property
    def instance(self) -> str:
        """Of the process that serves; empty if it does not tell."""
        return self.engine.instance if isinstance(self.engine, TellsInstance) else ""

    @property
    def is_open(self) -> bool:
        """Whether it may get requests."""
        return not (self.is_draining or self.is_restoring or self.updating or self.lost or self.stale)

    @property
    def can_continue(self) -> bool:
        """Whether it serves, or will after an update that is in progress, without anything from outside."""
        return not (self.is_draining or self.is_restoring or self.lost or self.stale)

    @property
    def is_gone(self) -> bool:
        """It will not come back."""
        return self.has_failed and self.connect is None

    @property
    def is_unfit(self) -> bool:
        """It does not take the weights, so sending them again is of no use."""
        return self.num_refusals >= _MAX_REFUSALS

    @property
    def needs_weights(self) -> bool:
        """Whether sending it the newest weights again would let it serve."""
        return bool(self.stale) and not self.lost and not self.is_unfit

    def state(self, num_open: int) -> str:
        """In words."""
        if self.has_failed:
            return f"failed: {self.lost}"
        if self.lost:
            return f"unreachable: {self.lost}"
        if self.is_restoring:
            return "joining" if self.is_new else "coming back"
        if self.is_leaving:
            return f"being removed, {num_open} requests left"
        if self.is_draining:
            return f"draining, {num_open} requests left" if num_open else "drained"
        if self.updating:
            return f"taking {self.updating}"
        if self.stale:
            remedy = f"; left out after {self.num_refusals} attempts, undrain it to try again" if self.is_unfit else ""
            return f"without the newest weights: {self.stale}{remedy}"
        return "serving"

    def status(self, num_open: int) -> ServerStatus:
        num_running = min(num_open, self.report.num_running)
        return ServerStatus(
            name=self.name,
            url=self.url,
            version=self.version,
            num_running=num_running,
            num_waiting=num_open - num_running,
            is_alive=not self.lost,
            num_restarts=self.report.num_restarts,
            state=self.state(num_open),
            needs_weights=self.needs_weights,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """What it has measured. Its counters never fall, also if its process is replaced or leaves them out once."""
        return {**self.report.metrics, **self._counted}

    @property
    def counted(self) -> dict[str, float]:
        """Its counters alone."""
        return dict(self._counted)

    def start(self, action: Callable[[], T], what: str) -> Future[T]:
        """Run a call that may block in a separate thread, so that a server that hangs holds up no other."""
        return start_in_thread(action, f"headwater-router-{what}-{self.name}")

    # Health

    def is_time_to_connect(self, every_s: float) -> bool:
        """Whether to try to connect anew. True at most once in ``every_s``, and not while an attempt lasts."""
        now = time.monotonic()
        if not self.has_failed or self.connect is None or self.is_connecting or now - self._tried_at < every_s:
            return False
        self._tried_at, self.is_connecting = now, True
        return True

    def renew(self, engine: InferenceEngine, published: int | None) -> None:
        """Use another engine for the same server, which comes back with the next report."""
        self.engine, self.has_failed, self.num_refusals, self._pending = engine, False, 0, None
        self._counted_restarts = -1
        self.version = engine.get_version()
        if published is not None and self.version != published:
            self.stale = "it has come back"

    def mark_lost(self, reason: str) -> None:
        """A request has found out that the server is gone. Only a later report can show that it is back."""
        self.lost, self._lost_at = reason or "lost", time.monotonic()

    def look(self, limit_s: float) -> None:
        """Take the last report, if it has arrived, and ask for the next one."""
        now = time.monotonic()
        if self._pending is not None:
            if self._pending.done():
                self._take_report(self._pending)
                self._pending = None
            elif now - self._asked_at > limit_s:
                self.mark_lost(f"has not reported its status for {now - self._asked_at:.0f} s")
        if self._pending is None and not self.has_failed:
            self._asked_at, self._asked_updates = now, self.num_updates
            self._pending = self.start(self.engine.status, "status")

    def ask(self) -> None:
        """Take a report at once, if there is one. A server that does not answer is found by the next look."""
        with suppress(HeadwaterError):
            self.report = self.engine.status()
            self._count(self.report)

    def _take_report(self, pending: Future[EngineStatus]) -> None:
        error = pending.exception()
        if error is not None:
            self.mark_lost(f"{error}" if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}")
            return
        report = pending.result()
        if report.num_restarts != self.report.num_restarts:
            self.num_refusals = 0
        self.report = report
        self._count(report)
        if not report.is_alive:
            self.has_failed = True
            self.mark_lost("its engine has failed or was closed")
        elif not report.is_reachable:
            self.mark_lost("its process does not answer")
        elif self._asked_at > self._lost_at:
            self.lost = ""
        if self._asked_updates == self.num_updates:
            self._take_version(report)

    def _count(self, report: EngineStatus) -> None:
        with self._counting:
            is_same = report.num_restarts == self._counted_restarts
            counted = dict(self._counted)
            for name in COUNTERS & report.metrics.keys():
                now = report.metrics[name]
                last = self._last_counts.get(name, now if self.has_joined else 0)
                # Two threads ask for reports, so that a smaller count of the same process is an older one.
                counted[name] = counted.get(name, 0) + (now - last if now >= last else 0 if is_same else now)
                self._last_counts[name] = max(last, now) if is_same else now
            self._counted, self._counted_restarts = counted, report.num_restarts

    def _take_version(self, report: EngineStatus) -> None:
        if report.needs_weights:
            self.stale = self.stale or "it has restarted"
        elif self.num_updates and report.version < self.version and not self.stale:
            self.stale = f"it is back at version {report.version}"
        self.version = report.version


def check_alike(new: Member, others: Sequence[Member]) -> None:
    """Refuse a server whose model differs from that of the others."""
    for other in others:
        for what, its, theirs in (
            ("vocabulary", new.limits.vocab_size, other.limits.vocab_size),
            ("number type", new.can.dtype, other.can.dtype),
        ):
            if its != theirs:
                raise ConfigError(
                    [f"server {new.name}: its {what} is {its}, and that of {other.name} is {theirs}; serve one model"]
                )


def common_capabilities(every: Sequence[Capabilities]) -> Capabilities:
    """What every server can do."""
    first = every[0]

    def everywhere(name: str) -> bool:
        return all(getattr(each, name) for each in every)

    return replace(
        first,
        per_token_versions=everywhere("per_token_versions"),
        seeded_sampling=everywhere("seeded_sampling"),
        resumable=everywhere("resumable"),
        checksums=everywhere("checksums"),
        adapters=everywhere("adapters"),
        media=everywhere("media"),
        media_problem=next((each.media_problem for each in every if each.media_problem), ""),
        videos=everywhere("videos"),
        tools=everywhere("tools"),
        direct_weights=everywhere("direct_weights"),
        file_weights=everywhere("file_weights"),
        streaming=everywhere("streaming"),
        rounds=False,
        joint_start=False,
        discards_weights=False,
        memory_tags=tuple(tag for tag in first.memory_tags if all(tag in each.memory_tags for each in every)),
        update_modes=tuple(mode for mode in first.update_modes if all(mode in its.update_modes for its in every)),
        features=tuple(name for name in first.features if all(name in each.features for each in every)),
    )


def common_metrics(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what servers measure: the sums of their counts, and the longest pause of the last weight update."""
    names = {name for each in every for name in each if name.startswith(("num_", "kv_pages_", "media_"))}
    sums = {name: sum(each.get(name, 0) for each in every) for name in sorted(names - _OWN_COUNTS)}
    if shares := [each["kv_used"] for each in every if "kv_used" in each]:
        sums["kv_used"] = sum(shares) / len(shares)
    pauses = [each[_PAUSE] for each in every if _PAUSE in each]
    return {**sums, _PAUSE: max(pauses)} if pauses else sums


def common_limits(every: Sequence[EngineLimits], max_queue: int) -> EngineLimits:
    """The smallest of every limit, except for the queue, which is the router's."""
    return EngineLimits(
        vocab_size=min(each.vocab_size for each in every),
        max_model_tokens=min(each.max_model_tokens for each in every),
        max_request_tokens=min(each.max_request_tokens for each in every),
        max_queue=max_queue,
    )
