"""What ``test_failing_ranks.py`` runs: two ranks whose learner fails, or is called while an export is being read.

    python tests/integration/failing_ranks.py FOLDER

Every case runs in two processes, which are forked from this one to import torch only once. The learner holds no model,
so a case takes a few seconds. Rank 0 writes what it has seen to ``FOLDER/CASE.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
import torch.distributed as dist
from ports import free_port

from headwater.cluster import torchrun, turns
from headwater.core.errors import DataError, HeadwaterError
from headwater.core.learner import LearnerStatus

TIMEOUT_S = 300.0
"""Of a call. A case whose ranks wait for each other fails with the message of this limit."""
ALONE = ("rank 0 fails", "rank 1 fails")
"""Cases in which the other rank reports nothing, so that the time which it has for that passes. In the others, a busy
machine may need much longer until the second error or the end of a process is seen."""


class Learner:
    """Its calls are collective operations, and its export fails on the ranks that ``failing`` names."""

    def __init__(self, failing: tuple[int, ...] = (), error: type[Exception] = MemoryError) -> None:
        self._failing = failing
        self._error = error
        self.steps = 0

    def export(self, role: str = "policy") -> Iterator[int]:
        for number in range(3):
            if number == 1 and dist.get_rank() in self._failing:
                raise self._error("no room for a full tensor")
            meet()
            yield number

    def update(self, number: int) -> int:
        meet()
        self.steps += 1
        return number

    def end(self, rank: int) -> None:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        meet()

    def offload(self) -> None:
        self.update(0)

    def status(self) -> LearnerStatus:
        return LearnerStatus(dist.get_world_size(), "cpu", self.steps, 0.1, memory_bytes=0)


def meet() -> None:
    dist.all_reduce(torch.ones(()))


def build(spec: Any) -> Any:
    return Learner(*spec.learner)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (HeadwaterError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def read(learner: Any, seen: list[int]) -> None:
    seen.extend(learner.export())


def fails_in_export(group: torchrun.TorchrunGroup, learner: Any) -> dict[str, Any]:
    seen: list[int] = []
    error = error_of(lambda: read(learner, seen))
    return {"seen": seen, "error": error, "later": error_of(learner.offload), "failure": learner.status().failure}


def is_killed(group: torchrun.TorchrunGroup, learner: Any) -> dict[str, Any]:
    """The killed rank is noticed anywhere in rank 0, as an interrupt, or in the call."""
    began = time.monotonic()
    try:
        error = error_of(lambda: group.call("end", [(1,)] * 2))
    except KeyboardInterrupt:
        error = "interrupt"
    return {"error": error, "failure": learner.status().failure, "seconds": time.monotonic() - began}


def is_left_early(group: torchrun.TorchrunGroup, learner: Any) -> dict[str, Any]:
    """An export that is not read to its end lets the ranks continue."""
    items = learner.export()
    first = next(items)
    items.close()
    return {"seen": [first], "later": group.call("update", [(1,), (2,)])}


def is_read_by_another_thread(group: torchrun.TorchrunGroup, learner: Any) -> dict[str, Any]:
    """A call during an export waits for its end, and is refused if the export is not read any more."""
    items, events, is_reading, may_end = learner.export(), [], threading.Event(), threading.Event()

    def read_slowly() -> None:
        for item in items:
            events.append(f"item {item}")
            is_reading.set()
            may_end.wait()

    reader = threading.Thread(target=read_slowly)
    reader.start()
    is_reading.wait()
    turns._TURN_LIMIT_S = 0.5
    refused = error_of(learner.offload)
    turns._TURN_LIMIT_S = TIMEOUT_S
    threading.Timer(0.5, may_end.set).start()
    learner.offload()
    events.append("call")
    reader.join()
    return {"refused": refused, "events": events, "steps": learner.status().num_optimizer_steps}


CASES: dict[str, tuple[tuple[Any, ...], Callable[[Any, Any], dict[str, Any]]]] = {
    "rank 0 fails": (((0,),), fails_in_export),
    "rank 1 fails": (((1,),), fails_in_export),
    "both fail": (((0, 1), DataError), fails_in_export),
    "killed": ((), is_killed),
    "left early": ((), is_left_early),
    "two threads": ((), is_read_by_another_thread),
}


def run(name: str, rank: int, port: int, folder: Path) -> None:
    torchrun._GRACE_S = 1.0 if name in ALONE else TIMEOUT_S
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    learner, case = CASES[name]
    group = torchrun.join()
    with closing(group):
        if rank:
            group.serve()
            return
        made = group.build(build, SimpleNamespace(config=None, learner=learner), timeout_s=TIMEOUT_S)
        (folder / f"{name}.json").write_text(json.dumps(case(group, made)))


def fork(name: str, rank: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    try:
        run(name, rank, port, folder)
    except BaseException:  # noqa: BLE001  a forked process must not return into the code of its parent
        if rank == 0:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def main(folder: Path) -> None:
    pids = []
    for name in CASES:
        port = free_port()
        pids += [fork(name, rank, port, folder) for rank in range(2)]
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
