"""A vLLM server over HTTP (``python -m vllm.entrypoints.openai.api_server``)."""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import aiohttp

from headwater.backends.vllm.dialect import dialect_of
from headwater.backends.vllm.link import OWN_WORKER, LinkLost, PauseMode, VllmInfo
from headwater.backends.vllm.wire import Chunk, Garbage, read_event
from headwater.core.errors import ConfigError, RequestError, RolloutFailed, WaitTimeout
from headwater.core.protocols import MemoryTag
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


class HttpLink:
    """The calls to one server."""

    program: ClassVar[str] = "vLLM"

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
        self.measured: Mapping[str, float] = {}
        self._dialect = dialect_of("0.23")
        self._reload = "reload_weights"

    async def describe(self) -> VllmInfo:
        version = (await self._call("GET", "/version"))["version"]
        self._dialect = dialect_of(version)
        try:
            told = await self._told()
        except RequestError as error:
            raise ConfigError(
                [
                    f"the vLLM server at {self.url} does not offer the calls that weight updates need ({error}); start "
                    "it with VLLM_SERVER_DEV_MODE=1, on a network that you trust"
                ]
            ) from error
        try:
            info = read_info(version, told)
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutFailed(
                f"{self.url}/server_info: {type(error).__name__}: {error}; is this a vLLM server of a known version?"
            ) from error
        self._reload = "headwater_reload" if info.has_own_worker else "reload_weights"
        return info

    async def _told(self) -> Mapping[str, Any]:
        """vLLM's config as JSON. The workers' own method is much faster, but only servers of a run have it."""
        try:
            answer = await self._call("POST", "/collective_rpc", {"method": "headwater_describe"})
            told: Mapping[str, Any] = answer["results"][0]
        except RolloutFailed as error:
            if isinstance(error, RequestError):
                raise
            answer = await self._call("GET", "/server_info", params={"config_format": "json"})
            told = answer["vllm_config"]
        return told

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        path = "/inference/v1/generate"
        try:
            async with self._streams.post(self.url + path, json=body, read_bufsize=2**18) as reply:
                if reply.status != 200:
                    raise refusal(f"POST {self.url}{path}", reply.status, await reply.text(errors="replace"))
                async for data in _events(reply.content):
                    if (chunk := read_event(data, self._dialect)) is not None:
                        yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:  # EngineFailed is an OSError
            raise LinkLost(f"POST {path}: {type(error).__name__}: {error}") from error

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})

    async def pause(self, mode: PauseMode) -> None:
        # Requests that are kept also keep their cache. Others do not see it: the version is part of its key.
        clear = "false" if mode == "keep" else "true"
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": clear}, limit_s=float("inf"))

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def reload(self, folder: str) -> None:
        argument = "folder" if self._reload == "headwater_reload" else "weights_path"
        await self._call("POST", "/collective_rpc", {"method": self._reload, "kwargs": {argument: folder}})

    async def set_label(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": label})

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        if tuple(tags) == ("kv_cache",) and self._dialect.releases_cache_alone:
            await self._call("POST", "/release_kv_cache_memory")
            return
        await self._call("POST", "/sleep", params={"level": "1", "mode": "keep"})
        if "weights" not in tags:
            await self.wake(("weights",))

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

    async def check_alive(self) -> None:
        await self._call("GET", "/health", limit_s=_HEALTH_LIMIT_S)
        # A server that publishes no metrics is healthy, too.
        with suppress(aiohttp.ClientError, OSError, TimeoutError, WaitTimeout):
            status, text = await named_wait(
                self._exchange("GET", "/metrics", None, None),
                lambda: f"the {self.program} server at {self.url} publishes its metrics",
                kind="engine_call",
                hard_limit_s=_HEALTH_LIMIT_S,
            )
            self.measured = read_metrics(text) if status == 200 else {}

    async def close(self) -> None:
        await self._streams.close()
        await self._control.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Any = None,
        limit_s: float = _CALL_LIMIT_S,
    ) -> dict[str, Any]:
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


def read_info(version: str, told: Mapping[str, Any]) -> VllmInfo:
    """From vLLM's config as JSON."""
    model = told["model_config"]
    return VllmInfo(
        version=version,
        dialect=dialect_of(version),
        model=str(model["model"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        instance=str(told["instance_id"]),
        max_model_tokens=int(model["max_model_len"]),
        max_sequences=int(told["scheduler_config"]["max_num_seqs"]),
        logprobs_mode=str(model["logprobs_mode"]),
        device=str(told["device_config"]["device"]),
        has_own_worker=told["parallel_config"].get("worker_extension_cls") == OWN_WORKER,
        can_sleep=bool(model.get("enable_sleep_mode")),
        text_config=model.get("text_config") or {},
    )


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[str, None]:
    """The data of each event, up to the one that ends the stream."""
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
    if 400 <= status < 500:
        return RequestError(f"{what}: refused with status {status}: {shown}")
    return RolloutFailed(f"{what}: failed with status {status}: {shown}")
