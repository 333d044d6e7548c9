"""Handlers of SGLang's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from aiohttp import web

import headwater
from headwater.core.errors import HeadwaterError
from headwater.core.protocols import InferenceEngine
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.serving.control import in_own_thread
from headwater.serving.control_routes import metrics_of
from headwater.serving.errors import ApiError, api_error
from headwater.serving.generation import generate_all, reply, send_events, stream_all
from headwater.serving.output import PieceMaker, whole
from headwater.serving.sglang.generate import GenerateCall, GenerateReply, read_generate
from headwater.serving.sglang.steering import AbortCall, PauseCall, UpdateFromDisk, read_continue
from headwater.serving.state import STATE, ServerState

HEALTH_TIMEOUT_S = 20.0
"""How long ``/health_generate`` waits for one token. SGLang uses the same limit."""


async def generate(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    call = await state.read(request, lambda body: _read(body, state))
    with state.active.hold(call.names, "rid"):
        if call.stream:
            return await send_events(request, _events(state, call))
        responses = await generate_all(state.engine, call.requests)

    def build() -> list[Any] | dict[str, Any]:
        bodies = []
        for sample, response in zip(call.samples, responses, strict=True):
            gathered = GenerateReply(sample, state.tokenizer)
            gathered.add(whole(response, state.tokenizer, sample.rules))
            latency = response.queue_s + response.generate_s
            bodies.append(gathered.body(state.engine.get_version(), e2e_latency=latency))
        return bodies if call.is_list else bodies[0]

    return await state.write(build, sum(len(response.output_tokens) for response in responses))


def _read(body: Mapping[str, Any], state: ServerState) -> GenerateCall:
    call = read_generate(body, state.limits)
    for each in call.requests:
        state.check_features(each)
        state.engine.check(each)
    return call


async def _events(state: ServerState, call: GenerateCall) -> AsyncGenerator[dict[str, Any], None]:
    tokenizer = state.tokenizer
    makers = [PieceMaker(tokenizer, sample.rules) for sample in call.samples]
    gathered = [GenerateReply(sample, tokenizer) for sample in call.samples]
    async with aclosing(stream_all(state.engine, call.requests)) as deltas:
        async for place, delta in deltas:
            gathered[place].add(makers[place].piece(delta.tokens, delta.logprobs, delta.versions, delta.stop_reason))
            body = gathered[place].body(state.engine.get_version())
            yield {**body, "index": place} if call.is_list else body


async def abort_request(request: web.Request) -> web.Response:
    state = request.app[STATE]
    call = await state.read_control(request, AbortCall.read)
    await state.abort(call.rid)
    return reply({"success": True})


async def pause_generation(request: web.Request) -> web.Response:
    state = request.app[STATE]
    call = await state.read_control(request, PauseCall.read)
    await in_own_thread(state.engine.pause)
    if call.mode == "abort":
        await state.abort(None)
    return reply({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    state = request.app[STATE]
    await state.read_control(request, read_continue)
    await in_own_thread(state.engine.resume)
    return reply({"message": "Generation continued successfully.", "status": "ok"})


async def update_weights_from_disk(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.engine
    call = await state.read_control(request, UpdateFromDisk.read)
    state.check_update_mode(call.mode, "flush_cache")
    if call.keep_pause:
        await in_own_thread(engine.pause)
    if call.abort_all:
        await state.abort(None)
    try:
        version = await state.updates.take_file(call.version, call.mode, call.model_path)
    except HeadwaterError as error:
        # SGLang has a separate format for a failed update.
        refusal = api_error(error)
        return reply({"success": False, "message": str(refusal), "num_paused_requests": 0}, status=refusal.status)
    message = f"Succeeded to update model weights. Weight version updated to {version}."
    return reply({"success": True, "message": message, "num_paused_requests": 0})


async def release_memory_occupation(request: web.Request) -> web.Response:
    await request.app[STATE].sleep(request)
    return reply({"success": True})


async def resume_memory_occupation(request: web.Request) -> web.Response:
    await request.app[STATE].wake(request)
    return reply({"success": True})


async def flush_cache(request: web.Request) -> web.Response:
    """Forget cached prompts, which only an idle engine can do."""
    state = request.app[STATE]
    status = state.engine.status()
    if status.num_running or status.num_waiting:
        raise ApiError(
            f"the cache is not flushed: {status.num_running} requests are running and {status.num_waiting} waiting; "
            "call it when they have ended",
            code="busy",
        )
    if "kv_cache" in state.engine.capabilities.memory_tags and not status.is_asleep:
        await in_own_thread(lambda: _forget(state.engine))
    return web.Response(text="Cache flushed.\n")


def _forget(engine: InferenceEngine) -> None:
    """The cache is empty after its memory was released. An engine without such a cache keeps nothing."""
    engine.sleep(("kv_cache",))
    engine.wake(("kv_cache",))


async def health(request: web.Request) -> web.Response:
    if not request.app[STATE].engine.status().is_alive:
        raise ApiError("the engine has stopped; restart the server", status=503, code="unhealthy")
    return reply({"status": "ok"})


async def health_generate(request: web.Request) -> web.Response:
    """Check that the engine generates a token in time."""
    engine = request.app[STATE].engine
    status = engine.status()
    if status.is_asleep:
        raise ApiError("the engine is asleep; POST /control/wake", status=503, code="asleep")
    if status.is_paused:
        raise ApiError("the engine is paused; POST /control/resume", status=503, code="paused")
    if status.needs_weights and not any(each.state == "serving" for each in status.servers):
        raise ApiError("the engine waits for weights; POST /control/update_weights", status=503, code="needs_weights")
    probe = ModelRequest("health", (0,), SamplingParams(max_new_tokens=1, temperature=0.0), rng_key=0)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await engine.agenerate(probe)
    except TimeoutError as error:
        raise ApiError(f"no token within {HEALTH_TIMEOUT_S:g} s", status=503, code="unhealthy") from error
    return reply({"status": "ok"})


async def model_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    path = state.options.model_path or state.options.served_name
    return reply(
        {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(state.engine.get_version()),
        }
    )


async def server_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    status, limits = state.engine.status(), state.engine.limits
    return reply(
        {
            "model_path": state.options.model_path or state.options.served_name,
            "served_model_name": state.options.served_name,
            "context_length": limits.max_model_tokens,
            "max_request_tokens": limits.max_request_tokens,
            "vocab_size": limits.vocab_size,
            "max_queue": limits.max_queue,
            "max_body_bytes": state.options.max_body_bytes,
            "weight_version": str(status.version),
            **status.settings,
            "capabilities": asdict(state.engine.capabilities),
            "internal_states": [metrics_of(status)],
            "version": headwater.__version__,
            "instance": state.instance,
        }
    )


ROUTES = [
    web.post("/generate", generate),
    web.put("/generate", generate),
    web.post("/abort_request", abort_request),
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
    web.post("/update_weights_from_disk", update_weights_from_disk),
    web.post("/flush_cache", flush_cache),
    web.get("/flush_cache", flush_cache),
    web.post("/release_memory_occupation", release_memory_occupation),
    web.post("/resume_memory_occupation", resume_memory_occupation),
    web.get("/health", health),
    web.get("/health_generate", health_generate),
    web.get("/get_model_info", model_info),
    web.get("/model_info", model_info),
    web.get("/get_server_info", server_info),
    web.get("/server_info", server_info),
]
