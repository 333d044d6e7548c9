"""The servers of a router and the requests that they have: who may get requests, who is lost, who comes back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress

from headwater.backends.router.member import Member, RoutedServer, check_alike, common_capabilities
from headwater.backends.router.options import RouterOptions
from headwater.backends.router.policy import Policy
from headwater.backends.router.work import Work
from headwater.core.capabilities import Capabilities
from headwater.core.errors import HeadwaterError, QueueFull, RolloutFailed, ServerExists, ServerKept, WaitTimeout
from headwater.core.protocols import InferenceEngine
from headwater.core.requests import ModelRequest
from headwater.core.waits import ENGINE_CALL_LIMIT_S, named_wait, wait_until

logger = logging.getLogger(__name__)

_EVACUATE_S = 5.0
"""How long an engine may take to return what it has of the requests of a lost server."""
_THREAD_END_S = 5.0
_LOOK_S = 0.01
"""Time between the health checks of two servers: those of hundreds of servers must not keep the controller busy."""
_CONNECT_EVERY_S = 5.0
"""Time between two attempts to connect to a server whose engine has given up."""


class Roster:
    """Its methods may be called from any thread. A thread looks at the servers about every ``health_every_s``."""

    def __init__(self, options: RouterOptions, restore: Callable[[InferenceEngine], None]) -> None:
        """``restore`` brings a server that is new or back into the state of the others."""
        self.options = options
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.policy = Policy(max_sessions=options.max_sessions)
        self.members: dict[str, Member] = {}
        self.by_limit: list[Member] = []
        """The server that takes the shortest requests first."""
        self.can = Capabilities()
        """What every server can do."""
        self.works: dict[int, Work] = {}
        self.is_closed = False
        self.published: int | None = None
        """The newest version that was sent to the servers; None if none was."""
        self.num_moved = 0
        """Requests that another server had to continue."""
        self.num_lost = 0
        """How often a server was lost."""
        self.counted_by_removed: dict[str, float] = {}
        """What servers had counted that are no longer there, so that sums do not fall."""
        self._restore = restore
        self._keys = itertools.count()
        self._none_open_since: float | None = None
        self._is_wait_named = False
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="headwater-router", daemon=True)
        self._watcher.start()

    # Servers

    def all(self) -> list[Member]:
        with self.lock:
            return list(self.members.values())

    def add(self, server: RoutedServer, *, joins: bool) -> None:
        """``joins`` is true if others serve already, and false while the router is made."""
        member = Member(server)
        with self.lock:
            self.check_open()
            if server.name in self.members:
                raise ValueError(f"server {server.name!r} is in the router already; use another name")
            same = [each.name for each in self.all() if joins and each.instance and each.instance == member.instance]
            if same:
                raise ServerExists(f"{server.name}: is in the router already, as {same[0]}")
            check_alike(member, self.all())
            # From now on it is told what all servers are told, but it gets no requests before it knows the rest.
            member.is_new = member.has_joined = joins
            member.is_restoring = True
            self.members[member.name] = member
            self._describe()
            capacity = min(member.limits.max_queue, self.options.max_open_per_server)
            self.policy.add(member.name, capacity, member.version, is_open=False)
        try:
            self._restore(member.engine)
            num_updates = member.num_updates
            member.ask()  # so that there is a status before the first health check
        except BaseException:
            self._forget(member)
            raise
        with self.lock:
            is_behind = member.version != self.published or member.report.needs_weights
            if self.published is not None and is_behind and num_updates == member.num_updates:
                member.stale = member.stale or "it is new"
            member.is_restoring = False
            self.sync(member)

    def drain(self, name: str, *, move: bool, leaves: bool = False) -> None:
        """``leaves`` is true if the server is to be removed, so that it cannot be undrained any more."""
        with self.lock:
            member = self.member(name)
            if leaves and member.is_leaving:
                raise ServerKept(f"{name}: is being removed already")
            self._check_dispensable(member)
            member.is_draining = True
            member.is_leaving = member.is_leaving or leaves
            self.sync(member)
        if move:
            self._evacuate(member)

    def undrain(self, name: str) -> None:
        with self.lock:
            member = self.member(name)
            if member.is_leaving:
                raise ServerKept(f"{name}: is being removed and cannot be used again; add it when it is gone")
            member.is_draining, member.num_refusals = False, 0
            self.sync(member)

    def vacate(self, name: str, *, move: bool, limit_s: float) -> Member:
        """Drain a server that is to be removed, and return it when it has no requests."""
        self.drain(name, move=move, leaves=True)
        with self.changed:
            member = self.member(name)
            try:
                wait_until(
                    self.changed,
                    lambda: not self.policy.num_open(name),
                    lambda: f"server {name} is removed and has {self.policy.num_open(name)} requests left",
                    kind="router",
                    hard_limit_s=limit_s,
                )
            except BaseException:
                member.is_leaving = False  # it stays drained
                raise
        return member

    def remove(self, member: Member) -> None:
        """Forget a server that was vacated."""
        with self.lock:
            before, counted = self.counted_by_removed, member.counted
            self.counted_by_removed = before | {name: before.get(name, 0) + counted[name] for name in counted}
            self._forget(member)

    def _forget(self, member: Member) -> None:
        with self.lock:
            if self.members.get(member.name) is not member:
                return  # two callers have removed it
            del self.members[member.name]
            self._describe()
            self.policy.remove(member.name)
            self._hand_out()
            self.changed.notify_all()

    def _check_dispensable(self, member: Member) -> None:
        others = [each for each in self.members.values() if each is not member]
        if not self.options.keeps_one or any(each.can_continue for each in others):
            return
        if others and not member.can_continue:
            return  # nothing gets worse
        raise ServerKept(
            f"{member.name}: is the last server that can serve ({self._states()}); add another one first, and wait "
            "until it serves"
        )

    def _describe(self) -> None:
        """What the servers have in common is asked for with every request, so it is computed when they change."""
        self.by_limit = sorted(self.members.values(), key=lambda each: each.limits.max_request_tokens)
        if self.members:
            self.can = common_capabilities([each.can for each in self.by_limit])

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise KeyError(f"server {name!r} is not in the router; its servers are {', '.join(self.members)}")
        return self.members[name]

    def lose(self, member: Member, reason: str) -> None:
        """A server does not answer: other servers continue its requests until it does."""
        with self.lock:
            is_news = not member.lost
            member.mark_lost(reason)
            self.sync(member)
        if is_news:
            self._tell_lost(member)

    def sync(self, member: Member) -> None:
        """Pass the state of a server on to the policy."""
        with self.lock:
            if self.members.get(member.name) is member:
                self.policy.set_version(member.name, member.version)
                self.policy.set_open(member.name, member.is_open)
                self._hand_out()
                self.changed.notify_all()

    def check_open(self) -> None:
        if self.is_closed:
            raise RolloutFailed("the engine is closed")

    def close(self) -> None:
        """End every request with the tokens it has, and close all engines."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.changed.notify_all()
            works = list(self.works.values())
        self._stop.set()
        for work in works:
            self.abort(work)
        wait([each.start(each.engine.close, "close") for each in self.all()], timeout=ENGINE_CALL_LIMIT_S)
        self._watcher.join(_THREAD_END_S)

    # Requests

    def begin(self, request: ModelRequest) -> Work:
        with self.lock:
            self.check_open()
            work = Work(next(self._keys), request, asyncio.get_running_loop())
            self.works[work.key] = work
        return work

    def end(self, work: Work) -> None:
        with self.lock:
            self.leave(work)
            del self.works[work.key]

    async def place(self, work: Work) -> Member | None:
        """A server for the work, once one has room. None if the work was aborted meanwhile."""
        with self.lock:
            if work.is_aborted:
                return None
            self.check_open()
            name = self._enter(work)
            waiting = work.place = None if name is not None else work.loop.create_future()
            missing = self.policy.missing_version(work.key)
        if waiting is not None:
            try:
                name = await (waiting if missing is None else self._until_updated(waiting))
            finally:
                work.place = None
        with self.lock:
            return self.members.get(name or "")

    async def _until_updated(self, waiting: asyncio.Future[str]) -> str:
        """Wait for a server with newer weights. One request names the wait for all of them: it is shown once."""
        if self._is_wait_named:
            return await waiting
        self._is_wait_named = True
        try:
            return await named_wait(
                asyncio.shield(waiting), self._describe_short, kind="newer_weights", hard_limit_s=self._short_limit_s
            )
        except WaitTimeout:
            return await waiting  # newer weights are there, but no free place yet: otherwise the watcher has ended it
        finally:
            self._is_wait_named = False

    @property
    def _short_limit_s(self) -> float:
        """After it, the watcher has certainly looked."""
        return self.options.no_server_limit_s + self.options.health_limit_s

    def _describe_short(self) -> str:
        with self.lock:
            versions = [self.policy.missing_version(each.key) for each in self.works.values()]
            wanted = [each for each in versions if each is not None]
            return (
                f"{len(wanted)} requests wait for a server with version {min(wanted, default=0)} or newer, because "
                f"they have tokens of it ({self._states()})"
            )

    def leave(self, work: Work) -> None:
        """The work no longer waits for a server, or its server is done with it."""
        with self.lock:
            if work.is_in_policy:
                work.is_in_policy = False
                self.policy.leave(work.key, work.newest_version)
                self._hand_out()
                self.changed.notify_all()

    def abort(self, work: Work) -> None:
        """Let a request end with the tokens it has."""
        work.is_aborted = True
        # On the loop of its caller, where the request is either waiting or entirely with a server.
        with suppress(RuntimeError):  # no caller waits on a closed event loop
            work.loop.call_soon_threadsafe(self._abort_on_loop, work)

    def _enter(self, work: Work) -> str | None:
        if self.policy.num_waiting >= self.options.max_waiting:
            raise QueueFull(
                f"request {work.request.request_id}: {self.policy.num_waiting} requests wait for a server already; "
                "send it again later, or add servers"
            )
        name = self.policy.enter(
            work.key, work.request.session, first=work.num_tries > 0, seen_version=work.newest_version or 0
        )
        work.num_tries += 1
        work.is_in_policy = True
        if name is None and all(each.is_gone for each in self.members.values()):
            raise self._no_server(work)
        return name

    def _abort_on_loop(self, work: Work) -> None:
        if work.place is not None and not work.place.done():
            work.place.set_result("")
        elif work.server is not None:
            with self.lock:
                member = self.members.get(work.server)
            if member is not None:
                engine, name = member.engine, work.request.request_id
                member.start(lambda: engine.abort(name), "abort")

    def _hand_out(self) -> None:
        """Tell those that have waited which server they get."""
        for key, name in self.policy.take_placed():
            work = self.works[key]
            with suppress(RuntimeError):  # a closed event loop, whose callers are gone
                work.loop.call_soon_threadsafe(_give, work, name)

    def _no_server(self, work: Work) -> RolloutFailed:
        return RolloutFailed(
            f"request {work.request.request_id}: no server can take it ({self._states()}); start or add a server"
        )

    def _states(self) -> str:
        return "; ".join(f"{each.name}: {each.state(0)}, version {each.version}" for each in self.members.values())

    # Health

    def _watch(self) -> None:
        while not self._stop.wait(max(self.options.health_every_s, len(self.members) * _LOOK_S)):
            for member in self.all():
                self._look(member)
            self._fail_hopeless()

    def _look(self, member: Member) -> None:
        with self.lock:
            was_lost = bool(member.lost)
            member.look(self.options.health_limit_s)
            is_back = was_lost and not member.lost
            if is_back and not member.is_restoring:
                member.is_restoring = True
                restored = member.start(lambda: self._restore(member.engine), "restore")
                restored.add_done_callback(lambda done: self._restored(member, done.exception()))
            self.sync(member)
            if member.is_time_to_connect(_CONNECT_EVERY_S):
                member.start(lambda: self._connect(member), "connect")
        if member.lost and not was_lost:
            self._tell_lost(member)

    def _connect(self, member: Member) -> None:
        """Replace the engine of a server that has given up, if the server answers again."""
        assert member.connect is not None, "checked"
        try:
            engine = member.connect()
        except Exception as error:
            if not isinstance(error, HeadwaterError):
                logger.exception("server %s: connecting failed", member.name)
            with self.lock:
                member.is_connecting = False
                member.mark_lost(str(error))
            return
        with self.lock:
            old, member.is_connecting = member.engine, False
            is_wanted = not self.is_closed and self.members.get(member.name) is member
            if is_wanted:
                member.renew(engine, self.published)
        (old if is_wanted else engine).close()

    def _restored(self, member: Member, error: BaseException | None) -> None:
        with self.lock:
            member.is_restoring = False
            if error is not None:
                member.mark_lost(str(error))
            else:
                logger.warning("server %s is back", member.name)
            self.sync(member)

    def _tell_lost(self, member: Member) -> None:
        self.num_lost += 1
        logger.warning("server %s is lost: %s; other servers continue its requests", member.name, member.lost)
        self._evacuate(member)

    def _evacuate(self, member: Member) -> None:
        """Let the engine of a server return what it has, so that other servers continue."""

        def move() -> None:
            with self.lock:
                moved = [(each, each.num_tries) for each in self.works.values() if each.server == member.name]
            if moved:
                wait([member.start(member.engine.abort, "abort")], timeout=_EVACUATE_S)
                time.sleep(_EVACUATE_S)
            for work, num_tries in moved:
                # Tokens that did not come back are generated again by the next server.
                with suppress(RuntimeError):
                    work.loop.call_soon_threadsafe(work.interrupt, member.name, num_tries)

        member.start(move, "evacuate")

    def _fail_hopeless(self) -> None:
        """Fail the requests that wait while no server can take any, after a limit or if none will come back."""
        with self.lock:
            if any(each.is_open for each in self.members.values()):
                self._none_open_since = None
                self._fail_short()
                return
            now = time.monotonic()
            self._none_open_since = self._none_open_since or now
            will_return = not all(each.is_gone for each in self.members.values())
            if will_return and now - self._none_open_since < self.options.no_server_limit_s:
                return
            for work in self.works.values():
                if work.place is not None:
                    with suppress(RuntimeError):
                        work.loop.call_soon_threadsafe(_fail, work, self._no_server(work))

    def _fail_short(self) -> None:
        """Fail the requests for which all open servers have had too old weights for too long."""
        now = time.monotonic()
        for work in self.works.values():
            if work.place is None or (version := self.policy.missing_version(work.key)) is None:
                work.short_since = None
                continue
            work.short_since = work.short_since or now
            if now - work.short_since >= self.options.no_server_limit_s:
                error = RolloutFailed(
                    f"request {work.request.request_id}: it has tokens of version {version}, and all servers that "
                    f"serve have had older weights for {now - work.short_since:.0f} s ({self._states()})"
                )
                with suppress(RuntimeError):
                    work.loop.call_soon_threadsafe(_fail, work, error)


def _give(work: Work, name: str) -> None:
    if work.place is not None and not work.place.done():
        work.place.set_result(name)


def _fail(work: Work, error: RolloutFailed) -> None:
    if work.place is not None and not work.place.done():
        work.place.set_exception(error)
