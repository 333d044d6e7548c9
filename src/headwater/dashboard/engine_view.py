"""What generates rollouts: that of a run, now and over its steps, and running servers (``--server URL``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from headwater.dashboard.plain_values import finite, jsonable
from headwater.dashboard.runs import Run
from headwater.dashboard.series import sampled
from headwater.observe.doctor import Diagnosis

CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Requests",
        "unit": "running and waiting",
        "keys": ["engine/running_mean", "engine/running_max", "engine/waiting_mean", "engine/waiting_max"],
        "format": "number",
    },
    {
        "title": "KV cache in use",
        "unit": "share",
        "keys": ["engine/kv_used_mean", "engine/kv_used_max"],
        "format": "percent",
    },
    {
        "title": "Prefix cache",
        "unit": "share of prompt tokens found",
        "keys": ["engine/cache_hit_fraction"],
        "format": "percent",
    },
    {
        "title": "Tokens per step",
        "unit": "",
        "keys": ["engine/generated_tokens", "engine/prefilled_tokens", "engine/cached_tokens"],
        "format": "short",
    },
    {
        "title": "Disturbances per step",
        "unit": "requests",
        "keys": ["engine/preempted", "engine/aborted", "engine/failed"],
        "format": "number",
    },
    {
        "title": "Images and videos per step",
        "unit": "computed and found in the cache",
        "keys": ["engine/media_computed", "engine/media_cached"],
        "format": "number",
    },
    {
        "title": "Time for images and videos",
        "unit": "seconds per step",
        "keys": ["engine/media_tower_s", "engine/media_wait_s"],
        "format": "number",
    },
)
"""The curves that the page draws. The server sends this list, so the page draws all that is sent."""
_NUM_POINTS = 500
_LIMIT_S = 3.0
_MOST_BYTES = 1 << 20


def engine(run: Run, diagnosis: Diagnosis) -> dict[str, Any]:
    """What generates: now, and over the last steps."""
    problems: list[str] = []
    status = run.status(problems)
    told = status.engine if status else {}
    with run.records.lock:
        run.records.refresh()
        train = run.records.tables["train"]
        known = set(train.names())
        past = sampled(train, [key for chart in CHARTS for key in chart["keys"] if key in known], _NUM_POINTS)
    return {
        "source": "status.json",
        "time": status.time if status else None,
        "is_live": not diagnosis.life.is_over and status is not None,
        "version": status.version if status else None,
        "engine": {**engine_numbers(told), "num_restarts": status.engine_restarts} if status and told else None,
        "servers": [asdict(each) for each in status.servers] if status else [],
        "charts": list(CHARTS),
        "history": {"steps": past["steps"], "series": past["series"]},
        "capacity": diagnosis.capacity,
        "waits": diagnosis.to_json()["waits"],
        "problems": problems,
    }


def engine_numbers(told: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine in the same words, whichever engine told it."""
    metrics = told.get("metrics")
    numbers = (
        {name: value for name, value in metrics.items() if finite(value) is not None}
        if isinstance(metrics, Mapping)
        else {}
    )
    pages, cached = finite(numbers.get("kv_pages_total")), finite(numbers.get("num_tokens_cached"))
    prefilled = finite(numbers.get("num_tokens_prefilled"))
    prompts = (cached or 0) + (prefilled or 0)
    return {
        "num_running": told.get("num_running"),
        "num_waiting": told.get("num_waiting"),
        "kv_used": numbers["kv_pages_used"] / pages if pages and "kv_pages_used" in numbers else numbers.get("kv_used"),
        "cache_hits": cached / prompts if cached is not None and prompts else None,
        "tokens_per_s": numbers.get("tokens_per_s"),
        "is_paused": bool(told.get("is_paused")),
        "is_asleep": bool(told.get("is_asleep")),
        "metrics": numbers,
    }


async def server_states(urls: Sequence[str], key: str) -> dict[str, Any]:
    """Of ``headwater serve`` and ``headwater route``. ``key`` is sent to the servers, if there is one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit, headers=headers, trust_env=False) as client:
        return {"servers": list(await asyncio.gather(*(_state(client, url) for url in urls)))}


async def _state(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        metrics = await _get(client, f"{url}/metrics.json")
        model = await _model(client, url)
        members = await _members(client, url)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return {"url": url, "is_alive": False, "error": str(error) or type(error).__name__, **_unknown()}
    numbers = engine_numbers({**metrics, "metrics": metrics})
    version = finite(metrics.get("version"))
    return {
        "url": url,
        "is_alive": True,
        "error": "",
        "version": int(version) if version is not None else None,
        **numbers,
        "model": model,
        "members": members,
    }


def _unknown() -> dict[str, Any]:
    return {"version": None, **engine_numbers({}), "model": "", "members": []}


async def _get(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with client.get(url, allow_redirects=False) as reply:
        if reply.status != 200:
            raise ValueError(f"{url} answers with status {reply.status}")
        content = json.loads(await _whole(reply, url))
    if not isinstance(content, Mapping):
        raise ValueError(f"{url} does not answer with a JSON object")
    return dict(jsonable(content))


async def _whole(reply: aiohttp.ClientResponse, url: str) -> bytes:
    """All that the server sends. It comes in pieces; a single read would give the first one."""
    found = bytearray()
    async for piece in reply.content.iter_any():
        found += piece
        if len(found) > _MOST_BYTES:
            raise ValueError(f"{url} answers with more than {_MOST_BYTES >> 20} MB")
    return bytes(found)


async def _model(client: aiohttp.ClientSession, url: str) -> str:
    try:
        models = (await _get(client, f"{url}/v1/models")).get("data")
        return str(models[0]["id"]) if models else ""
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
        return ""


async def _members(client: aiohttp.ClientSession, url: str) -> list[Any]:
    """The servers behind a router; a single server has none."""
    try:
        members = (await _get(client, f"{url}/servers")).get("servers")
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return []
    return members if isinstance(members, list) else []
