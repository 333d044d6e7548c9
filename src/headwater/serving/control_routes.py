"""Handlers of ``/control`` and of the metrics."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from aiohttp import web

import headwater
from headwater.serving.control import Abort, WeightsCall, read_nothing, read_version
from headwater.serving.memory_tags import read_memory_tags
from headwater.serving.metrics_text import CONTENT_TYPE, metrics_text
from headwater.serving.state import STATE, reply


async def pause(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.read(request, read_nothing)
    await asyncio.to_thread(state.engine.pause)
    return reply({"is_paused": state.engine.is_paused})


async def resume(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.read(request, read_nothing)
    await asyncio.to_thread(state.engine.resume)
    return reply({"is_paused": state.engine.is_paused})


async def abort(request: web.Request) -> web.Response:
    """How many requests of the engine were ended; 0 for a name that is unknown or over."""
    state = request.app[STATE]
    call = await state.read(request, Abort.read)
    if call.request_id is None:
        return reply({"num_aborted": await asyncio.to_thread(state.engine.abort_all)})
    ids = state.active.find(call.request_id)
    return reply({"num_aborted": await asyncio.to_thread(state.engine.abort_each, ids)})


async def sleep(request: web.Request) -> web.Response:
    state = request.app[STATE]
    tags = await state.read(request, read_memory_tags)
    await asyncio.to_thread(state.engine.sleep, tags)
    return reply({"asleep": tags})


async def wake(request: web.Request) -> web.Response:
    state = request.app[STATE]
    tags = await state.read(request, read_memory_tags)
    await asyncio.to_thread(state.engine.wake, tags)
    return reply({"awake": tags})


async def update_weights(request: web.Request) -> web.Response:
    """Answers when the new weights serve."""
    state = request.app[STATE]
    engine = state.engine
    call = await state.read(request, WeightsCall.read)
    started = time.perf_counter()
    if call.file is not None:
        future = await asyncio.to_thread(engine.update_weights_from_file, call.file, call.version, call.mode)
    else:
        assert call.shared_memory is not None
        future = await asyncio.to_thread(
            engine.update_weights_from_shared_memory, call.shared_memory, call.version, call.mode
        )
    # Shielded: a client that leaves must not cancel an update that the engine is in the middle of.
    await asyncio.shield(asyncio.wrap_future(future))
    return reply({"version": engine.get_version(), "seconds": time.perf_counter() - started})


async def get_version(request: web.Request) -> web.Response:
    return reply({"version": request.app[STATE].engine.get_version()})


async def set_version(request: web.Request) -> web.Response:
    state = request.app[STATE]
    version = await state.read(request, read_version)
    await asyncio.to_thread(state.engine.set_version, version)
    return reply({"version": state.engine.get_version()})


async def checksum(request: web.Request) -> web.Response:
    """Of the weights that serve now."""
    engine = request.app[STATE].engine
    return reply({"checksum": await asyncio.to_thread(engine.weights_checksum), "version": engine.get_version()})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    labels = {"model": state.options.served_name, "headwater": headwater.__version__}
    text = metrics_text(asdict(state.engine.metrics()), labels)
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def metrics_json(request: web.Request) -> web.Response:
    return reply(asdict(request.app[STATE].engine.metrics()))


ROUTES = [
    web.post("/control/pause", pause),
    web.post("/control/resume", resume),
    web.post("/control/abort", abort),
    web.post("/control/sleep", sleep),
    web.post("/control/wake", wake),
    web.post("/control/update_weights", update_weights),
    web.get("/control/version", get_version),
    web.post("/control/version", set_version),
    web.get("/control/checksum", checksum),
    web.get("/metrics", metrics),
    web.get("/metrics.json", metrics_json),
]
