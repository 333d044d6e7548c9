"""Handlers of ``/control`` and ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

import headwater
from headwater.core.capabilities import EngineStatus, ServerStatus
from headwater.serving.control import Abort, WeightsCall, in_own_thread, read_nothing, read_version
from headwater.serving.generation import reply
from headwater.serving.state import STATE

PREFIX = "headwater_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = frozenset(
    {
        "num_tokens_generated",
        "num_tokens_prefilled",
        "num_tokens_cached",
        "num_preempted",
        "num_interrupted",
        "num_weight_updates",
        "num_finished",
        "num_aborted",
        "num_failed",
        "num_media_computed",
        "num_media_cached",
        "media_tower_s",
        "media_wait_s",
    }
)
"""Metrics that only increase. All others are gauges."""


async def pause(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.read_control(request, read_nothing)
    await in_own_thread(state.engine.pause)
    return reply({"is_paused": state.engine.status().is_paused})


async def resume(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.read_control(request, read_nothing)
    await in_own_thread(state.engine.resume)
    return reply({"is_paused": state.engine.status().is_paused})


async def abort(request: web.Request) -> web.Response:
    """Reply with the number of engine requests that were ended: 0 if no request with this name is running."""
    state = request.app[STATE]
    call = await state.read_control(request, Abort.read)
    return reply({"num_aborted": await state.abort(call.request_id)})


async def sleep(request: web.Request) -> web.Response:
    return reply({"asleep": await request.app[STATE].sleep(request)})


async def wake(request: web.Request) -> web.Response:
    return reply({"awake": await request.app[STATE].wake(request)})


async def update_weights(request: web.Request) -> web.Response:
    """Reply when the engine serves the new weights."""
    state = request.app[STATE]
    call = await state.read_control(request, WeightsCall.read)
    state.check_update_mode(call.mode, "mode")
    started = time.perf_counter()
    await state.updates.take_file(
        call.version,
        call.mode,
        call.file,
        call.limit_s,
        is_checked=call.is_checked,
        adapters_alone=call.adapters_alone,
    )
    return reply({"version": state.engine.get_version(), "seconds": time.perf_counter() - started})


async def get_version(request: web.Request) -> web.Response:
    return reply({"version": request.app[STATE].engine.get_version()})


async def set_version(request: web.Request) -> web.Response:
    state = request.app[STATE]
    version = await state.read_control(request, read_version)
    await in_own_thread(lambda: state.engine.set_version(version))
    return reply({"version": state.engine.get_version()})


async def checksum(request: web.Request) -> web.Response:
    """Reply with the checksum of the current weights."""
    state = request.app[STATE]
    state.check_checksums()
    value = await in_own_thread(state.engine.weights_checksum)
    return reply({"checksum": value, "version": state.engine.get_version()})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    labels = {"model": state.options.served_name, "headwater": headwater.__version__}
    status = state.engine.status()
    text = metrics_text(metrics_of(status), labels) + server_metrics_text(status.servers)
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def metrics_json(request: web.Request) -> web.Response:
    return reply(metrics_of(request.app[STATE].engine.status()))


def metrics_of(status: EngineStatus) -> dict[str, Any]:
    """The numbers that every engine reports, and the engine's own metrics."""
    return {
        "version": status.version,
        "is_paused": status.is_paused,
        "is_asleep": status.is_asleep,
        "num_waiting": status.num_waiting,
        "num_running": status.num_running,
        "num_restarts": status.num_restarts,
        **status.metrics,
    }


def metrics_text(values: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Prometheus' text format: one metric per number in ``values``, and a metric ``info`` with ``labels``."""
    described = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    lines = [f"# TYPE {PREFIX}info gauge", f"{PREFIX}info{{{described}}} 1"]
    for name, value in values.items():
        if not isinstance(value, int | float):
            continue
        lines.append(f"# TYPE {PREFIX}{name} {'counter' if name in COUNTERS else 'gauge'}")
        lines.append(f"{PREFIX}{name} {int(value) if isinstance(value, bool) else value!r}")
    return "\n".join(lines) + "\n"


def server_metrics_text(servers: Sequence[ServerStatus]) -> str:
    """The servers of a router in Prometheus' text format, with the label ``server``."""
    lines = []
    for name in ("version", "is_alive", "num_running", "num_waiting", "num_restarts") if servers else ():
        lines.append(f"# TYPE {PREFIX}server_{name} gauge")
        lines += [
            f'{PREFIX}server_{name}{{server="{_escape(each.name)}"}} {int(getattr(each, name))}' for each in servers
        ]
    return "".join(f"{line}\n" for line in lines)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
