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
import fcntl
import logging
import os
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError
from torch._C._distributed_c10d import TCPStore

from headwater.cluster.group import LearnerGroup
from headwater.cluster.ray_actor import ActorPlace, ActorProcess, SentError, death_of
from headwater.cluster.turns import Activity, Turns
from headwater.core.data_proto import DataProto
from headwater.core.errors import OtherRankFailed, RankFailed, WaitTimeout
from headwater.core.waits import wait_until

if TYPE_CHECKING:
    from headwater.learner.build import LearnerSpec
    from headwater.learner.learner import LocalLearner

logger = logging.getLogger(__name__)

_COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Of one collective operation, and of the wait until all ranks have joined."""
_GRACE_S = 10.0
"""How long the other ranks have to report the same error, after one rank has failed."""
_CAUSE_S = 5.0
"""How long Ray may take to notice that the process of a rank has ended."""
_SLOW_CALL_S = 300.0
"""A call that takes longer is logged. Updates of large batches take minutes."""
_LOOK_S = 0.5
_START_LIMIT_S = 600.0
"""For starting the actors and joining them. Importing torch on a slow disk takes long."""
_SIOCGIFADDR = 0x8915
"""Linux: asks for the address of a network interface."""


@dataclass(frozen=True)
class RankResult:
    """What one rank returns of a call."""

    value: Any = None
    error: SentError | None = None


class LearnerRank(ActorProcess):
    """The actor of one rank. Its methods run one at a time, except those of ``ActorProcess``."""

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        super().__init__(name)
        self._rank = rank
        self._num_ranks = num_ranks
        self._store: TCPStore | None = None
        self._learner: LocalLearner | None = None
        self._items: Iterator[Any] = iter(())
        self._advanced = RankResult()

    def open_store(self) -> tuple[str, int]:
        """On rank 0: the address at which the others join."""
        address = ActorPlace.here().address
        self._store = TCPStore(address, 0, self._num_ranks, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def join(self, store_address: tuple[str, int]) -> RankResult:
        """Join the process group of the rank that has opened a store there. Returns where this rank runs."""
        return self._attempt("join", lambda: self._join(*store_address))

    def _join(self, address: str, port: int) -> ActorPlace:
        place = ActorPlace.here()
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows an actor only its own GPU
        if interface := _interface_of(place.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store = self._store or TCPStore(address, port, self._num_ranks, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._num_ranks, timeout=_COLLECTIVE_LIMIT
        )
        return place

    def build(self, builder: Callable[[LearnerSpec], LocalLearner], spec: LearnerSpec) -> RankResult:
        def make() -> None:
            self._learner = builder(spec)

        return self._attempt("build", make)

    def call(self, name: str, *arguments: Any) -> RankResult:
        def execute() -> Any:
            result = getattr(self._learner, name)(*arguments)
            return _drained(result) if isinstance(result, Iterator) else result

        return self._attempt(name, execute)

    def begin(self, name: str, *arguments: Any) -> RankResult:
        """On rank 0: start an iterator, whose items ``advance`` returns."""

        def make() -> None:
            self._items = getattr(self._learner, name)(*arguments)

        self._items = iter(())
        self._advanced = self._attempt(name, make)
        return self._advanced

    def advance(self) -> RankResult:
        """The next item as arrays, which need no copy to be read; None after the last one."""
        self._advanced = self._attempt("export", lambda: _pack(next(self._items, None)))
        return self._advanced

    def finish(self) -> RankResult:
        """Iterate to the end, because the other ranks do. An iterator that has failed fails here again."""
        if self._advanced.error is not None:
            return self._advanced
        return self._attempt("export", lambda: _drained(self._items))

    def auto_dtype(self, device: str) -> str:
        """The number type that ``model.dtype: auto`` means on the device of this rank."""
        from headwater.models.device import resolve_dtype

        return str(resolve_dtype("auto", device)).removeprefix("torch.")

    def _attempt(self, name: str, function: Callable[[], Any]) -> RankResult:
        try:
            return RankResult(function())
        except Exception as error:
            if not isinstance(error, OtherRankFailed):
                logger.error("rank %d failed in %s", self._rank, name, exc_info=True)  # to the log of this rank
            return RankResult(error=SentError.of(error))


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
                    yield _unpack(item)
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
            self._failure = f"{error} (learner.rank_timeout_s = {self._timeout_s:g}); one of the ranks does not answer"
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
                self._fail(self._gone())
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
        return self._gone() if is_noticed else f"a rank has ended: {death_of(error)}"

    def _wake(self, future: Future[Any]) -> None:
        with self._condition:
            self._condition.notify_all()

    def _watch_actors(self) -> None:
        """Notice the end of an actor, at any time, and interrupt the training loop."""
        while not self._is_closed:
            ended, _ = ray.wait(self._lives, timeout=_LOOK_S)
            if ended and not self._is_closed:
                is_raised = bool(self._failure)  # by a call, to whoever made it
                self._failure = self._failure or self._gone()
                with self._condition:
                    self._condition.notify_all()
                if not is_raised:
                    _thread.interrupt_main(signal.SIGINT)
                return

    def _gone(self) -> str:
        """Which ranks have ended, and why, with their places."""
        where = [f" ({place})" for place in self._places] or [""] * self.num_ranks
        told = [f"rank {rank}{where[rank]} has ended: {cause}" for rank, cause in self._ended().items()]
        return "; ".join(told) or "a rank has ended"

    def _ended(self) -> dict[int, str]:
        causes = {}
        for rank, life in enumerate(self._lives):
            ended, _ = ray.wait([life], timeout=0)
            if not ended:
                continue
            try:
                ray.get(life)
            except RayError as error:
                causes[rank] = death_of(error)
        return causes


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


def _pack(bucket: Any) -> Any:
    """A bucket as arrays, which the object store shares without copies. Tensors would be copied on arrival."""
    if bucket is None:
        return None
    packed = []
    for name, tensor in bucket:
        flat = tensor.detach().contiguous().cpu()
        packed.append(
            (name, str(flat.dtype).removeprefix("torch."), tuple(flat.shape), flat.view(-1).view(torch.uint8).numpy())
        )
    return packed


def _unpack(packed: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the arrays cannot be written to, and are not
        return [
            (name, torch.from_numpy(array).view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, array in packed
        ]


def _drained(items: Iterator[Any]) -> Any:
    for _ in items:
        pass
    return None


def _interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; empty if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
