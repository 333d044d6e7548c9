"""What the actors of a run share: where they run, where their output goes, and how their end is described."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from headwater.cluster.watch import error_text
from headwater.core.errors import HeadwaterError, OtherRankFailed

EVENTS = "cluster.log"
"""The file in ``logs/`` in which the training loop records actors. Its first line identifies the folder."""


_START_LIMIT_S = 300.0


@dataclass(frozen=True)
class ActorPlace:
    address: str
    """Of the node."""
    node: str
    """Ray's id of the node."""
    pid: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        gpus = f", GPU {','.join(self.gpus)}" if self.gpus else ""
        return f"node {self.address}, process {self.pid}{gpus}"

    @classmethod
    def here(cls) -> ActorPlace:
        context = ray.get_runtime_context()
        node = context.get_node_id()
        # Not the address that this machine guesses: `ray start --node-ip-address` may have set another one.
        address = next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)
        gpus = tuple(str(each) for each in context.get_accelerator_ids().get("GPU", ()))
        return cls(address, node, os.getpid(), gpus)


class ActorProcess:
    """The part of an actor that answers while one of its other methods runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Ray shows this in its dashboard and in front of printed lines."""
        return self._name

    @ray.method(concurrency_group="side")  # type: ignore[untyped-decorator]
    def log_to(self, folder: Path, token: str) -> str:
        return redirect_output(folder, token, self._name)

    @ray.method(concurrency_group="side")  # type: ignore[untyped-decorator]
    def answer(self) -> None:
        """Returns at once, unless the process is stopped."""

    @ray.method(concurrency_group="side")  # type: ignore[untyped-decorator]
    def until_end(self) -> None:
        """Never returns: the call fails when the actor ends."""
        threading.Event().wait()


class AsyncActor:
    """An actor whose methods are coroutines, so it answers while others of them run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Ray shows this in its dashboard."""
        return self._name

    async def log_to(self, folder: Path, token: str) -> str:
        """Until the actor ends: one that Ray has restarted writes to Ray's own logs."""
        return redirect_output(folder, token, self._name)


class ActorPool:
    """Several actors of the same kind, seen from the training loop."""

    def __init__(self, kind: str, actors: Sequence[Any]) -> None:
        self.kind = kind
        """Its actors are named ``kind-0``, ``kind-1`` and so on."""
        self._actors = list(actors)

    def log_to(self, folder: Path, token: str) -> list[str]:
        """Where each actor writes its output from now on."""
        asked = [actor.log_to.remote(folder, token) for actor in self._actors]
        places: list[str] = ray.get(asked, timeout=_START_LIMIT_S)
        return places

    def kill(self) -> None:
        """End the actors. Those that have ended already are no error."""
        for actor in self._actors:
            with suppress(RayError, ValueError):
                ray.kill(actor)


def redirect_output(folder: Path, token: str, name: str) -> str:
    """Append all output of this process to a file in ``folder``, if this node sees the folder. Returns where it goes.

    ``token`` is the first line of a file there, because a folder of the same name may exist on another node.
    """
    own = _output_file()
    try:
        with (folder / EVENTS).open(encoding="utf-8") as file:
            is_same = file.readline().strip() == token
    except OSError:
        is_same = False
    if not is_same:
        return f"{ActorPlace.here().address}:{own or 'logs of Ray'} (this node does not see {folder})"
    path = folder / f"{name}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        if own and os.path.isfile(own):
            with open(own, "rb") as before:
                shutil.copyfileobj(before, file)
        file.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return str(path)


def _output_file() -> str:
    """The file that Ray gave this process for its errors."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""


@dataclass(frozen=True)
class SentError:
    """An error on its way to another process. Its class may take other arguments than its message."""

    kind: type[Exception]
    text: str
    state: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> SentError:
        text = str(error) if isinstance(error, HeadwaterError) else error_text(error)
        is_ours = isinstance(error, HeadwaterError) and type(error).__module__.startswith("headwater.")
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | tuple)}
        return cls(type(error) if is_ours else RuntimeError, text, plain if is_ours else {})

    @property
    def is_ours(self) -> bool:
        """Whether its message is for the user."""
        return issubclass(self.kind, HeadwaterError)

    @property
    def is_other_rank(self) -> bool:
        return issubclass(self.kind, OtherRankFailed)

    def told(self) -> str:
        return self.text or self.kind.__name__

    def again(self) -> Exception:
        error = self.kind.__new__(self.kind, self.text)
        error.args = (self.text,)
        vars(error).update(self.state)
        return error


def death_of(error: BaseException | None) -> str:
    """Why an actor has ended, in one line: Ray's message without ids and general advice."""
    text = " ".join(line.strip() for line in str(error).splitlines() if not line.startswith(("\t", "  ")))
    for advice in ("Some common causes include", "To troubleshoot"):
        text = text.partition(advice)[0]
    for filler in ("The actor died unexpectedly before finishing this task.", "The actor is dead because"):
        text = text.replace(filler, "")
    text = text.strip().rstrip(".") or type(error).__name__
    return text if len(text) <= 600 else f"{text[:600]}..."
