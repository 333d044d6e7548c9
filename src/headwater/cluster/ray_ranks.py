"""Learner ranks as Ray actors: each holds a shard of the learner, with torch.distributed between them.

    ranks = RayRanks.start([{"name": "learner-0", "num_cpus": 1}, ...], timeout_s=1800)
    learner = ranks.build(build_learner, spec)      # a ``LearnerGroup``
    ...
    ranks.close()

The process of the training loop is no rank. Batches and exported buckets travel through Ray's object store. A thread
watches the actors, because the training loop may be anywhere, such as waiting for rollouts, when one of them ends.
"""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from headwater.cluster.group import LearnerGroup
from headwater.cluster.ray_actor import ActorPlace, SentError, death_of
from headwater.cluster.ray_rank import LearnerRank, RankResult, unpack
from headwater.cluster.turns import Activity, EndedRank, Turns
from headwater.core.data_proto import DataProto
from headwater.core.errors import RankFailed, WaitTimeout
from headwater.core.waits import wait_until

if TYPE_CHECKING:
    from headwater.learner.build import LearnerSpec
    from headwater.learner.learner import LocalLearner

logger = logging.getLogger(__name__)

_GRACE_S = 10.0
"""How long the other ranks have to report the same error, after one rank has failed."""
_CAUSE_S = 5.0
"""How long Ray may take to notice that the process of a rank has ended."""
_ANSWER_S = 10.0
"""A rank that does not answer for this long is named if a call does not end."""
_SLOW_CALL_S = 300.0
"""A call that takes longer is logged. Updates of large batches take minutes."""
_LOOK_S = 0.5
_START_LIMIT_S = 600.0
"""For starting the actors and joining them. Importing torch on a slow disk takes long."""


class RayRanks:
    """Calls all ranks together (``group.RankCalls``)."""

    def __init__(self, actors: Sequence[Any], *, timeout_s: float) -> None:
        """The actors join a process group while this object can already be used."""
        self._actors = list(actors)
        self._timeout_s = timeout_s
        self._places: tuple[ActorPlace, ...] = ()
        self._failure = ""
        self._is_closed = False
        self._condition = threading.Condition()
        self._turns = Turns(self._check)
        self._asked: Sequence[Future[Any]] = ()
        """The answers of all ranks to the present call."""
        self._gone: dict[int, EndedRank] = {}
        self._alive_at = time.time()
        """When all ranks were last known to run."""
        address = actors[0].open_store.remote()
        self._joining = [actor.join.remote(address) for actor in actors]
        self._lives = [actor.until_end.remote() for actor in actors]
        self._watch = threading.Thread(target=self._watch_actors, name="watch of ranks", daemon=True)
        self._watch.start()

    @classmethod
    def start(cls, options: Sequence[dict[str, Any]], *, timeout_s: float) -> RayRanks:
        """Start one actor per entry of ``options``, which are Ray's."""
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"side": 2})(LearnerRank)
        actors = [remote.options(**each).remote(each["name"], rank, len(options)) for rank, each in enumerate(options)]
        return cls(actors, timeout_s=timeout_s)

    @property
    def places(self) -> tuple[ActorPlace, ...]:
        """Where each rank runs. Waits until all of them have started."""
        if not self._places:
            self._places = tuple(self._gather("start", self._joining))
        return self._places

    @property
    def num_ranks(self) -> int:
        return len(self._actors)

    @property
    def failure(self) -> str:
        return self._failure

    def activity(self) -> Activity:
        answered = {rank for rank, future in enumerate(self._asked) if future.done()}
        return replace(self._turns.activity(), answered=answered, ended=self._ended())

    def auto_dtype(self, device: str) -> str:
        name: str = ray.get(self._actors[0].auto_dtype.remote(device), timeout=_START_LIMIT_S)
        return name

    def build(self, builder: Callable[[LearnerSpec], LocalLearner], spec: LearnerSpec) -> LearnerGroup:
        with self._turns.take("build"):
            logger.debug("learner ranks: %s", "; ".join(map(str, self.places)))
            self._gather("build", [actor.build.remote(builder, spec) for actor in self._actors])
        return LearnerGroup(spec.config, self)

    def log_to(self, folder: Path, token: str) -> list[str]:
        """Where each rank writes its output from now on."""
        asked = [actor.log_to.remote(folder, token) for actor in self._actors]
        places: list[str] = ray.get(asked, timeout=_START_LIMIT_S)
        return places

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._turns.take(name):
            stored: dict[int, Any] = {}
            refs = [
                actor.call.remote(name, *(_stored(each, stored) for each in own))
                for actor, own in zip(self._actors, arguments, strict=True)
            ]
            return self._gather(name, refs)

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        first, others = self._actors[0], self._actors[1:]
        with self._turns.take(name):
            following = [actor.call.remote(name, *arguments) for actor in others]
            try:
                self._gather(name, [first.begin.remote(name, *arguments)], beside=following)
                coming = first.advance.remote()
                while (item := self._gather(name, [coming], beside=following)[0]) is not None:
                    coming = first.advance.remote()  # made while this one is read
                    yield unpack(item)
                    del item
            finally:
                if not self.failure:
                    self._gather(name, [first.finish.remote(), *following])

    def close(self) -> None:
        """End the actors. Closing twice is allowed."""
        self._is_closed = True
        for actor in self._actors:
            with suppress(RayError, ValueError):
                ray.kill(actor)
        self._watch.join(10 * _LOOK_S)

    def _gather(self, name: str, refs: Sequence[Any], *, beside: Sequence[Any] = ()) -> list[Any]:
        """The values of ``refs``, while ``beside`` are calls of other ranks whose errors count too."""
        futures = [ref.future() for ref in refs]
        self._asked = futures if len(refs) == self.num_ranks else ()
        watched = [*futures, *(ref.future() for ref in beside)]
        for future in watched:
            future.add_done_callback(self._wake)
        failed_at: float | None = None

        def is_settled() -> bool:
            nonlocal failed_at
            self._check()
            for future in watched:
                if future.done() and isinstance(future.exception(), RayActorError):
                    self._fail(self._cause(future.exception()))
            if all(future.done() for future in futures):
                return True
            if errors := _errors(watched):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _GRACE_S:
                    self._fail("; ".join(each.told() for each in errors) + "; the other ranks did not end this call")
            return False

        try:
            with self._condition:
                wait_until(
                    self._condition,
                    is_settled,
                    lambda: f"{self.num_ranks} ranks execute {name}",
                    kind="ranks",
                    hard_limit_s=self._timeout_s,
                    soft_limit_s=_SLOW_CALL_S,
                )
        except WaitTimeout as error:
            who = self._quiet() or "one of the ranks does not answer"
            told = f"{error} (learner.rank_timeout_s = {self._timeout_s:g}); {who}"
            self._failure = self._failure or told
            raise RankFailed(self._failure) from error
        return self._values(futures)

    def _values(self, futures: Sequence[Future[Any]]) -> list[Any]:
        for future in futures:
            if (problem := future.exception()) is not None:
                raise RankFailed(f"a rank could not answer: {death_of(problem)}") from problem
        outcomes: list[RankResult] = [future.result() for future in futures]
        errors = {rank: each.error for rank, each in enumerate(outcomes) if each.error is not None}
        told = {rank: error for rank, error in errors.items() if not error.is_other_rank} or errors
        if told:
            rank, first = next(iter(told.items()))
            if first.is_ours:
                raise first.again()
            # A collective operation fails immediately when another rank ends. Ray tells that a moment later.
            if ray.wait(self._lives, timeout=_CAUSE_S)[0]:
                self._fail(self._told())
            raise RankFailed(f"rank {rank} of {self.num_ranks}: {first.told()}")
        return [each.value for each in outcomes]

    def _check(self) -> None:
        if self._failure:
            raise RankFailed(self._failure)

    def _fail(self, cause: str) -> None:
        self._failure = self._failure or cause
        raise RankFailed(self._failure)

    def _cause(self, error: BaseException | None) -> str:
        is_noticed = ray.wait(self._lives, timeout=_CAUSE_S)[0]
        return self._told() if is_noticed else f"a rank has ended: {death_of(error)}"

    def _wake(self, future: Future[Any]) -> None:
        with self._condition:
            self._condition.notify_all()

    def _watch_actors(self) -> None:
        """Notice the end of an actor, at any time, and interrupt the training loop."""
        while not self._is_closed:
            ended, _ = ray.wait(self._lives, timeout=_LOOK_S)
            if not ended:
                self._alive_at = time.time()
            elif not self._is_closed:
                is_raised = bool(self._failure)  # by a call, to whoever made it
                self._failure = self._failure or self._told()
                with self._condition:
                    self._condition.notify_all()
                if not is_raised:
                    _thread.interrupt_main(signal.SIGINT)
                return

    def _told(self) -> str:
        """Which ranks have ended, and why, with their places."""
        told = [f"{self._named(rank)} has ended: {each.cause}" for rank, each in self._ended().items()]
        return "; ".join(told) or "a rank has ended"

    def _quiet(self) -> str:
        """Which ranks answer nothing, with their places; empty if all of them answer."""
        asked = [actor.answer.remote() for actor in self._actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        quiet = [self._named(rank) for rank, each in enumerate(asked) if each not in answered]
        why = "its process has not started or is stopped, or its node hangs"
        return "; ".join(f"{each} does not answer ({why})" for each in quiet)

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._places[rank]})" if self._places else f"rank {rank}"

    def _ended(self) -> dict[int, EndedRank]:
        for rank, life in enumerate(self._lives):
            if rank in self._gone or not ray.wait([life], timeout=0)[0]:
                continue
            try:
                ray.get(life)
            except RayError as error:
                self._gone[rank] = EndedRank.noticed(death_of(error), self._alive_at)
        return dict(self._gone)


def _errors(futures: Sequence[Future[Any]]) -> list[SentError]:
    found = []
    for future in futures:
        if future.done() and future.exception() is None and isinstance(future.result(), RankResult):
            error = future.result().error
            if error is not None and not error.is_other_rank:
                found.append(error)
    return found


def _stored(value: Any, stored: dict[int, Any]) -> Any:
    """A batch goes into the object store, once if several ranks take the same; other arguments travel in the call."""
    if not isinstance(value, DataProto):
        return value
    if id(value) not in stored:
        stored[id(value)] = ray.put(value)
    return stored[id(value)]
