"""Weights straight from the ranks of a learner (``weights.collective``).

``/control/join_weight_group`` connects the engine with all ranks, for this update and later ones.
``/control/start_weight_broadcast`` announces the tensors. It is refused if they do not fit the model, and answers when
the engine has stopped generating and waits for weights, so that the ranks send only then.
``/control/finish_weight_update`` answers when the new weights are in use, or ends an update that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from aiohttp import web

from headwater.core.capabilities import ALL_UPDATE_MODES, UpdateMode
from headwater.core.errors import WeightsError
from headwater.core.parcels import BUCKET_BYTES, LIMIT_S, Encoding, Parcel, SendOrder
from headwater.core.protocols import InferenceEngine
from headwater.models.device import DTYPES
from headwater.serving.control import UPDATE_LIMIT_S, in_own_thread
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.serving.generation import reply
from headwater.serving.state import STATE
from headwater.serving.weight_stream import INCOMING, read_shape
from headwater.weights.links import BACKENDS
from headwater.weights.pieces import GroupMember, PieceReceiver

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
_MAX_MEMBERS = 65536
_MAX_LIMIT_S = 3600.0


def read_order(fields: Fields) -> SendOrder:
    group, host, port = fields.text("group"), fields.text("host"), fields.optional_integer("port", minimum=1)
    num_receivers = fields.optional_integer("num_receivers", minimum=1, maximum=_MAX_MEMBERS)
    dtype = fields.choice("dtype", tuple(DTYPES))
    backend = fields.choice("backend", BACKENDS) or BACKENDS[0]
    bucket_bytes = fields.integer("bucket_bytes", BUCKET_BYTES, minimum=1)
    limit_s = fields.number("limit_s", LIMIT_S, minimum=0.1, maximum=_MAX_LIMIT_S)
    encoding: Encoding = fields.choice("encoding", ENCODINGS) or "plain"
    extra_connect_s = fields.number("extra_connect_s", 0.0, minimum=0)
    if not group or not host or port is None or num_receivers is None or dtype is None:
        raise ApiError("group, host, port, num_receivers and dtype: give all of them")
    return SendOrder(group, host, port, num_receivers, dtype, backend, bucket_bytes, limit_s, encoding, extra_connect_s)


@dataclass(frozen=True)
class JoinCall:
    order: SendOrder
    number: int
    """The engine's number in the group, from 1."""
    num_senders: int

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> JoinCall:
        fields = Fields(body)
        order = read_order(fields)
        number = fields.optional_integer("number", minimum=1, maximum=order.num_receivers)
        num_senders = fields.integer("num_senders", 1, minimum=1, maximum=_MAX_MEMBERS)
        fields.done()
        if number is None:
            raise ApiError("number: give the engine's number in the group, from 1", param="number")
        return cls(order, number, num_senders)


@dataclass(frozen=True)
class BroadcastCall:
    version: int
    mode: UpdateMode | None
    """None uses the engine's own setting."""
    parcels: tuple[Parcel, ...]
    order: SendOrder
    limit_s: float = UPDATE_LIMIT_S
    """How long one call of this update may take. Running responses may have to end first."""
    adapters_alone: bool = False
    """Only the LoRA adapters are sent."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> BroadcastCall:
        fields = Fields(body)
        version, mode = fields.optional_integer("version", minimum=0), fields.choice("mode", ALL_UPDATE_MODES)
        tensors, order = fields.raw("tensors"), fields.mapping("order")
        limit_s = fields.number("limit_s", UPDATE_LIMIT_S, minimum=1)
        adapters_alone = fields.flag("adapters_alone", False)
        fields.done()
        if version is None or order is None or not isinstance(tensors, list) or not tensors:
            raise ApiError("version, tensors and order: give all of them")
        of_order = Fields(order, "order")
        read = read_order(of_order)
        of_order.done()
        parcels = tuple(_read_parcel(each, place) for place, each in enumerate(tensors))
        return cls(version, mode, parcels, read, limit_s, adapters_alone)


def _read_parcel(value: Any, place: int) -> Parcel:
    if not isinstance(value, dict):
        raise wrong(f"tensors[{place}]", value, "must be an object")
    fields = Fields(value, f"tensors[{place}]")
    name, shape, starts = fields.text("name"), read_shape(fields, "shape"), fields.integers("starts")
    fields.done()
    try:
        return Parcel(name or "", shape, starts)
    except ValueError as error:
        raise ApiError(f"tensors[{place}]: {error}", param=f"tensors[{place}]") from error


class Membership:
    """The group that the engine belongs to, if it does. A new one replaces the one before."""

    def __init__(self) -> None:
        self._member: GroupMember | None = None
        self._joining = asyncio.Lock()

    async def join(self, call: JoinCall, gpu: str) -> None:
        async with self._joining:
            self.leave()
            join = partial(GroupMember.join, call.order, call.number, call.num_senders, gpu)
            self._member = await in_own_thread(join)

    def member(self, group: str) -> GroupMember:
        if self._member is None or self._member.group != group:
            raise WeightsError(
                f"weights: this engine is not a member of {group}; call /control/join_weight_group first"
            )
        return self._member

    def leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


MEMBERSHIP = web.AppKey("weight_group", Membership)


def _begin(call: BroadcastCall, member: GroupMember, engine: InferenceEngine) -> tuple[PieceReceiver, Future[None]]:
    receiver = PieceReceiver(member, call.parcels, call.order)
    update = replace(receiver.update(call.version), adapters_alone=call.adapters_alone)
    return receiver, engine.update_weights(update, call.mode)


async def join_weight_group(request: web.Request) -> web.Response:
    state = request.app[STATE]
    call = await state.read_control(request, JoinCall.read)
    await request.app[MEMBERSHIP].join(call, state.options.gpu)
    return reply({"group": call.order.group})


async def start_weight_broadcast(request: web.Request) -> web.Response:
    state, incoming = request.app[STATE], request.app[INCOMING]
    call = await state.read_control(request, BroadcastCall.read)
    member = request.app[MEMBERSHIP].member(call.order.group)
    await incoming.start(call, "the learner's ranks", partial(_begin, call, member, state.engine), state)
    receiver = incoming.receiver
    if isinstance(receiver, PieceReceiver):
        await incoming.until(receiver.is_ready)
    return reply({"version": call.version})


ROUTES = [
    web.post("/control/join_weight_group", join_weight_group),
    web.post("/control/start_weight_broadcast", start_weight_broadcast),
]
