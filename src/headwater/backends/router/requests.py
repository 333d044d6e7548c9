"""Requests through a router: each is continued on another server until it has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from headwater.backends.router.member import Member
from headwater.backends.router.roster import Roster
from headwater.backends.router.work import Work
from headwater.core.errors import LogitsBroken, QueueFull, RequestError, RolloutFailed, ServerLost, WaitTimeout
from headwater.core.requests import Delta, ModelRequest, ModelResponse, StopReason
from headwater.core.waits import named_wait

T = TypeVar("T")

_MAX_STUCK = 4
"""A request that loses this many servers in a row before its next token may be the cause."""
_AGAIN_S = 0.2
"""Time to wait after a server that is alive refused a request or ended it early."""


async def answer(roster: Roster, request: ModelRequest) -> ModelResponse:
    """The complete response to a request."""
    work = roster.begin(request)
    try:
        while True:
            member = await roster.place(work)
            if member is None:
                return work.response("abort")
            reason = await _ask(roster, member, work)
            if reason is not None:
                return work.response(reason)
    finally:
        roster.end(work)


async def stream(roster: Roster, request: ModelRequest) -> AsyncGenerator[Delta, None]:
    """The tokens of a request as they are generated. All servers must be able to stream."""
    work = roster.begin(request)
    try:
        while True:
            member = await roster.place(work)
            if member is None:
                yield Delta((), (), (), "abort")
                return
            async with aclosing(_follow(roster, member, work)) as deltas:
                async for delta in deltas:
                    yield delta
                    if delta.stop_reason is not None:
                        return
    finally:
        roster.end(work)


async def _ask(roster: Roster, member: Member, work: Work) -> StopReason | None:
    """Let a server work on it. The reason why the response has ended, or None if another server must continue."""
    try:
        if (reason := _ends_already(member, work)) is not None:
            return reason
        rest = work.rest(resumable=member.can.resumable)
        work.server = member.name
        try:
            response = await _movable(work, member.engine.agenerate(rest))
        except RolloutFailed as error:
            await _take_failure(roster, member, work, error)
            return None
        if response.input_tokens != rest.input_tokens:
            raise RolloutFailed(f"request {rest.request_id}: server {member.name} answered for other input tokens")
        work.take(response)
        return await _judge_end(roster, member, work, response.stop_reason)
    finally:
        work.server = None
        roster.leave(work)


async def _follow(roster: Roster, member: Member, work: Work) -> AsyncGenerator[Delta, None]:
    """As ``_ask``, token by token. The last delta has no stop reason if another server must continue."""
    try:
        if (reason := _ends_already(member, work)) is not None:
            yield Delta((), (), (), reason)
            return
        work.server = member.name
        try:
            async with aclosing(member.engine.astream(work.rest(resumable=member.can.resumable))) as deltas:
                while (delta := await _movable(work, anext(deltas, None))) is not None:
                    work.take(delta)
                    if delta.stop_reason is None:
                        yield delta
                        continue
                    reason = await _judge_end(roster, member, work, delta.stop_reason)
                    yield replace(delta, stop_reason=reason)
                    return
            raise ServerLost("the stream has no end")
        except RolloutFailed as error:
            if isinstance(error, ServerLost):
                error.partial = None  # the stream has delivered it already
            await _take_failure(roster, member, work, error)
    finally:
        work.server = None
        roster.leave(work)


async def _movable(work: Work, call: Awaitable[T]) -> T:
    """Wait for a server. ``ServerLost`` if the roster moves the work, because the server does not return it."""
    caller = work.caller = asyncio.current_task()
    assert caller is not None, "a coroutine of an event loop runs in a task"
    num_before = caller.cancelling()
    try:
        return await call
    except asyncio.CancelledError:
        if work.is_moved and caller.cancelling() <= num_before + 1:
            raise ServerLost("it did not return the request") from None
        raise
    finally:
        work.caller = None
        if work.is_moved:
            work.is_moved = False
            caller.uncancel()  # as ``asyncio.timeout`` does: the caller itself was not cancelled


def _ends_already(member: Member, work: Work) -> StopReason | None:
    if work.is_aborted:
        return "abort"
    if work.has_all_tokens:
        return "length"
    if work.tokens and work.request.sampling.grammar is not None and not member.can.resumable:
        work.start_again()  # it could not tell how much of the grammar the tokens match
    return None


async def _judge_end(roster: Roster, member: Member, work: Work, reason: StopReason) -> StopReason | None:
    """A server that ends a request which no one has aborted is stopping, or was told to return what it has."""
    if reason != "abort" or work.is_aborted:
        return reason
    roster.num_moved += 1
    if not member.is_draining and not member.lost:
        _count_stuck(work, f"server {member.name} ended it")
        await asyncio.sleep(_AGAIN_S)
    return None


async def _take_failure(roster: Roster, member: Member, work: Work, error: RolloutFailed) -> None:
    """Return if another server can continue, otherwise raise."""
    if isinstance(error, QueueFull):
        await _wait_for_room(roster, member, work)
    elif isinstance(error, ServerLost):
        if error.partial is not None:
            work.take(error.partial)
        _note_loss(roster, member, work, str(error))
    elif isinstance(error, RequestError | LogitsBroken):
        raise error
    else:
        asked = member.start(member.engine.status, "status")
        try:
            status = await named_wait(
                asyncio.wrap_future(asked),
                lambda: f"server {member.name} reports its status after a failed request",
                kind="router",
                hard_limit_s=roster.options.health_limit_s,
            )
        except WaitTimeout as late:
            _note_loss(roster, member, work, str(late))
            return
        if status.is_alive and status.is_reachable:
            raise error
        _note_loss(roster, member, work, str(error))


async def _wait_for_room(roster: Roster, member: Member, work: Work) -> None:
    """Other clients fill the queue of this server. A request that is refused for too long fails."""
    now, limit_s = time.monotonic(), roster.options.no_server_limit_s
    work.refused_since = work.refused_since or now
    if now - work.refused_since >= limit_s:
        raise QueueFull(
            f"request {work.request.request_id}: the queues of the servers have been full for {limit_s:g} s, the last "
            f"one that of {member.name}; add servers, or use these servers for one run only"
        )
    await asyncio.sleep(_AGAIN_S)


def _note_loss(roster: Roster, member: Member, work: Work, reason: str) -> None:
    roster.num_moved += 1
    roster.lose(member, reason)
    _count_stuck(work, f"server {member.name} was lost: {reason}")


def _count_stuck(work: Work, how: str) -> None:
    work.num_stuck += 1
    if work.num_stuck > _MAX_STUCK:
        raise RolloutFailed(
            f"request {work.request.request_id}: {work.num_stuck} servers in a row did not generate its next token, "
            f"the last one because {how}; this request may be the cause"
        )
