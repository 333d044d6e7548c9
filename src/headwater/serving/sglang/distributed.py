"""Weights over a process group, as trainers send them to SGLang.

``/init_weights_update_group`` joins a group whose member 0 is the trainer. For ``/update_weights_from_distributed`` the
trainer then broadcasts the named tensors, one after the other. All tensors of the model belong to one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
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
        return cls(Meeting(host, port, name, backend, _JOIN_LIMIT_S), rank, size)


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
        fields.ignored("load_format")
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


GROUPS: web.AppKey[dict[str, Link]] = web.AppKey("sglang_weight_groups", dict)


async def init_weights_update_group(request: web.Request) -> web.Response:
    call = await request.app[STATE].read_control(request, InitGroup.read)
    groups = request.app[GROUPS]
    if (before := groups.pop(call.meeting.name, None)) is not None:
        before.close()
    try:
        groups[call.meeting.name] = await in_own_thread(partial(Link.connect, call.meeting, call.rank, call.world_size))
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
    return reply({"success": True, "message": "Succeeded to destroy custom process group."})


def _begin(call: UpdateFromGroup, link: Link, engine: InferenceEngine) -> tuple[TensorReceiver, Future[None]]:
    receiver = TensorReceiver(link, call)
    return receiver, engine.update_weights(receiver.update(call.version), call.mode)


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Reply when the engine uses the weights, which the trainer broadcasts after it has sent this call."""
    state, incoming = request.app[STATE], request.app[INCOMING]
    call = await state.read_control(request, UpdateFromGroup.read)
    state.check_update_mode(call.mode, "flush_cache")
    version = state.engine.get_version() + 1 if call.wanted_version is None else call.wanted_version
    call = replace(call, version=version)
    link = request.app[GROUPS].get(call.group)
    try:
        if link is None:
            raise WeightsError(f"there is no group {call.group}; call /init_weights_update_group first")
        await incoming.start(call, f"the group {call.group}", partial(_begin, call, link, state.engine), state)
        await incoming.finish()
    except HeadwaterError as error:
        refusal = api_error(error)
        return reply({"success": False, "message": str(refusal)}, status=refusal.status)
    return reply({"success": True, "message": f"Succeeded to update parameter online. Weight version is {version}."})


ROUTES = [
    web.post("/init_weights_update_group", init_weights_update_group),
    web.post("/destroy_weights_update_group", destroy_weights_update_group),
    web.post("/update_weights_from_distributed", update_weights_from_distributed),
]
