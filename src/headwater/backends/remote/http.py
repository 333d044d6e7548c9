"""Calls to a server over HTTP."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, ClassVar

import aiohttp

from headwater.backends.remote.link import Garbage, LinkLost, Overloaded
from headwater.core.errors import RequestError, RolloutFailed, WaitTimeout
from headwater.core.processes import allow_many_descriptors
from headwater.core.waits import named_wait

CALL_LIMIT_S = 600.0
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
        self._turns = _stream_turns()
        # A connection is not used again, because the server may close it at the same moment.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def check_alive(self) -> None:
        await self._call("GET", "/health", limit_s=_HEALTH_LIMIT_S)

    async def measure(self) -> dict[str, float]:
        # A server that publishes no metrics is healthy, too.
        with suppress(aiohttp.ClientError, OSError, TimeoutError, WaitTimeout):
            status, text = await named_wait(
                self._exchange("GET", "/metrics", None, None),
                lambda: f"the {self.program} server at {self.url} publishes its metrics",
                kind="engine_call",
                hard_limit_s=_HEALTH_LIMIT_S,
            )
            return read_metrics(text) if status == 200 else {}
        return {}

    async def load_adapters(self, folder: str, label: str) -> None:
        raise RolloutFailed(f"{self.program} takes no adapters from a run; use rollout.publish=full")

    async def close(self) -> None:
        await self._session.close()

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """The data of each event that answers a request, up to the one that ends the stream."""
        try:
            async with self._turns.turn(), self._session.post(self.url + path, json=body, read_bufsize=2**18) as reply:
                if reply.status != 200:
                    raise refusal(f"POST {self.url}{path}", reply.status, await reply.text(errors="replace"))
                async for data in _event_data(reply.content):
                    yield data
        except LinkLost:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"POST {path}: {type(error).__name__}: {error}") from error

    async def _answer(self, path: str, body: Mapping[str, Any]) -> str:
        """The whole answer to a request that may take as long as it needs."""
        try:
            async with self._turns.turn(), self._session.post(self.url + path, json=body) as reply:
                text = await reply.text(errors="replace")
                if reply.status != 200:
                    raise refusal(f"POST {self.url}{path}", reply.status, text)
                return text
        except LinkLost:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"POST {path}: {type(error).__name__}: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Any = None,
        limit_s: float = CALL_LIMIT_S,
        is_text: bool = False,
    ) -> dict[str, Any]:
        """A control call. ``is_text`` is for answers that are not JSON and of which only the status matters."""
        what = f"{method} {self.url}{path}"
        if self._session.closed:
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
        async with self._session.request(method, self.url + path, json=body, params=params) as reply:
            return reply.status, await reply.text(errors="replace")


class StreamTurns:
    """How many streams may be open at the same time, over all servers. They belong to several event loops."""

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._num_free = most
        self._waiting: deque[Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Others wait while ``most`` blocks are entered."""
        await self._take()
        try:
            yield
        finally:
            self._give()

    async def _take(self) -> None:
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return
            mine: Future[None] = Future()
            self._waiting.append(mine)
        try:
            await asyncio.wrap_future(mine)
        except asyncio.CancelledError:
            if not mine.cancel() and not mine.cancelled():  # it was given in the same moment
                self._give()
            raise

    def _give(self) -> None:
        with self._lock:
            while self._waiting:
                following = self._waiting.popleft()
                if following.set_running_or_notify_cancel():
                    break
            else:
                self._num_free += 1
                return
        following.set_result(None)


@cache
def _stream_turns() -> StreamTurns:
    """Each stream is a connection. Those beyond the limit of open files wait; control calls do not."""
    return StreamTurns(max(_FEWEST_STREAMS, allow_many_descriptors() - _SPARE_FILES))


_MEASURED = {
    "generation_tokens_total": "num_tokens_generated",
    "prompt_tokens_total": "num_tokens_prompted",
    "prefix_cache_hits_total": "num_tokens_cached",
    "cached_tokens_total": "num_tokens_cached",
    "num_preemptions_total": "num_preempted",
    "kv_cache_usage_perc": "kv_used",
    "token_usage": "kv_used",
}
"""Names in the metrics of vLLM and SGLang, and the names of Headwater's engine for the same."""


def read_metrics(text: str) -> dict[str, float]:
    """What a server publishes in the format of Prometheus, summed over its engines; the KV cache as their mean."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = _MEASURED.get(name.partition("{")[0].removeprefix("vllm:").removeprefix("sglang:"), "")
        if name:
            with suppress(ValueError):
                number = float(value)
                found.setdefault(name, []).append(number)
    metrics = {name: statistics.fmean(each) if name == "kv_used" else sum(each) for name, each in found.items()}
    if "num_tokens_prompted" in metrics:
        computed = metrics.pop("num_tokens_prompted") - metrics.get("num_tokens_cached", 0.0)
        metrics["num_tokens_prefilled"] = max(0.0, computed)
    return metrics


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
    if status in (429, 503):
        return Overloaded(f"{what}: status {status}: {shown}")
    if status in (502, 504):  # a proxy does not reach it
        return LinkLost(f"{what}: status {status}: {shown}")
    if status in (401, 403):
        return RolloutFailed(
            f"{what}: refuses access with status {status}: {shown}; set the environment variable HEADWATER_SERVER_KEY"
        )
    if 400 <= status < 500:
        return RequestError(f"{what}: refused with status {status}: {shown}")
    return RolloutFailed(f"{what}: failed with status {status}: {shown}")
