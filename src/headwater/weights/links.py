"""Connections between the ranks of a learner and engines, as torch process groups: gloo for CPUs, NCCL for GPUs.

Each rank of the learner has one group with all engines, in which it is number 0. gloo sends a broadcast along a tree,
and the members connect only along it: in a group of 97, a member has at most 7 connections instead of 96.

    store = host_store("10.0.0.1")                                   # in the trainer's process
    link = Link.connect(Meeting("10.0.0.1", port, "g1/0"), 0, 3)      # the rank
    link = Link.connect(Meeting("10.0.0.1", port, "g1/0"), 1, 3)      # an engine, in another process or machine
    link.broadcast(tensor).wait()                                    # on both ends
"""

from __future__ import annotations

import atexit
import math
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, get_args

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions

from headwater.config.schema import WeightLink
from headwater.core.errors import WeightsError

BACKENDS: tuple[WeightLink, ...] = get_args(WeightLink)
_POLL_S = 0.0005
_LEAVE_S = 2.0
_leaving: set[threading.Thread] = set()
"""Threads in which the destructors of groups run."""


@dataclass(frozen=True)
class Meeting:
    """Where and under which name the members of a group find each other."""

    host: str
    port: int
    name: str
    backend: str = "gloo"
    limit_s: float = 60.0
    """How long the members wait for each other, and how long one operation may take."""
    connects_first: bool = True
    """Whether the members connect in a broadcast when they meet. Only if all of them are Headwater's. Otherwise they do
    as ``torch.distributed``: NCCL connects in the first operation, gloo connects every member with every other."""
    extra_connect_s: float = 0.0
    """How much longer the members wait for each other."""

    @property
    def connect_limit_s(self) -> float:
        return self.limit_s + self.extra_connect_s


def host_store(host: str) -> TCPStore:
    """A store of this process that listens on one address, for as long as the process lives."""
    with _hosting:  # two threads would make two stores, and members in different stores wait for each other
        return _store_on(host)


_hosting = threading.Lock()


@cache
def _store_on(host: str) -> TCPStore:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
    except (OSError, RuntimeError) as error:
        listener.close()
        raise WeightsError(
            f"rollout.weight_transfer = collective: this process cannot listen on {host} ({error}); set "
            f"{HOST_VARIABLE} to an address of this machine that the engines can reach"
        ) from error
    listener.detach()  # the store has taken it over
    return store


_OTHER_FILES = 256
"""Files that a process may open meanwhile for other things."""


def files_of(num_groups: int, size: int) -> int:
    """The most files that a member holds for groups of ``size`` members over gloo."""
    # A connection to the store, a listener, and what gloo's thread waits on; and the connections along the tree.
    return num_groups * (5 + (size - 1).bit_length())


def make_room(num_files: int, what: str) -> None:
    """Let this process open that many more files. ``WeightsError`` if the system does not allow it."""
    needed = len(os.listdir("/dev/fd")) + num_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed + _OTHER_FILES:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WeightsError(
            f"rollout.weight_transfer = collective: {what} needs {needed:,} open files, and the system allows "
            f"{hard:,}; raise the hard limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of Docker)"
        )
    wanted = needed + _OTHER_FILES if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


HOST_VARIABLE = "HEADWATER_WEIGHTS_HOST"
"""The address under which engines and ranks reach the trainer, if it is not the one that this machine uses itself."""


def own_address(peer: str) -> str:
    """The address of this machine from which ``peer`` is reached."""
    if told := os.environ.get(HOST_VARIABLE):
        return told
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightsError(f"{peer}: this machine has no route to it ({error}); check the engine's address") from error


class Pending(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Return when it is complete. ``WeightsError`` if it failed or took too long."""
        ...


class Link:
    """A process group of one sender, its number 0, and its receivers."""

    def __init__(self, group: Any, meeting: Meeting, gpu: str = "") -> None:
        self._group = group
        self._meeting = meeting
        self._gpu = torch.device(gpu or "cuda")

    @property
    def device(self) -> torch.device:
        """Where tensors are sent from and arrive: main memory, or the GPU for NCCL."""
        return self._gpu if self._meeting.backend == "nccl" else torch.device("cpu")

    def device_for(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor must be to be sent: as ``device``, but on a GPU that has it already, it stays."""
        return tensor.device if self.device.type == tensor.device.type else self.device

    @classmethod
    def connect(cls, meeting: Meeting, rank: int, size: int, gpu: str = "", deadline: float = math.inf) -> Link:
        """Wait for the other members. ``WeightsError`` if one of them does not come.

        ``gpu`` is the one that NCCL uses, such as ``cuda:1``. Without it, that is the current one of the thread that
        sends or receives. ``deadline``, of ``time.monotonic()``, is for who joins several groups within one limit.
        """
        deadline = min(deadline, time.monotonic() + meeting.connect_limit_s)
        try:
            patience = timedelta(seconds=_until(deadline))
            found = TCPStore(meeting.host, meeting.port, is_master=False, timeout=patience)
            # As ``torch.distributed`` nests them, so that the other end may be a group of ``new_group``'s kind.
            device = "cuda" if meeting.backend == "nccl" else "cpu"
            names = (meeting.name, f"{meeting.name}/", f"{device}/")
            store: Any = found
            for name in names:
                store = PrefixStore(name, store)
            link = cls(_make_group(meeting, store, rank, size), meeting, gpu)
            if meeting.connects_first:
                link._connect_all(store, rank, size, deadline)
        except (RuntimeError, ValueError, WeightsError) as error:
            cause = error.__cause__ if isinstance(error, WeightsError) else None
            raise WeightsError(
                f"weights: member {rank} of {size} could not join {meeting.name} at {meeting.host}:{meeting.port} "
                f"within {meeting.connect_limit_s:g} s ({_first_line(cause or error)})"
            ) from error
        return link

    def _connect_all(self, store: Any, rank: int, size: int, deadline: float) -> None:
        """Connect all members now: they would do it in the first broadcast, where NCCL waits without a limit.

        They meet in the store before, so that none begins alone. One that ends in the middle of this still leaves the
        others waiting, so another thread waits for it.
        """
        tensor = torch.zeros(1, device=self.device)
        begun: Future[_Work] = Future()

        def begin() -> None:
            try:
                if tensor.device.type == "cuda":
                    torch.cuda.set_device(tensor.device)
                begun.set_result(self.broadcast(tensor))
            except BaseException as error:  # noqa: BLE001  the caller's thread raises it
                begun.set_exception(error)

        try:
            store.set(f"here/{rank}", "")
            store.wait([f"here/{each}" for each in range(size)], timedelta(seconds=_until(deadline)))
            threading.Thread(target=begin, name="headwater-weights-connect", daemon=True).start()
            replace(begun.result(_until(deadline)), polls=True, limit_s=_until(deadline)).wait()
        except TimeoutError:
            self.close()
            raise WeightsError(f"{self._meeting.backend} has not connected all members") from None
        except BaseException:
            self.close()
            raise

    def broadcast(self, tensor: torch.Tensor) -> _Work:
        """Send the tensor if this is number 0, otherwise receive into it. Returns before that has happened."""
        group = self._group
        if group is None:
            raise WeightsError("weights: this process has left the group")
        options = BroadcastOptions()
        options.rootRank = 0
        try:
            work = group.broadcast([tensor], options)
            return _Work(work, polls=self._meeting.backend == "nccl", limit_s=self._meeting.limit_s)
        except (RuntimeError, ValueError) as error:
            raise _failure(error) from error

    def close(self) -> None:
        """Leave the group. The other members' operations fail at once."""
        group, self._group = self._group, None
        if group is None:
            return
        # Operations of gloo that still run end at their time limit, and are waited for. NCCL's would never end.
        arguments = [group], self._meeting.backend == "nccl"
        leaving = threading.Thread(target=_release, args=arguments, name="headwater-weights-leave", daemon=True)
        _leaving.add(leaving)
        leaving.start()


@dataclass(frozen=True)
class _Work:
    work: Any
    polls: bool
    """Whether to check for the end of ``work``, because its own waiting has no limit or another one."""
    limit_s: float

    def wait(self) -> None:
        try:
            if self.polls:
                self._poll()
            self.work.wait()  # raises if an operation of NCCL has failed
        except RuntimeError as error:
            raise _failure(error) from error

    def _poll(self) -> None:
        deadline = time.monotonic() + self.limit_s
        while not self.work.is_completed():
            if time.monotonic() > deadline:
                raise WeightsError(f"weights: a bucket was not sent within {self.limit_s:g} s")
            time.sleep(_POLL_S)


def _until(deadline: float) -> float:
    return max(_POLL_S, deadline - time.monotonic())


def _make_group(meeting: Meeting, store: Any, rank: int, size: int) -> Any:
    limit = timedelta(seconds=meeting.limit_s)
    if meeting.backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        settings = ProcessGroupNCCL.Options()
        settings._timeout = limit
        with _failures_are_errors():
            return ProcessGroupNCCL(store, rank, size, settings)
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    place = {"interface": interface} if interface else {"hostname": own_address(meeting.host)}
    # All members must choose the same: a lazy one does not understand what the others write into the store. Only the
    # transport of Linux can be lazy.
    is_lazy = meeting.connects_first and sys.platform == "linux" and not os.environ.get("GLOO_DEVICE_TRANSPORT")
    options._devices = [ProcessGroupGloo.create_device(**place, lazy_init=is_lazy)]
    options._timeout = limit
    options._threads = 2
    return ProcessGroupGloo(store, rank, size, options)


_REPORT_FAILURES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables of the environment that a group reads when it is made: a failure ends its operations, and nothing else."""
_environment = threading.Lock()


@contextmanager
def _failures_are_errors() -> Iterator[None]:
    """torch would end the process of a member if an operation fails or hangs, also because torchrun sets one of these
    variables. A learner outlives its engines."""
    with _environment:
        before = {name: os.environ.get(name) for name in _REPORT_FAILURES}
        os.environ.update(_REPORT_FAILURES)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _release(holder: list[Any], aborts: bool) -> None:
    if aborts:
        with suppress(RuntimeError):  # it is being given up
            holder[0].abort()
    holder.clear()
    _leaving.discard(threading.current_thread())


@atexit.register
def _wait_for_leaving() -> None:
    """If the interpreter ended in the destructor of a group, this would abort the process."""
    deadline = time.monotonic() + _LEAVE_S
    for thread in tuple(_leaving):
        thread.join(max(0.0, deadline - time.monotonic()))


_LOST = re.compile(
    r"clos(ed|ure)|reset by peer|broken pipe|connection refused|time[d ]? ?out|remote process|aborted|failed to recv",
    re.IGNORECASE,
)
"""What gloo, NCCL and the store say if another member has ended or is silent."""


def _failure(error: Exception) -> WeightsError:
    """Tell the end of another member from an operation that this one was refused, such as two members on one GPU."""
    if not isinstance(error, ValueError) and _LOST.search(str(error)):
        return WeightsError(f"weights: a member of the group has ended or does not answer ({_first_line(error)})")
    return WeightsError(f"weights: the tensor cannot be sent or received over the group ({_first_line(error)})")


def _first_line(error: BaseException) -> str:
    """Of NCCL's errors, the line that says what is wrong; the first one only has a place in torch's source."""
    text = str(error).strip()
    return (text.partition("Last error:\n")[2] or text).partition("\n")[0]
