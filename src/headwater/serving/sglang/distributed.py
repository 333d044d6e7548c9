"""Weights over a process group, as trainers send them to SGLang.

``/init_weights_update_group`` joins a group whose member 0 is the trainer. For ``/update_weights_from_distributed`` the
trainer then broadcasts the named tensors, one after the other. All tensors of the model belong to one call, or to the
calls between ``/begin_weight_update`` and ``/end_weight_update``, which need memory for a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from aiohttp import web

from headwater.core.capabilities import UpdateMode
from headwater.core.errors import HeadwaterError, WeightsError
from headwater.core.protocols import Bucket, InferenceEngine, WeightUpdate
from headwater.models.device import DTYPES
from headwater.serving.control import UPDATE_LIMIT_S, in_own_thread
from headwater.serving.errors import ApiError, api_error, wrong
from headwater.serving.fields import Fields
from headwater.serving.generation import reply
from headwater.serving.sglang.steering import read_weight_version
from headwater.serving.state import STATE
from headwater.serving.weight_stream import INCOMING, read_shape
from headwater.weights.links import BACKENDS, Link, Meeting
from headwater.weights.memory import in_buckets

_GROUP = "weight_update_group"
"""SGLang's default name of a group."""
_JOIN_LIMIT_S = 300.0


@dataclass(frozen=True)
class InitGroup:
    meeting: Meeting
    rank: int
    world_size: int

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> InitGroup:
        fields = Fields(body)
        host, port = fields.text("master_address"), fields.optional_integer("master_port", minimum=1)
        rank, size = fields.optional_integer("rank_offset", minimum=1), fields.optional_integer("world_size", minimum=2)
        name, backend = fields.text("group_name") or _GROUP, fields.choice("backend", BACKENDS) or "nccl"
        fields.done()
        if not host or port is None or rank is None or size is None:
            raise ApiError("master_address, master_port, rank_offset and world_size: give all of them")
        if rank >= size:
            raise wrong("rank_offset", rank, f"must be less than world_size = {size}")
        return cls(Meeting(host, port, name, backend, _JOIN_LIMIT_S, connects_first=False), rank, size)


@dataclass(frozen=True)
class UpdateFromGroup:
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    group: str
    mode: UpdateMode | None
    wanted_version: int | None
    """None increments the current version."""
    version: int = 0
    limit_s: float = UPDATE_LIMIT_S

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> UpdateFromGroup:
        fields = Fields(body)
        names, dtypes, shapes = fields.texts("names"), fields.texts("dtypes"), fields.raw("shapes")
        group, flushes = fields.text("group_name") or _GROUP, fields.flag("flush_cache", True)
        version = read_weight_version(fields.raw("weight_version"))
        fields.neutral("abort_all_requests", [False], "abort requests with /abort_request first")
        fields.neutral("selector", ["all", "target"], "the server has one model, and none that drafts")
        fields.neutral("load_format", ["auto"], "send one tensor after the other")
        fields.ignored("torch_empty_cache")
        fields.done()
        if not isinstance(shapes, list) or not names or not len(names) == len(dtypes) == len(shapes):
            raise ApiError("names, dtypes and shapes: give lists of the same length, with all tensors of the model")
        known = {str(each): each for each in DTYPES.values()} | {**DTYPES}
        for place, name in enumerate(dtypes):
            if name not in known:
                raise wrong(f"dtypes[{place}]", name, f"must be one of {', '.join(DTYPES)}")
        sizes = [read_shape(Fields({f"{place}": shape}, "shapes"), f"{place}") for place, shape in enumerate(shapes)]
        tensors = tuple(zip(names, [known[each] for each in dtypes], sizes, strict=True))
        return cls(tensors, group, "interrupt" if flushes else "in_flight", version)


class TensorReceiver:
    """Receives one tensor after the other on the engine's thread."""

    def __init__(self, link: Link, call: UpdateFromGroup) -> None:
        self._link = link
        self._call = call
        self._is_finished = False

    def update(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, {name: shape for name, _, shape in self._call.tensors}, self._buckets())

    def finish(self) -> None:
        """The number of tensors is known, so there is nothing to do."""

    def fail(self, reason: str) -> None:
        if not self._is_finished:
            self._link.close()

    def _buckets(self) -> Iterator[Bucket]:
        yield from in_buckets(self._tensors())
        self._is_finished = True

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in self._call.tensors:
            tensor = torch.empty(shape, dtype=dtype, device=self._link.device)
            self._link.broadcast(tensor).wait()
            yield name, tensor


@dataclass
class OpenUpdate:
    """What has arrived since ``/begin_weight_update``. The engine takes it at once, so no request sees a part of it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    mode: UpdateMode | None = None
    wanted_version: int | None = None

    def add(self, call: UpdateFromGroup, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors.update(tensors)
        self.mode = call.mode
        self.wanted_version = call.wanted_version if call.wanted_version is not None else self.wanted_version

    def finish(self) -> None:
        """All tensors are here already."""

    def fail(self, reason: str) -> None:
        """Nothing has to be ended."""


GROUPS: web.AppKey[dict[str, Link]] = web.AppKey("sglang_weight_groups", dict)
OPEN: web.AppKey[list[OpenUpdate]] = web.AppKey("sglang_open_update", list)
"""One, or none."""


async def init_weights_update_group(request: web.Request) -> web.Response:
    state, groups = request.app[STATE], request.app[GROUPS]
    call = await state.read_control(request, InitGroup.read)
    request.app[OPEN].clear()  # of a trainer that has died: the tensors of the next one would be added to it
    if (before := groups.pop(call.meeting.name, None)) is not None:
        before.close()
    try:
        connect = partial(Link.connect, call.meeting, call.rank, call.world_size, state.options.gpu)
        groups[call.meeting.name] = await in_own_thread(connect)
    except HeadwaterError as error:
        return reply({"success": False, "message": str(error)}, status=api_error(error).status)
    return reply({"success": True, "message": "Succeeded to initialize custom process group."})


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    def read(body: Mapping[str, Any]) -> str:
        fields = Fields(body)
        name = fields.text("group_name") or _GROUP
        fields.done()
        return name

    name = await request.app[STATE].read_control(request, read)
    if (link := request.app[GROUPS].pop(name, None)) is None:
        return reply({"success": False, "message": f"there is no group {name}"}, status=400)
    link.close()
    request.app[OPEN].clear()  # the tensors of an update that broke
    return reply({"success": True, "message": "Succeeded to destroy custom process group."})


def _begin(call: UpdateFromGroup, link: Link, engine: InferenceEngine) -> tuple[TensorReceiver, Future[None]]:
    receiver = TensorReceiver(link, call)
    return receiver, engine.update_weights(receiver.update(call.version), call.mode)


def _receive(call: UpdateFromGroup, link: Link) -> dict[str, torch.Tensor]:
    receiver = TensorReceiver(link, call)
    return {name: tensor for bucket in receiver.update(0).buckets for name, tensor in bucket}


def _begin_opened(opened: OpenUpdate, version: int, engine: InferenceEngine) -> tuple[OpenUpdate, Future[None]]:
    return opened, engine.update_weights(WeightUpdate.of(version, opened.tensors.items()), opened.mode)


def _read_begin(body: Mapping[str, Any]) -> None:
    fields = Fields(body)
    fields.neutral("selector", ["all", "target"], "the server has one model, and none that drafts")
    fields.done()


async def begin_weight_update(request: web.Request) -> web.Response:
    opened = request.app[OPEN]
    await request.app[STATE].read_control(request, _read_begin)
    if opened:
        return reply({"success": False, "message": "an update is open; call /end_weight_update first"}, status=400)
    opened.append(OpenUpdate())
    return reply({"success": True, "message": "Success"})


async def end_weight_update(request: web.Request) -> web.Response:
    """Reply when the engine uses the weights that have arrived."""
    state, incoming = request.app[STATE], request.app[INCOMING]
    await state.read_control(request, lambda body: Fields(body).done())
    if not request.app[OPEN]:
        return reply({"success": False, "message": "no update is open; call /begin_weight_update first"}, status=400)
    opened = request.app[OPEN].pop()
    if not opened.tensors:
        return reply({"success": True, "message": "Success"})
    version = state.engine.get_version() + 1 if opened.wanted_version is None else opened.wanted_version
    call = UpdateFromGroup((), "", opened.mode, opened.wanted_version, version)
    try:
        source = "the tensors since /begin_weight_update"
        await incoming.start(call, source, partial(_begin_opened, opened, version, state.engine), state)
        await incoming.finish()
    except HeadwaterError as error:
        refusal = api_error(error)
        return reply({"success": False, "message": str(refusal)}, status=refusal.status)
    return reply({"success": True, "message": f"Success. Weight version is {version}."})


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Reply when the engine uses the weights, which the trainer broadcasts after it has sent this call. In an update
    that was begun before, reply when they have arrived."""
    state, incoming = request.app[STATE], request.app[INCOMING]
    call = await state.read_control(request, UpdateFromGroup.read)
    state.check_update_mode(call.mode, "flush_cache")
    version = state.engine.get_version() + 1 if call.wanted_version is None else call.wanted_version
    call = replace(call, version=version)
    link = request.app[GROUPS].get(call.group)
    try:
        if link is None:
            raise WeightsError(f"there is no group {call.group}; call /init_weights_update_group first")
        if request.app[OPEN]:
            request.app[OPEN][0].add(call, await in_own_thread(partial(_receive, call, link)))
            return reply({"success": True, "message": "Succeeded to receive the tensors."})
        await incoming.start(call, f"the group {call.group}", partial(_begin, call, link, state.engine), state)
        await incoming.finish()
    except HeadwaterError as error:
        refusal = api_error(error)
        return reply({"success": False, "message": str(refusal)}, status=refusal.status)
    return reply({"success": True, "message": f"Succeeded to update parameter online. Weight version is {version}."})


ROUTES = [
    web.post("/init_weights_update_group", init_weights_update_group),
    web.post("/destroy_weights_update_group", destroy_weights_update_group),
    web.post("/begin_weight_update", begin_weight_update),
    web.post("/update_weights_from_distributed", update_weights_from_distributed),
    web.post("/end_weight_update", end_weight_update),
]
