"""Bodies of Headwater's control calls, and the weight update that they and SGLang's calls start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args

from headwater.core.capabilities import ALL_TAGS, MemoryTag, UpdateMode
from headwater.core.errors import WaitTimeout
from headwater.core.protocols import InferenceEngine
from headwater.core.waits import named_wait, start_in_thread, wait_for_future
from headwater.models.checksum import dtype_of_checksum
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.weights.file import file_update

T = TypeVar("T")

_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
UPDATE_LIMIT_S = 600.0
"""How long an engine may take to accept new weights, unless the call gives another limit."""


def read_nothing(body: Mapping[str, Any]) -> None:
    Fields(body).done()


def read_memory_tags(body: Mapping[str, Any]) -> tuple[MemoryTag, ...]:
    """The body of calls about the engine's memory: ``{"tags": ["kv_cache"]}``. The default is all tags."""
    fields = Fields(body)
    names = fields.texts("tags")
    fields.done()
    for place, name in enumerate(names):
        if name not in ALL_TAGS:
            raise wrong(f"tags[{place}]", name, f"must be one of {', '.join(ALL_TAGS)}")
    return tuple(tag for tag in ALL_TAGS if tag in names) if names else ALL_TAGS


def read_version(body: Mapping[str, Any]) -> int:
    fields = Fields(body)
    version = _needed_version(fields)
    fields.done()
    return version


@dataclass(frozen=True)
class Abort:
    request_id: str | None
    """None aborts all requests."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Abort:
        fields = Fields(body)
        request_id, everything = fields.text("request_id"), fields.flag("all", False)
        fields.done()
        if (request_id is None) == (not everything):
            raise ApiError("request_id: name one request, or set all = true", param="request_id")
        return cls(request_id)


@dataclass(frozen=True)
class WeightsCall:
    """New weights from a file or folder."""

    version: int
    mode: UpdateMode | None
    """None uses the engine's own setting."""
    file: str
    limit_s: float = UPDATE_LIMIT_S
    is_checked: bool = False
    """The client has checked the values, so the file is read only once."""
    adapters_alone: bool = False
    """The file holds only LoRA adapters."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> WeightsCall:
        fields = Fields(body)
        version, mode, given = _needed_version(fields), fields.choice("mode", _MODES), fields.mapping("source")
        limit_s = fields.number("limit_s", UPDATE_LIMIT_S, minimum=1)
        fields.done()
        source = Fields(given or {}, "source")
        file, is_checked = source.text("file"), source.flag("is_checked", False)
        adapters_alone = source.flag("adapters_alone", False)
        source.done()
        if not file:
            raise ApiError('source: is missing; give {"file": path}, a safetensors file or a folder', param="source")
        return cls(version, mode, file, limit_s, is_checked, adapters_alone)


async def in_own_thread(work: Callable[[], T]) -> T:
    """Run a call that may block, such as one to the engine, in a separate thread.

    Calls that block hold up no others, as they would in a pool of threads, and the process can end while they do. A
    client that disconnects does not end its call.
    """
    return await asyncio.wrap_future(start_in_thread(work, "headwater-control"))


class WeightUpdates:
    """Weight updates from files, one after the other, and the versions of all updates that are in progress.

    Updates that run at the same time would be used in the order in which their files were checked, and those without a
    version would get the same one.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._versions: dict[Future[None], int] = {}
        """The versions of the updates that are in progress, including those streamed through shared memory."""

    def started(self, done: Future[None], version: int) -> None:
        """An update to ``version`` is in progress until ``done``."""
        self._versions[done] = version
        done.add_done_callback(lambda each: self._versions.pop(each, None))

    async def take_file(
        self,
        version: int | None,
        mode: UpdateMode | None,
        file: str,
        limit_s: float = UPDATE_LIMIT_S,
        *,
        is_checked: bool = False,
        adapters_alone: bool = False,
    ) -> int:
        """Have the engine take the weights of a file or folder; return their version when it uses them.

        Generation continues while the file is checked, unless ``is_checked``. ``version`` None is one more than that of
        every other update.
        """
        began = time.monotonic()
        await self._turn(file, limit_s)
        source = partial(file_update, file, is_checked=is_checked, adapters_alone=adapters_alone)
        taken = version if version is not None else self._next_version()
        left_s = max(1.0, limit_s - (time.monotonic() - began))
        done = asyncio.ensure_future(in_own_thread(lambda: self._take(taken, mode, source, left_s)))
        done.add_done_callback(lambda _: self._idle.set())
        # Shielded, so that a client that disconnects does not cancel an update that has begun.
        await asyncio.shield(done)
        return taken

    def _next_version(self) -> int:
        return max([self._engine.get_version(), *list(self._versions.values())]) + 1

    async def _turn(self, file: str, limit_s: float) -> None:
        """Wait until no other file is being taken. The caller's turn begins when this returns."""
        what = f"the weights of {file} wait until an earlier weight update has ended"
        while not self._idle.is_set():
            await named_wait(self._idle.wait(), lambda: what, kind="weights", hard_limit_s=limit_s)
        self._idle.clear()

    def _take(self, version: int, mode: UpdateMode | None, source: partial[Any], limit_s: float) -> None:
        dtype, file = dtype_of_checksum(self._engine.capabilities.dtype), str(source.args[0])
        with source(version, dtype) as stream:
            done = self._engine.update_weights(stream, mode)
            self.started(done, version)
            try:
                wait_for_future(done, self.describe(version, file, mode), kind="weights", hard_limit_s=limit_s)
            except WaitTimeout:
                if not done.cancel() and done.done():
                    return done.result()  # it finished at the last moment
                raise

    def describe(self, version: int, source: str, mode: UpdateMode | None) -> Callable[[], str]:
        """What a caller waits for until the engine uses the weights of ``source``."""

        def describe() -> str:
            status = self._engine.status()
            chosen = mode or status.settings.get("update_mode", "the engine's update mode")
            why = "the engine is asleep" if status.is_asleep else f"{status.num_running} responses are running"
            return (
                f"{chosen}: the engine takes version {version} from {source}; {why}, and drain waits until they have "
                "ended; limit_s (in a training run rollout.timeout_s) allows more time"
            )

        return describe


def _needed_version(fields: Fields) -> int:
    version = fields.optional_integer("version", minimum=0)
    if version is None:
        raise ApiError("version: is missing; give the policy version, a whole number", param="version")
    return version
