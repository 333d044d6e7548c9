"""Weights from another process on this machine, streamed through shared memory (``weights.shared_memory``).

``/control/start_weight_update`` announces names and shapes and is refused if they do not fit the model.
``/control/update_weight_slot`` hands over one filled slot and answers when it may be filled again.
``/control/finish_weight_update`` answers when the new weights are in use, or ends a stream that failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from aiohttp import web

from headwater.core.capabilities import ALL_UPDATE_MODES, UpdateMode
from headwater.core.errors import WaitTimeout, WeightsError
from headwater.core.protocols import InferenceEngine
from headwater.core.waits import named_wait
from headwater.models.device import DTYPES
from headwater.serving.control import UPDATE_LIMIT_S, in_own_thread
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.serving.generation import reply
from headwater.serving.state import STATE, ServerState
from headwater.weights.cuda_ipc import map_memory
from headwater.weights.shared_memory import SlotEntry, SlotReceiver

_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class StartCall:
    version: int
    mode: UpdateMode | None
    """None uses the engine's own setting."""
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    shared_memory: str
    slot_bytes: int
    limit_s: float = UPDATE_LIMIT_S
    """How long one call of this update may take. Running responses may have to end first."""
    adapters_alone: bool = False
    """Only the LoRA adapters are sent."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> StartCall:
        fields = Fields(body)
        version, mode = fields.optional_integer("version", minimum=0), fields.choice("mode", ALL_UPDATE_MODES)
        shapes, dtype = fields.mapping("shapes"), fields.choice("dtype", tuple(DTYPES))
        name, slot_bytes = fields.text("shared_memory"), fields.optional_integer("slot_bytes", minimum=1)
        limit_s = fields.number("limit_s", UPDATE_LIMIT_S, minimum=1)
        adapters_alone = fields.flag("adapters_alone", False)
        fields.done()
        if version is None or not shapes or dtype is None or not name or slot_bytes is None:
            raise ApiError("version, shapes, dtype, shared_memory and slot_bytes: give all of them")
        read = Fields(shapes, "shapes", most=len(shapes))
        sizes = {each: read_shape(read, each) for each in shapes}
        return cls(version, mode, sizes, DTYPES[dtype], name, slot_bytes, limit_s, adapters_alone)


@dataclass(frozen=True)
class SlotCall:
    slot: int
    tensors: tuple[SlotEntry, ...]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> SlotCall:
        fields = Fields(body)
        slot, tensors = fields.optional_integer("slot", minimum=0), fields.raw("tensors")
        fields.done()
        if slot is None or not isinstance(tensors, list):
            raise ApiError('a slot is {"slot": 0, "tensors": [{"name": "w", "shape": [2], "offset": 0}]}')
        return cls(slot, tuple(_read_entry(each, place) for place, each in enumerate(tensors)))


def _read_entry(value: Any, place: int) -> SlotEntry:
    if not isinstance(value, dict):
        raise wrong(f"tensors[{place}]", value, "must be an object")
    fields = Fields(value, f"tensors[{place}]")
    name, shape, offset = fields.text("name"), read_shape(fields, "shape"), fields.integer("offset", 0, minimum=0)
    fields.done()
    return SlotEntry(name or "", shape, offset)


def read_shape(fields: Fields, field: str) -> tuple[int, ...]:
    """A shape whose number of elements can be computed quickly."""
    shape = fields.integers(field)
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < 2**48 for size in shape):
        raise wrong(
            fields.name(field), list(shape), f"must be at most {_MAX_DIMENSIONS} numbers, each from 0 to 2**48 - 1"
        )
    return shape


def read_finish(body: Mapping[str, Any]) -> str | None:
    """Why the sender gave up; ``None`` if it sent everything."""
    fields = Fields(body)
    error = fields.text("error")
    fields.done()
    return error


class Incoming(Protocol):
    """The receiving end of a transport, for one update."""

    def finish(self) -> None: ...
    def fail(self, reason: str) -> None: ...


class UpdateCall(Protocol):
    """What every call that starts an update says."""

    @property
    def version(self) -> int: ...
    @property
    def mode(self) -> UpdateMode | None: ...
    @property
    def limit_s(self) -> float: ...


class IncomingWeights:
    """The update that is in progress, if there is one. A new one ends the one before it."""

    def __init__(self) -> None:
        self.receiver: Incoming | None = None
        """What receives the present update, or has received the last one."""
        self._done: Future[None] | None = None
        self._limit_s = UPDATE_LIMIT_S
        self._starting = asyncio.Lock()
        self._describe: Callable[[], str] = str
        self.started = 0.0

    async def start(
        self, update: UpdateCall, source: str, begin: Callable[[], tuple[Incoming, Future[None]]], state: ServerState
    ) -> None:
        """``begin`` makes the receiver and gives the update to the engine. It may block."""
        # One at a time: two that start together would both be given to the engine, and one would get no weights.
        async with self._starting:
            self.fail("another weight update began")
            self.started = time.perf_counter()
            receiver, done = await in_own_thread(begin)
            if done.done():
                done.result()  # refused
            self.receiver, self._done, self._limit_s = receiver, done, update.limit_s
            state.updates.started(done, update.version)
            self._describe = state.updates.describe(update.version, source, update.mode)

    async def put(self, call: SlotCall) -> None:
        receiver, done = self._in_progress()
        if not isinstance(receiver, SlotReceiver):
            raise WeightsError("the weight update in progress does not use shared memory")
        await self._first(receiver.put(call.slot, call.tensors), done)

    async def until(self, reached: Future[None]) -> None:
        """Wait until the update has reached a point, or has failed."""
        _, done = self._in_progress()
        await self._first(reached, done)

    async def _first(self, reached: Future[None], done: Future[None]) -> None:
        # Shielded by ``wait``: a client that leaves must not cancel an update that the engine is in the middle of.
        copied, ended = asyncio.wrap_future(reached), asyncio.wrap_future(done)
        # It fails with the update, whose error is raised here. Without this, asyncio would report it as never read.
        copied.add_done_callback(lambda each: each.cancelled() or each.exception())
        await self._wait(asyncio.wait({copied, ended}, return_when=asyncio.FIRST_COMPLETED))
        if ended.done():
            ended.result()
        await asyncio.shield(copied)

    async def finish(self) -> None:
        receiver, done = self._in_progress()
        receiver.finish()
        self._done = None
        ended: asyncio.Future[None] = asyncio.wrap_future(done)
        await self._wait(asyncio.shield(ended))

    async def abandon(self, reason: str) -> None:
        receiver, done = self._in_progress()
        receiver.fail(reason)
        self._done = None
        await self._wait(asyncio.wait({asyncio.wrap_future(done)}))

    async def _wait(self, ended: Awaitable[object]) -> None:
        """Wait for the engine. An update that takes too long ends."""
        try:
            await named_wait(ended, self._describe, kind="weights", hard_limit_s=self._limit_s)
        except WaitTimeout as error:
            self.fail(str(error))
            raise

    def fail(self, reason: str) -> None:
        """End the update, if there is one. Otherwise the engine's thread would wait for a sender that may be gone."""
        if self.receiver is not None:
            self.receiver.fail(reason)

    def _in_progress(self) -> tuple[Incoming, Future[None]]:
        if self.receiver is None or self._done is None:
            raise WeightsError("no weight update is in progress; call /control/start_weight_update first")
        return self.receiver, self._done


def _begin(
    call: StartCall, engine: InferenceEngine, previous: SlotReceiver | None
) -> tuple[SlotReceiver, Future[None]]:
    """Map the shared memory, which may take long for a GPU, and give the update to the engine."""
    name, size = call.shared_memory, call.slot_bytes
    receiver = SlotReceiver(name, size, call.dtype, previous=previous, map_memory=map_memory)
    update = replace(receiver.update(call.version, call.shapes), adapters_alone=call.adapters_alone)
    return receiver, engine.update_weights(update, call.mode)


INCOMING = web.AppKey("incoming_weights", IncomingWeights)


async def start_weight_update(request: web.Request) -> web.Response:
    state = request.app[STATE]
    call = await state.read_control(request, StartCall.read)
    incoming = request.app[INCOMING]
    previous = incoming.receiver if isinstance(incoming.receiver, SlotReceiver) else None
    await incoming.start(call, "shared memory", partial(_begin, call, state.engine, previous), state)
    return reply({"version": call.version})


async def update_weight_slot(request: web.Request) -> web.Response:
    call = await request.app[STATE].read_control(request, SlotCall.read)
    await request.app[INCOMING].put(call)
    return reply({"slot": call.slot})


async def finish_weight_update(request: web.Request) -> web.Response:
    state, incoming = request.app[STATE], request.app[INCOMING]
    error = await state.read_control(request, read_finish)
    if error is None:
        await incoming.finish()
    else:
        await incoming.abandon(error)
    status = state.engine.status()
    seconds = time.perf_counter() - incoming.started
    pause_s = status.metrics.get("last_update_pause_s", 0.0)
    return reply(
        {"version": status.version, "needs_weights": status.needs_weights, "seconds": seconds, "pause_s": pause_s}
    )


ROUTES = [
    web.post("/control/start_weight_update", start_weight_update),
    web.post("/control/update_weight_slot", update_weight_slot),
    web.post("/control/finish_weight_update", finish_weight_update),
]
