"""An ``InferenceEngine`` over many.

    router = RouterEngine([RoutedServer("a", engine_a), RoutedServer("b", engine_b)])
    response = await router.agenerate(request)      # also if a server dies midway
    router.add(RoutedServer("c", engine_c))
    router.drain("a")

``policy.py`` chooses the server of a request. What a server has generated before it is lost, drained or told to stop is
kept, and another server continues after it. Callers may be on any thread or event loop. Control calls go to all servers
at the same time, each in a separate thread.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from headwater.backends.router.member import (
    Member,
    RoutedServer,
    common_limits,
    common_metrics,
)
from headwater.backends.router.options import RouterOptions
from headwater.backends.router.requests import answer, stream
from headwater.backends.router.roster import Roster
from headwater.backends.router.updates import Results, send_in_turn, send_to_all
from headwater.core.capabilities import ALL_TAGS, Capabilities, EngineStatus, MemoryTag, UpdateMode, check_features
from headwater.core.errors import (
    BaseMissing,
    HeadwaterError,
    LeftOut,
    MemoryRefused,
    RolloutFailed,
    ServerLost,
    TransferLost,
    WeightsError,
    WeightsIncomplete,
)
from headwater.core.protocols import EngineLimits, InferenceEngine, WeightUpdate, whole_response
from headwater.core.requests import Delta, ModelRequest, ModelResponse
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future, wait_until

__all__ = ["RoutedServer", "RouterEngine", "RouterOptions"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_REPORT_LIMIT_S = 10.0
"""An engine limits the time for its status itself."""


class RouterEngine:
    """Its version is the newest that was published through it, or else the oldest that a server has."""

    def __init__(self, servers: Sequence[RoutedServer], options: RouterOptions | None = None) -> None:
        if not servers:
            raise ValueError("a router needs at least one server")
        self._options = options or RouterOptions()
        self._is_paused = False
        self._asleep: set[MemoryTag] = set()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="headwater-router-weights")
        """Sends one update at a time, in the order in which they were requested."""
        self._roster = Roster(self._options, self._restore)
        for server in servers:
            self._roster.add(server, joins=False)

    # Servers

    def add(self, server: RoutedServer) -> None:
        """A server that gets requests from now on, or as soon as it has the newest weights."""
        self._roster.add(server, joins=True)

    def drain(self, name: str, *, move: bool = False) -> None:
        """Send no more requests to a server. With ``move``, other servers continue those that it has."""
        self._roster.drain(name, move=move)

    def undrain(self, name: str) -> None:
        """Send requests to a server that was drained."""
        self._roster.undrain(name)

    def remove(self, name: str, *, move: bool = True, limit_s: float = ENGINE_CALL_LIMIT_S) -> None:
        """Drain a server, then close its engine. Without ``move``, wait until its requests have ended."""
        member = self._roster.vacate(name, move=move, limit_s=limit_s)

        def forget() -> Future[None]:
            self._roster.remove(member)
            return member.start(member.engine.close, "close")  # also if the caller has stopped waiting

        # Between two weight updates: servers that take one together would lose time with one that leaves.
        try:
            removed = self._sender.submit(forget)
        except RuntimeError as error:
            raise RolloutFailed("the engine is closed") from error
        what = f"server {name} is removed when the present weight update has ended"
        closed = wait_for_future(removed, lambda: what, kind="router", hard_limit_s=limit_s)
        wait_for_future(closed, lambda: f"the engine of server {name} closes", kind="router", hard_limit_s=limit_s)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all servers."""
        return tuple(each.name for each in self._roster.all())

    # What it can do

    @property
    def capabilities(self) -> Capabilities:
        return self._roster.can

    @property
    def limits(self) -> EngineLimits:
        return common_limits([each.limits for each in self._roster.all()], self._options.max_waiting)

    def status(self) -> EngineStatus:
        """From the last health check, about a second old. Makes no call to a server."""
        roster = self._roster
        with roster.lock:
            members = list(roster.members.values())
            servers = tuple(each.status(roster.policy.num_open(each.name)) for each in members)
            counts = roster.policy.counts
            return EngineStatus(
                version=self.get_version(),
                num_running=sum(each.num_running for each in servers),
                num_waiting=sum(each.num_waiting for each in servers) + roster.policy.num_waiting,
                num_restarts=sum(each.num_restarts for each in servers),
                needs_weights=any(each.needs_weights for each in members),
                is_paused=self._is_paused,
                is_asleep=bool(self._asleep),
                is_alive=not roster.is_closed and not all(each.is_gone for each in members),
                is_reachable=any(not each.lost for each in members),
                servers=servers,
                metrics={
                    **common_metrics([*(each.metrics for each in members), roster.counted_by_removed]),
                    "router_num_servers": len(servers),
                    "router_num_open_servers": sum(each.is_open for each in members),
                    "router_num_waiting": roster.policy.num_waiting,
                    "router_num_sessions": roster.policy.num_sessions,
                    "router_num_placed": counts.num_placed,
                    "router_num_sticky": counts.num_sticky,
                    "router_num_sessions_moved": counts.num_moved,
                    "router_num_requests_moved": roster.num_moved,
                    "router_num_servers_lost": roster.num_lost,
                },
            )

    def check(self, request: ModelRequest) -> None:
        if request.sampling.features or request.media:
            check_features(request, self.capabilities)
        member = next((each for each in self._roster.by_limit if not each.lost), None)
        if member is not None:
            member.engine.check(request)

    # Requests

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await answer(self._roster, request)

    def astream(self, request: ModelRequest) -> AsyncGenerator[Delta, None]:
        return stream(self._roster, request) if self.capabilities.streaming else whole_response(self, request)

    def abort(self, request_id: str | None = None) -> int:
        """End the requests with this id, or all. They return the tokens they have."""
        with self._roster.lock:
            works = [each for each in self._roster.works.values() if request_id in (None, each.request.request_id)]
        for work in works:
            self._roster.abort(work)
        return len(works)

    # Control: while no server can be reached, a call is only remembered, and one that comes back is told.

    def pause(self) -> None:
        self._is_paused = True  # first, because a server that comes back meanwhile must know
        self._on_all(lambda engine: engine.pause(), "pauses")

    def resume(self) -> None:
        self._is_paused = False
        self._on_all(lambda engine: engine.resume(), "resumes")

    def sleep(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        self._asleep |= set(tags)
        self._on_all(lambda engine: engine.sleep(tags), "goes to sleep")

    def wake(self, tags: Sequence[MemoryTag] = ALL_TAGS) -> None:
        before = set(self._asleep)
        self._asleep -= set(tags)
        try:
            self._on_all(lambda engine: engine.wake(tags), "wakes up")
        except HeadwaterError:  # one has too little memory and stays asleep
            self._asleep |= before
            raise

    def close(self) -> None:
        """End every request with the tokens it has, and close all engines. Closing twice is allowed."""
        self._roster.close()
        self._sender.shutdown(wait=True, cancel_futures=True)

    # Weights

    def get_version(self) -> int:
        if self._roster.published is not None:
            return self._roster.published
        members = self._roster.all()
        return min((each.version for each in members if not each.lost), default=0)

    def set_version(self, version: int) -> None:
        self._on_all(lambda engine: engine.set_version(version), f"sets its version to {version}")
        with self._roster.lock:
            self._begin_version(version)
            self._roster.published = version
            for member in self._roster.all():
                if not member.lost:
                    member.version, member.num_updates = version, member.num_updates + 1
                    self._roster.sync(member)

    def weights_checksum(self) -> str:
        """The checksum of the newest weights, which all servers that have them must agree on."""
        self._roster.check_open()
        try:
            found = self._on_all(lambda engine: engine.weights_checksum(), "computes a checksum", newest_only=True)
        except RolloutFailed:  # all that had them have failed
            found = {}
        if not found:
            raise TransferLost("no server has the newest weights any more; they are sent again")
        first = next(iter(found.values()))
        for name, value in found.items():
            if value != first:
                told = ", ".join(f"{each}: {text}" for each, text in found.items())
                raise WeightsError(f"server {name} serves other weights than the others ({told}); restart it")
        return first

    def update_weights(self, update: WeightUpdate, mode: UpdateMode | None = None) -> Future[None]:
        """Send the weights to all servers, over one stream that they read in lockstep, or through one file.

        With ``update_order="rolling"``, they take them one after another. A server that takes weights gets no new
        requests, and the others generate meanwhile: sessions that have seen the new version only go to servers that
        have it.

        A server that is lost or too slow gets no requests until the weights are sent again (``needs_weights``).
        """
        try:
            self._roster.check_open()
            return self._sender.submit(self._send, update, mode)
        except (HeadwaterError, RuntimeError) as error:  # a RuntimeError if it was closed just now
            refused: Future[None] = Future()
            refused.set_exception(error if isinstance(error, HeadwaterError) else RolloutFailed(str(error)))
            return refused

    def _send(self, update: WeightUpdate, mode: UpdateMode | None) -> None:
        roster = self._roster
        refused: dict[str, BaseException] = {}
        receivers: dict[str, Member] = {}

        def on_begin(member: Member) -> None:
            with roster.lock:
                member.num_updates += 1
                member.updating = f"the weights of version {update.version}"
                roster.sync(member)

        def on_end(member: Member, error: BaseException | None) -> None:
            with roster.lock:
                member.num_updates += 1
                member.updating = ""
                if error is None:
                    member.version, member.stale, member.num_refusals = update.version, "", 0
                    member.is_new = False
                elif isinstance(error, WeightsError) and not _changed_weights(error):
                    refused[member.name] = error  # its old weights are still in place
                else:
                    member.stale = str(error) or type(error).__name__
                    # A loss has other causes than the server, but one that was never seen to work gets few attempts.
                    member.num_refusals += member.is_new or not isinstance(error, TransferLost)
                roster.sync(member)

        try:
            receivers = self._receivers(update)
            if self._options.update_order == "rolling":
                results = send_in_turn(update, mode, receivers, on_begin, on_end, self._options)
            else:
                results = send_to_all(update, mode, receivers, on_end, self._options)
            self._check_taken(update, results)
        finally:
            update.close()
            with roster.lock:
                for member in receivers.values():  # if the export failed, a server was not told
                    member.updating = ""
                    roster.sync(member)
        # So that the status tells about this update.
        wait([each.start(each.ask, "status") for each in receivers.values()], timeout=_REPORT_LIMIT_S)
        with roster.lock:
            self._roster.published = update.version
            for name, member in roster.members.items():
                if name in refused:
                    member.stale, member.num_refusals = str(refused[name]), member.num_refusals + 1
                elif name not in receivers and not (update.is_repeat and not member.stale):
                    member.stale = member.stale or f"it missed version {update.version}"
                roster.sync(member)

    def _check_taken(self, update: WeightUpdate, results: Results) -> None:
        """One server with the new weights is enough: the others get them again when they are back."""
        failures = {name: error for name, error in results.items() if error is not None}
        for name, error in failures.items():
            logger.warning("server %s did not take the weights: %s", name, error)
        if not failures or len(failures) < len(results):
            return
        # A loss can be repaired by sending the weights again, a refusal cannot.
        worst = min(failures.values(), key=lambda error: not isinstance(error, TransferLost))
        roster = self._roster
        with roster.lock:
            others = [each for name, each in roster.members.items() if name not in results]
            may_return = any(not (each.is_new or each.is_gone or each.is_unfit) for each in others)
            is_left_out = update.is_repeat and (may_return or any(each.can_continue for each in others))
            are_new = all((member := roster.members.get(name)) is None or member.is_new for name in failures)
            if not is_left_out and not (may_return and are_new):
                raise worst
            for name, error in failures.items():
                if (member := roster.members.get(name)) is not None:
                    member.stale = str(error) or type(error).__name__
                    # Other errors were counted when it ended.
                    member.num_refusals += isinstance(error, WeightsError) and not _changed_weights(error)
                    roster.sync(member)
        told = f"{', '.join(failures)}: did not take the weights of version {update.version}: {worst}"
        # A version that no server has yet is sent again, also to the others if they are back.
        raise (LeftOut if is_left_out else TransferLost)(told) from worst

    def _receivers(self, update: WeightUpdate) -> dict[str, Member]:
        """The servers that take an update, once there is one: all that can be reached, the least loaded first.

        An update that is repeated is only for those that do not have it. Adapters alone are not for servers that have
        joined since the last update of all weights: another run may have left other weights in their processes.
        """
        roster = self._roster

        def reachable() -> dict[str, Member]:
            roster.check_open()
            members = roster.members.items()
            return {name: each for name, each in members if not each.lost and not each.is_unfit}

        with roster.changed:
            found = wait_until(
                roster.changed,
                reachable,
                lambda: f"no server can be reached that could take the weights of version {update.version}",
                kind="weights",
                hard_limit_s=self._options.no_server_limit_s,
            )
            if update.is_repeat:
                found = {name: each for name, each in found.items() if each.stale} or found
            if update.adapters_alone:
                found = {name: each for name, each in found.items() if not each.is_new}
                if not found:
                    raise BaseMissing("all servers that can be reached are new, and adapters alone are not enough")
            self._begin_version(update.version)
            for member in found.values():
                member.num_updates += 1
            return dict(sorted(found.items(), key=lambda each: roster.policy.num_open(each[0])))

    def _begin_version(self, version: int) -> None:
        if self._roster.published is not None and version < self._roster.published:
            self._roster.policy.forget_versions()  # another run has begun, or this one continues from a checkpoint

    # All servers

    def _restore(self, engine: InferenceEngine) -> None:
        """Send a server that is new or back what the others have received, also what they receive meanwhile."""
        told: tuple[bool, frozenset[MemoryTag]] | None = None
        while told != (wanted := (self._is_paused, frozenset(self._asleep))):
            told = wanted
            is_paused, asleep = wanted
            now = engine.status()
            if now.is_asleep and (awake := tuple(tag for tag in engine.capabilities.memory_tags if tag not in asleep)):
                engine.wake(awake)
            if is_paused:
                engine.pause()
            elif now.is_paused:
                engine.resume()
            if asleep:
                engine.sleep(tuple(tag for tag in ALL_TAGS if tag in asleep))

    def _on_all(self, action: Callable[[InferenceEngine], T], what: str, *, newest_only: bool = False) -> dict[str, T]:
        """Call every server at the same time. Those that are lost, before or meanwhile, are left out, even if that is
        all of them: they may come back. Any other error is raised."""
        self._roster.check_open()
        members = [each for each in self._roster.all() if not each.lost and not (newest_only and each.stale)]
        calls = [(each, each.start(partial(action, each.engine), "control")) for each in members]
        results: dict[str, T] = {}
        errors: list[HeadwaterError] = []
        failures: list[HeadwaterError] = []
        for member, call in calls:
            try:
                results[member.name] = self._await(member, call, what)
            except TransferLost as error:
                with self._roster.lock:
                    member.stale = str(error)
                    self._roster.sync(member)
            except MemoryRefused as error:
                errors.append(error)
            except ServerLost as error:
                self._roster.lose(member, str(error))
            except RolloutFailed as error:
                failures.append(error)
                self._roster.lose(member, str(error))
            except HeadwaterError as error:
                errors.append(error)
        if not results:
            errors += failures
        if errors:
            raise errors[0]
        return results

    def _await(self, member: Member, call: Future[T], what: str) -> T:
        def stop_if_lost() -> None:
            if member.lost and not call.done():
                raise ServerLost(member.lost)

        return wait_for_future(
            call,
            lambda: f"server {member.name} {what}",
            kind="engine_call",
            hard_limit_s=ENGINE_CALL_LIMIT_S,
            while_waiting=stop_if_lost,
        )


def _changed_weights(error: WeightsError) -> bool:
    """Whether the server may hold a part of the new weights."""
    return isinstance(error, TransferLost | WeightsIncomplete)
