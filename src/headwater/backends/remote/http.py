"""Calls to a server over HTTP."""

from __future__ import annotations

import json
import resource
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar

import aiohttp

from headwater.backends.remote.link import Garbage, LinkLost
from headwater.core.errors import RequestError, RolloutFailed
from headwater.core.waits import named_wait

_CALL_LIMIT_S = 600.0
"""For one control call. Loading the weights of a large model from a slow disk takes minutes."""
_HEALTH_LIMIT_S = 20.0
_CONNECT_LIMIT_S = 10.0
_SPARE_FILES = 256
_FEWEST_STREAMS = 64
_NUM_CHARACTERS_SHOWN = 300
_LARGEST_EVENT = 2**24
_DONE = "[DONE]"


class HttpCalls:
    """What the links to servers over HTTP share."""

    program: ClassVar[str] = ""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S)
        # Each stream is a connection. Those beyond the limit of open files wait here.
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A connection is not used again, because the server may close it at the same moment.
        streams = aiohttp.TCPConnector(limit=max(_FEWEST_STREAMS, most - _SPARE_FILES), force_close=True)
        self._streams = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=streams)
        # Control calls must not wait for streams.
        self._control = aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        )

    async def check_alive(self) -> None:
        await self._call("GET", "/health", limit_s=_HEALTH_LIMIT_S)

    async def close(self) -> None:
        await self._streams.close()
        await self._control.close()

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The data of each event that answers a request, up to the one that ends the stream."""
        try:
            async with self._streams.post(self.url + path, json=body, read_bufsize=2**18) as reply:
                if reply.status != 200:
                    raise refusal(f"POST {self.url}{path}", reply.status, await reply.text(errors="replace"))
                async for data in _event_data(reply.content):
                    yield data
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"POST {path}: {type(error).__name__}: {error}") from error

    async def _answer(self, path: str, body: Mapping[str, Any]) -> str:
        """The whole answer to a request that may take as long as it needs."""
        try:
            async with self._streams.post(self.url + path, json=body) as reply:
                text = await reply.text(errors="replace")
                if reply.status != 200:
                    raise refusal(f"POST {self.url}{path}", reply.status, text)
                return text
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"POST {path}: {type(error).__name__}: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Any = None,
        limit_s: float = _CALL_LIMIT_S,
        is_text: bool = False,
    ) -> dict[str, Any]:
        """A control call. ``is_text`` is for answers that are not JSON and of which only the status matters."""
        what = f"{method} {self.url}{path}"
        if self._control.closed:
            raise LinkLost(f"{what}: its process was replaced or stopped")
        try:
            status, text = await named_wait(
                self._exchange(method, path, body, params),
                lambda: f"the {self.program} server answers {what}",
                kind="engine_call",
                hard_limit_s=limit_s,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"{what}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise refusal(what, status, text)
        if is_text:
            return {}
        try:
            answer = json.loads(text) if text.strip() else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RolloutFailed(f"{what}: the answer is not a JSON object: {text[:_NUM_CHARACTERS_SHOWN]!r}")
        return answer

    async def _exchange(self, method: str, path: str, body: Any, params: Any) -> tuple[int, str]:
        async with self._control.request(method, self.url + path, json=body, params=params) as reply:
            return reply.status, await reply.text(errors="replace")


async def _event_data(content: aiohttp.StreamReader) -> AsyncGenerator[str, None]:
    rest = b""
    async for part in content.iter_any():
        rest += part
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip().decode(errors="replace")
            if data == _DONE:
                return
            yield data
        if len(rest) > _LARGEST_EVENT:
            raise Garbage(f"an event of more than {_LARGEST_EVENT} bytes")
    raise LinkLost("the stream of a response ended before its last event")


def refusal(what: str, status: int, text: str) -> Exception:
    shown = text[:_NUM_CHARACTERS_SHOWN]
    if status in (502, 503, 504):  # its engine has ended, or a proxy does not reach it
        return LinkLost(f"{what}: status {status}: {shown}")
    if status in (401, 403):
        return RolloutFailed(
            f"{what}: refuses access with status {status}: {shown}; set the environment variable HEADWATER_SERVER_KEY"
        )
    if 400 <= status < 500:
        return RequestError(f"{what}: refused with status {status}: {shown}")
    return RolloutFailed(f"{what}: failed with status {status}: {shown}")
