"""``HttpService``: JSON calls to a service, with connection limits, time limits and retries."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from headwater.core.errors import ConfigError
from headwater.tools.base import ToolUnavailable
from headwater.tools.results import BadResult

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0
_MAX_ANSWER_BYTES = 16 * 2**20
_RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpService:
    """One URL that answers POST requests with JSON."""

    def __init__(
        self,
        url: str,
        path: str,
        *,
        attempt_timeout_s: float,
        num_retries: int,
        max_connections: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``path`` is appended to a URL that has none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError([f"url = {url!r}: must begin with http:// or https:// and name a host"])
        self.url = url if parts.path.strip("/") else url.rstrip("/") + path
        self._timeout = aiohttp.ClientTimeout(total=attempt_timeout_s)
        self._attempt_timeout_s = attempt_timeout_s
        self._num_retries = num_retries
        self._max_connections = max_connections
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._random = random.Random()  # it only spreads retries; the global generator stays as it is

    async def post(self, payload: Mapping[str, Any]) -> Any:
        """The answer; ``ToolUnavailable`` after the last retry, ``BadResult`` if it is not JSON."""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._num_retries + 1):
            try:
                return await self._attempt(payload)
            except _Retriable as error:
                if attempt == self._num_retries:
                    raise ToolUnavailable(f"{self.url}: {error} (tried {attempt + 1} times)") from error
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    async def _attempt(self, payload: Mapping[str, Any]) -> Any:
        try:
            async with self._connect().post(self.url, json=payload, headers=self._headers) as answer:
                body = await _read(answer)
        except TimeoutError as error:
            raise _Retriable(f"no answer within {self._attempt_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Retriable(str(error) or type(error).__name__) from error
        if answer.status != 200:
            message = f"answered with status {answer.status}: {body[:200].decode(errors='replace')}"
            if answer.status in _RETRIED_STATUSES:
                raise _Retriable(message)
            raise ToolUnavailable(f"{self.url}: {message}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            shown = body[:100].decode(errors="replace")
            raise BadResult(f"got an answer from {self.url} that is not JSON: {shown!r}") from error

    def _connect(self) -> aiohttp.ClientSession:
        """The session of the running event loop. Checks before a run have another loop than its episodes."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
            self._loop = loop
        return self._session


class _Retriable(Exception):
    """An attempt failed in a way that may pass."""


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise BadResult(f"got an answer from {answer.url} of more than {_MAX_ANSWER_BYTES // 2**20} MiB")
    return bytes(body)
