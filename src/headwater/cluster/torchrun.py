"""Ranks that torchrun has started: rank 0 runs the training loop, the others serve its calls.

    group = join()
    if group.rank:
        return group.serve()                          # until rank 0 ends
    with closing(group):
        learner = group.build(build_learner, spec, timeout_s=1800)    # on every rank
        ...

A call is a message from rank 0 with the arguments of each rank. All ranks execute it together and rank 0 gathers the
results. Messages use a separate gloo group, so that they work beside NCCL.

Threads: every rank executes its part of a call on one thread (``_Lane``), because a collective operation cannot be
interrupted. The main thread waits for it, and meanwhile handles signals and notices when another rank ends. A third
thread (``watch.py``) sends this rank's sign of life and looks for those of the others.
"""

from __future__ import annotations

import _thread
import functools
import logging
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from headwater.cluster.group import LearnerGroup
from headwater.cluster.turns import Activity, Turns
from headwater.cluster.watch import RankWatch, error_text
from headwater.config.schema import Config
from headwater.core.errors import ConfigError, HeadwaterError, OtherRankFailed, RankFailed, WaitTimeout
from headwater.core.waits import COLLECTIVE_LIMIT_S, wait_until

if TYPE_CHECKING:
    from headwater.learner.build import LearnerSpec
    from headwater.learner.learner import LocalLearner

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MESSAGE_LIMIT = timedelta(days=365)
"""Serving ranks wait for the next call as long as rank 0 lives."""
_GRACE_S = 10.0
"""How long the other ranks have to report the same error, after one rank has failed."""
_CLOSE_LIMIT_S = 30.0
_SLOW_CALL_S = 300.0
"""A call that takes longer is logged. Updates of large batches take minutes."""

_END = "end"
_BUILD = "build"
_DONE = object()


def check_ranks(config: Config, num_ranks: int) -> None:
    """Refuse settings that do not fit ``num_ranks`` ranks."""
    problems = []
    if config.model.device.startswith("cuda:"):
        problems.append(
            f"model.device = {config.model.device}: every rank uses its own GPU; use auto, cuda or cpu with torchrun"
        )
    ranks, num_context = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks", config.learner.context_parallel
    if num_ranks % num_context:
        problems.append(
            f"learner.context_parallel = {num_context}: {ranks} cannot form groups of {num_context}; start a "
            f"multiple of {num_context} ranks with torchrun --nproc-per-node"
        )
    num_rows = config.trainer.num_prompts_per_step * config.rollout.num_samples_per_prompt
    if num_ranks > num_rows * num_context:
        problems.append(
            f"trainer.num_prompts_per_step = {config.trainer.num_prompts_per_step}: {num_rows} samples per step are "
            f"fewer than {num_ranks} ranks; raise it, or start fewer ranks with --nproc-per-node"
        )
    if problems:
        raise ConfigError(problems, f"a run on {ranks}")


def join() -> TorchrunGroup:
    """Join the process group that torchrun describes in the environment."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    num_here = os.environ.get("LOCAL_WORLD_SIZE")
    if num_here not in (num_ranks, None):
        raise ConfigError(
            [
                f"--nproc-per-node = {num_here}: torchrun has started {num_ranks} ranks on several machines, and it "
                "must start all of them on one; use cluster=ray for several machines"
            ]
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = None
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                [
                    f"--nproc-per-node = {num_here or local_rank + 1}: this machine has "
                    f"{torch.cuda.device_count()} GPUs; start at most one rank per GPU"
                ]
            )
        device = local_rank
        torch.cuda.set_device(device)
    if num_here is not None and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S))
    control = dist.new_group(backend="gloo", timeout=_MESSAGE_LIMIT)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    watch = RankWatch(PrefixStore("headwater", store), dist.get_rank(), dist.get_world_size())
    return TorchrunGroup(control, watch, _Lane(device))


class _Lane:
    """A thread that executes one function after another. It may hang forever when another rank has ended."""

    def __init__(self, cuda_device: int | None) -> None:
        self._cuda_device = cuda_device
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="learner calls", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.put((future, function))
        return future

    def _run(self) -> None:
        if self._cuda_device is not None:
            torch.cuda.set_device(self._cuda_device)
        while True:
            future, function = self._waiting.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  the caller that waits for the future handles it
                future.set_exception(error)


class TorchrunGroup:
    """This process among the ranks. Rank 0 calls the others; they serve."""

    def __init__(self, control: dist.ProcessGroup, watch: RankWatch, lane: _Lane) -> None:
        self.rank = dist.get_rank()
        self._control = control
        self._watch = watch
        self._lane = lane
        self._condition = threading.Condition()
        self._timeout_s = math.inf
        self._learner: LocalLearner | None = None
        self._num_calls = 0
        self._failure = ""
        self._own_error: BaseException | None = None
        self._turns = Turns(self._check)
        self._is_closed = False

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    @property
    def failure(self) -> str:
        return self._failure or self._watch.gone()

    @property
    def has_raised(self) -> bool:
        """Whether a call has raised the failure."""
        return bool(self._failure)

    def activity(self) -> Activity:
        return replace(self._turns.activity(), ended=self._watch.ended())

    def build(
        self, builder: Callable[[LearnerSpec], LocalLearner], spec: LearnerSpec, *, timeout_s: float
    ) -> LearnerGroup:
        """Build a learner on every rank. ``timeout_s`` limits this call and every later one."""
        self._timeout_s = timeout_s
        # Rank 0 may be anywhere, such as waiting for rollouts, when another rank ends.
        self._watch.on_gone = self._interrupt
        self.call(_BUILD, [(builder, spec)] * self.num_ranks)
        return LearnerGroup(spec.config, self)

    def _interrupt(self) -> None:
        if not self._failure:  # otherwise a call has raised it
            _thread.interrupt_main(signal.SIGINT)

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        def together() -> list[Any]:
            own = self._send(name, arguments)
            return self._gather(self._attempt(name, lambda: self._execute(name, own)))

        with self._turns.take(name):
            return self._run(together, name)

    def stream(self, name: str, *arguments: Any) -> Iterator[Any]:
        items: list[Iterator[Any]] = []
        is_sent = False

        def begin() -> None:
            nonlocal is_sent
            self._send(name, [arguments] * self.num_ranks)
            is_sent = True
            self._attempt(name, lambda: items.append(getattr(self._learner, name)(*arguments)))

        def advance() -> Any:
            item, problem = self._attempt(name, lambda: next(items[0], _DONE)) if items else (_DONE, None)
            return item if problem is None else _DONE

        def end() -> None:
            if is_sent and self._own_error is not None:
                self._gather((None, error_text(self._own_error)))
            elif is_sent:
                # The other ranks iterate to the end, so this rank has to as well.
                self._gather(self._attempt(name, lambda: _drained(items[0])))

        with self._turns.take(name):
            try:
                self._run(begin, name)
                while (item := self._run(advance, name)) is not _DONE:
                    yield item
            except BaseException:
                if not self.failure:
                    self._run(end, name)
                raise
            self._run(end, name)  # raises if a rank has failed or ended: a part of the items must not look like all

    def serve(self) -> None:
        """Execute the calls of rank 0 until it ends."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends
        try:
            self._run(self._serve, "serve")
        except RankFailed as error:
            logger.info("rank %d ends: %s", self.rank, error)
            raise

    def close(self) -> None:
        """Let the other ranks end, if they still can."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.on_gone = lambda: None
        if self.rank == 0 and not self.failure:
            self._timeout_s = _CLOSE_LIMIT_S
            try:
                with self._turns.take(_END), suppress(HeadwaterError, RuntimeError):
                    self._run(lambda: self._send(_END, [()] * self.num_ranks), _END)
            except RankFailed as error:
                self._failure = self._failure or str(error)
        is_whole = not self.failure
        if is_whole:
            dist.destroy_process_group()
        if not (self._watch.stop() and is_whole):
            _stuck.append(self)

    def _send(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        self._num_calls += 1
        self._own_error = None
        return self._message([(name, each) for each in arguments])[1]

    def _message(self, messages: list[tuple[str, tuple[Any, ...]]] | None) -> tuple[str, tuple[Any, ...]]:
        received: list[Any] = [None]
        dist.scatter_object_list(received, messages, src=0, group=self._control)
        message: tuple[str, tuple[Any, ...]] = received[0]
        return message

    def _serve(self) -> None:
        while True:
            name, arguments = self._message(None)
            self._num_calls += 1
            self._own_error = None
            if name == _END:
                return
            self._gather(self._attempt(name, functools.partial(self._execute, name, arguments)))

    def _execute(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == _BUILD:
            builder, spec = arguments
            self._learner = builder(spec)
            return None
        result = getattr(self._learner, name)(*arguments)
        return _drained(result) if isinstance(result, Iterator) else result

    def _attempt(self, name: str, function: Callable[[], T]) -> tuple[T | None, str | None]:
        """The result of this rank and None, or None and the text of its error."""
        try:
            return function(), None
        except Exception as error:
            self._own_error = error
            self._watch.report(self._num_calls, error)
            if self.rank:
                logger.debug("rank %d failed in %s", self.rank, name, exc_info=True)
            return None, error_text(error)

    def _gather(self, outcome: tuple[Any, str | None]) -> list[Any]:
        """On rank 0 the results of all ranks, or the error of one; nothing on the others."""
        outcomes: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        dist.gather_object(outcome, outcomes, dst=0, group=self._control)
        if outcomes is None:
            return []
        errors = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
        others = {rank: text for rank, text in errors.items() if rank and text}
        if self._own_error is not None and not (isinstance(self._own_error, OtherRankFailed) and others):
            raise self._own_error
        if others:
            rank, text = next(iter(others.items()))
            raise RankFailed(f"rank {rank} of {self.num_ranks}: {text}")
        return [result for result, _ in outcomes]

    def _run(self, function: Callable[[], T], name: str) -> T:
        """Execute ``function`` on the lane, and wait for it while the other ranks live."""
        self._check()
        future = self._lane.submit(function)
        future.add_done_callback(self._wake)
        failed_at: float | None = None

        def is_settled() -> bool:
            nonlocal failed_at
            if future.done():
                return True
            self._check()
            if self.rank == 0 and (self._own_error or self._watch.reported(self._num_calls)):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _GRACE_S:
                    self._give_up()
            return False

        limit_s = self._timeout_s if self.rank == 0 else math.inf
        what = f"{self.num_ranks} ranks execute {name}" if self.rank == 0 else f"rank {self.rank} serves rank 0"
        try:
            with self._condition:
                wait_until(
                    self._condition,
                    is_settled,
                    lambda: what,
                    kind="ranks",
                    hard_limit_s=limit_s,
                    soft_limit_s=_SLOW_CALL_S if self.rank == 0 else math.inf,
                )
        except WaitTimeout as error:
            who = self._watch.quiet() or "one of the ranks does not answer"
            self._failure = f"{error} (learner.rank_timeout_s = {limit_s:g}); {who}"
            raise RankFailed(self._failure) from error
        try:
            return future.result()
        except HeadwaterError:
            raise
        except RuntimeError as error:
            # A collective operation fails immediately when another rank ends. The cause is known a moment later.
            self._find_cause(error)
            raise

    def _wake(self, future: Future[Any]) -> None:
        with self._condition:
            self._condition.notify_all()

    def _check(self) -> None:
        if self.failure:
            self._failure = self.failure
            raise RankFailed(self._failure)

    def _give_up(self) -> None:
        """The ranks have not failed alike, so the others are stuck in this call."""
        reported = self._watch.reported(self._num_calls)
        if reported is not None:
            self._failure = f"rank {reported[0]} of {self.num_ranks}: {reported[1]}"
            raise RankFailed(self._failure)
        assert self._own_error is not None, "one of the two has failed"
        self._failure = f"rank {self.rank}: {error_text(self._own_error)}"
        raise self._own_error

    def _find_cause(self, error: RuntimeError) -> None:
        if error is self._own_error and self._watch.reported(self._num_calls) is None and not self.failure:
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            self._check()
            if (reported := self._watch.reported(self._num_calls)) is not None and self.rank == 0:
                self._failure = f"rank {reported[0]} of {self.num_ranks}: {reported[1]}"
                raise RankFailed(self._failure) from error
            time.sleep(0.1)


_stuck: list[TorchrunGroup] = []


def is_stuck() -> bool:
    """Whether a thread of this process may never end, because another rank has ended during a call."""
    return bool(_stuck)


def _drained(items: Iterator[Any]) -> Any:
    """Iterate to the end and return None, the result of a call whose items are not needed."""
    for _ in items:
        pass
    return None
