"""Requests that enter the engine together: the first ones of groups that start together, and those of one turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from headwater.core.errors import RolloutFailed, WaitTimeout
from headwater.core.protocols import EpisodeActivity, InferenceEngine, JointEngine
from headwater.core.requests import ModelRequest, ModelResponse
from headwater.core.waits import named_wait

logger = logging.getLogger(__name__)

FIRST_REQUEST_LIMIT_S = 120.0
"""How long groups that start together wait for the first request of every episode."""
_MOST_PER_TURN = 2048
"""The engine does not wait for more requests than this while episodes that begin in the same turn are built."""
GENERATING = "generating"
"""What an episode does whose request the engine has."""


class Starting(Protocol):
    """A group that starts together with others."""

    num_episodes: int
    start: JointStart | None


class JointStart:
    """Groups that start together. Their first requests enter the engine together and in a fixed order.

    The engine's batch composition decides the last bits of log-probs. Therefore every episode announces its first
    request, or its end, and no request enters before the last announcement. How long an episode takes to begin does not
    matter. All methods are called on the event loop.

    A ``JointEngine`` receives all requests in one call (``answer``). With any other engine, episodes send their
    requests themselves (``enter``, ``entered``), and the engine stays paused until every request that was let in has
    announced that the engine has it, however many turns of the event loop that takes.

        start = JointStart(engine)
        start.expect(group)         # for each group, before its episodes run
        await start.open()
    """

    def __init__(self, engine: InferenceEngine, limit_s: float = FIRST_REQUEST_LIMIT_S) -> None:
        """After ``limit_s`` the requests that have arrived enter without the others, and the log says so."""
        self._engine = engine
        self._joint = _joint_engine(engine)
        self._limit_s = limit_s
        self.takes_requests = self._joint is not None
        """Whether ``answer`` may be called: the engine is a ``JointEngine``, and the start is not over."""
        self.is_open = False
        self._handed_over: list[_FirstRequest] = []
        self._places: dict[Starting, int] = {}
        self._missing: set[tuple[int, int]] = set()
        self._arrived: list[tuple[tuple[int, int], asyncio.Future[None]]] = []
        self._all_announced = asyncio.Event()
        self._entering: set[tuple[int, int]] = set()
        """Episodes that were let in, and whose request the engine does not have yet."""
        self._all_entered = asyncio.Event()

    def expect(self, group: Starting) -> None:
        group.start = self
        place = self._places[group] = len(self._places)
        self._missing |= {(place, number) for number in range(group.num_episodes)}

    async def answer(
        self, group: Starting, sample: int, request: ModelRequest, activity: EpisodeActivity
    ) -> ModelResponse:
        """The engine's answer to the first request of this episode, which enters with the others."""
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        waiting = _FirstRequest(request, answer, key=self._key(group, sample), activity=activity)
        self._handed_over.append(waiting)
        self.announce(group, sample)
        try:
            return await answer
        except BaseException:
            waiting.abandon()
            raise

    async def enter(self, group: Starting, sample: int) -> None:
        """Wait until the request of this episode may enter the engine. ``entered`` must be called afterwards."""
        if self.is_open:
            return
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived.append((self._key(group, sample), gate))
        self.announce(group, sample)
        try:
            await gate
        except asyncio.CancelledError:
            self.entered(group, sample)
            raise

    def entered(self, group: Starting, sample: int) -> None:
        """The engine has the request of this episode, or has refused it."""
        self._entering.discard(self._key(group, sample))
        if not self._entering:
            self._all_entered.set()

    def announce(self, group: Starting, sample: int | None = None) -> None:
        """This episode, or all of the group's, has sent its first request or has ended."""
        if not self._missing:
            return
        if sample is None:
            self._missing -= {(self._places[group], number) for number in range(group.num_episodes)}
        else:
            self._missing.discard(self._key(group, sample))
        if not self._missing:
            self._all_announced.set()

    async def open(self) -> None:
        """Wait for all announcements, then let the requests enter."""
        if self._missing:
            await self._announced()
        if self.takes_requests and not self._arrived:
            try:
                self._hand_over()
            finally:
                self.is_open = True  # also after an error: later requests do not wait
        else:
            await self._let_in()

    def _hand_over(self) -> None:
        """Pass the requests on to the engine that takes them in one call."""
        self.takes_requests = False
        waiting = [each for each in self._handed_over if not each.answer.done()]  # a cancelled episode no longer waits
        self._handed_over = []
        if not waiting:
            return
        assert self._joint is not None, "otherwise no request is handed over"
        waiting.sort(key=lambda each: each.key)
        _begin(self._joint, waiting)
        for each in waiting:
            each.activity.becomes(GENERATING, "generating")

    async def _let_in(self) -> None:
        """Let the episodes send their requests while the engine is paused."""
        self._engine.pause()
        try:
            self._hand_over()
            self.is_open = True
            waiting = [(key, gate) for key, gate in sorted(self._arrived, key=lambda each: each[0]) if not gate.done()]
            self._entering = {key for key, _ in waiting}  # a cancelled episode no longer waits
            self._all_entered.clear()  # one that was cancelled earlier has set it
            for _, gate in waiting:
                gate.set_result(None)
            if self._entering:
                await named_wait(
                    self._all_entered.wait(),
                    lambda: f"waiting until the engine has the first requests of {len(self._entering)} episodes",
                    kind="first_requests",
                    hard_limit_s=self._limit_s,
                )
        finally:
            self.is_open = True
            self._engine.resume()

    async def _announced(self) -> None:
        def describe() -> str:
            return f"waiting for the first requests of {len(self._missing)} episodes, which enter the engine together"

        try:
            await named_wait(self._all_announced.wait(), describe, kind="first_requests", hard_limit_s=self._limit_s)
        except WaitTimeout:
            logger.warning(
                "%d episodes sent no request within %.0f s and the others start without them, so log-probs may differ "
                "in their last bits from another run; set engine.deterministic=true if that matters",
                len(self._missing),
                self._limit_s,
            )

    def _key(self, group: Starting, sample: int) -> tuple[int, int]:
        return self._places[group], sample % group.num_episodes  # the greedy sample, -1, is the last one


@dataclass(eq=False, slots=True)
class _HandedOver:
    """A request that enters a ``JointEngine`` with others, and then waits for the answer."""

    request: ModelRequest
    answer: asyncio.Future[ModelResponse]
    leave: Callable[[], None] | None = field(default=None, kw_only=True)
    """Once the engine has the request: ends it early."""

    def abandon(self) -> None:
        """The caller no longer waits for the answer."""
        if self.leave is not None:
            self.leave()


@dataclass(eq=False, slots=True, kw_only=True)
class _FirstRequest(_HandedOver):
    """The first request of an episode that starts with others."""

    key: tuple[int, int]
    activity: EpisodeActivity


def _joint_engine(engine: InferenceEngine) -> JointEngine | None:
    return cast(JointEngine, engine) if engine.capabilities.joint_start else None


def _begin(engine: JointEngine, waiting: Sequence[_HandedOver]) -> None:
    """Pass requests on in one call."""
    try:
        leaving = engine.begin([each.request for each in waiting], [each.answer for each in waiting])
    except BaseException as error:
        for each in waiting:
            if not each.answer.done():
                each.answer.set_exception(RolloutFailed(f"the engine did not take the request: {error}"))
        raise
    for each, leave in zip(waiting, leaving, strict=True):
        each.leave = leave


class JointTurns:
    """Lets the requests of one turn of the event loop enter a ``JointEngine`` in one call.

    Many episodes begin in the same turn, or continue in the same turn because their answers have arrived together. If
    their requests entered one by one, the engine would compute the first few prompts in a separate batch. Every batch
    has fixed costs on the host, and the trainer's thread waits for the interpreter meanwhile.
    """

    def __init__(self, engine: JointEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._waiting: list[_HandedOver] = []

    @classmethod
    def of(cls, engine: InferenceEngine, loop: asyncio.AbstractEventLoop) -> JointTurns | None:
        """None for an engine that takes requests one by one. ``loop`` runs the episodes."""
        joint = _joint_engine(engine)
        return None if joint is None else cls(joint, loop)

    @property
    def takes_requests(self) -> bool:
        """Whether ``agenerate`` may be called here: a workflow may have threads with separate event loops."""
        return asyncio.get_running_loop() is self._loop

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if not self._waiting:
            self._loop.call_soon(self._hand_over)  # runs after everything that is ready now
        answer: asyncio.Future[ModelResponse] = self._loop.create_future()
        waiting = _HandedOver(request, answer)
        self._waiting.append(waiting)
        if len(self._waiting) == _MOST_PER_TURN:
            self._hand_over()
        try:
            return await answer
        except BaseException:
            waiting.abandon()
            raise

    def _hand_over(self) -> None:
        waiting = [each for each in self._waiting if not each.answer.done()]  # a cancelled episode no longer waits
        self._waiting = []
        if waiting:
            _begin(self._engine, waiting)
