"""The state of running servers, of ``--server URL``: those of ``headwater serve`` and ``headwater route``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from headwater.dashboard.engine_view import engine_numbers
from headwater.dashboard.plain_values import finite, jsonable

_LIMIT_S = 3.0
_MOST_BYTES = 1 << 20


async def server_states(urls: Sequence[str], key: str) -> dict[str, Any]:
    """``key`` is sent to the servers, if there is one."""
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
