"""A vLLM server over HTTP (``python -m vllm.entrypoints.openai.api_server``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, ClassVar

from headwater.backends.remote.http import CALL_LIMIT_S, HttpCalls
from headwater.backends.remote.link import PauseMode, Sending, ServerInfo, StreamedTokens
from headwater.backends.vllm.weights import WorkerCalls
from headwater.backends.vllm.wire import ADAPTERS, dialect_of, read_event, write_request
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import ConfigError, RequestError, RolloutFailed

INSIDE = Path(__file__).parent / "inside"
"""What runs in the workers of vLLM."""
OWN_WORKER = "headwater_vllm_worker.Worker"
"""The class in this folder whose methods vLLM's workers get."""


class VllmLink(WorkerCalls, HttpCalls):
    """The calls to one server."""

    program: ClassVar[str] = "vLLM"

    def __init__(self, url: str, api_key: str = "", *, reads_images: bool = False) -> None:
        """``reads_images`` is whether the model does."""
        super().__init__(url, api_key)
        self._reads_images = reads_images
        self._dialect = dialect_of("0.23")
        self._has_own_worker = False

    async def describe(self) -> ServerInfo:
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
        self._has_own_worker = info.has_own_worker
        return info

    async def _told(self) -> Mapping[str, Any]:
        """vLLM's config as JSON. The workers' own method is much faster, but only servers of a run have it."""
        try:
            told: Mapping[str, Any] = (await self.call_workers("headwater_describe"))[0]
        except RolloutFailed as error:
            if isinstance(error, RequestError):
                raise
            answer = await self._call("GET", "/server_info", params={"config_format": "json"})
            told = answer["vllm_config"]
        return told

    async def stream(self, sending: Sending) -> AsyncGenerator[StreamedTokens, None]:
        body = write_request(sending, self._dialect)
        async with aclosing(self._events("/inference/v1/generate", body)) as events:
            async for data in events:
                if (chunk := read_event(data, self._dialect)) is not None:
                    yield chunk

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})

    async def pause(self, mode: PauseMode) -> None:
        # Requests that are kept also keep their cache. Others do not see it: the version is part of its key.
        clear = "false" if mode == "keep" else "true"
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": clear}, limit_s=float("inf"))

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def reload(self, folder: str, label: str, *, keeps_cache: bool = False) -> None:
        if self._has_own_worker:
            await self.call_workers("headwater_reload", folder=folder)
        else:
            await self.ask_workers("reload_weights", {"weights_path": folder})
        await self.use_loaded(label)

    async def ask_workers(
        self, method: str, arguments: Mapping[str, Any], *, call_limit_s: float = CALL_LIMIT_S
    ) -> Sequence[Any]:
        body = {"method": method, "kwargs": arguments}
        answer = await self._call("POST", "/collective_rpc", body, limit_s=call_limit_s)
        results: Sequence[Any] = answer.get("results") or ()
        return results

    async def use_loaded(self, label: str) -> None:
        if self._reads_images and self._dialect.takes_images:
            # Its workers forget what the tower has made of images. Its scheduler must not count on that any more.
            await self._call("POST", "/reset_encoder_cache", is_text=True)
        await self.set_label(label)

    async def adapter_problem(self, layers: Sequence[str]) -> str:
        """Why the server cannot compute adapters of these layers; empty if it can."""
        problem: str = (await self.call_workers("headwater_adapter_problem", layers=list(layers)))[0]["problem"]
        return problem

    async def load_adapters(self, folder: str, label: str) -> None:
        if not await self._load_adapters(folder, is_new=False):
            # Requests find them by a name, which the server is told once. It would take new values in this way too, but
            # then read their file again in every step (``load_inplace``).
            with suppress(RequestError):  # the name is known only if the connection broke in this place before
                await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": ADAPTERS}, is_text=True)
            named = {"lora_name": ADAPTERS, "lora_path": folder}
            await self._call("POST", "/v1/load_lora_adapter", named, is_text=True)
            await self._load_adapters(folder, is_new=True)
        await self.set_label(label)

    async def _load_adapters(self, folder: str, *, is_new: bool) -> bool:
        """Whether the workers know which adapters are meant, and have loaded them."""
        answers = await self.call_workers("headwater_load_adapters", folder=folder, is_new=is_new)
        return all(answer["is_loaded"] for answer in answers)

    async def set_label(self, label: str) -> bool:
        if self._dialect.labels_tokens:
            await self._call("POST", "/update_weight_version", {"new_version": label})
        return self._dialect.labels_tokens

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        if tuple(tags) == ("kv_cache",) and self._dialect.releases_cache_alone:
            await self._call("POST", "/release_kv_cache_memory")
            return
        await self._call("POST", "/sleep", params={"level": "1", "mode": "keep"})
        if "weights" not in tags:
            await self.wake(("weights",))

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/wake_up", params=[("tags", tag) for tag in tags])


def read_info(version: str, told: Mapping[str, Any]) -> ServerInfo:
    """From vLLM's config as JSON."""
    model, device = told["model_config"], str(told["device_config"]["device"])
    parallel, own = told["parallel_config"], told.get("headwater") or {}
    return ServerInfo(
        version=version,
        model=str(model["model"]),
        dtype=str(model["dtype"]).removeprefix("torch."),
        instance=str(told["instance_id"]),
        max_model_tokens=int(model["max_model_len"]),
        max_sequences=int(told["scheduler_config"]["max_num_seqs"]),
        device=device,
        labels_tokens=dialect_of(version).labels_tokens,
        # A CPU accepts the option and the calls, and releases nothing.
        can_sleep=bool(model.get("enable_sleep_mode")) and device != "cpu",
        logprobs_mode=str(model["logprobs_mode"]),
        takes_media=dialect_of(version).takes_images,
        has_own_worker=parallel.get("worker_extension_cls") == OWN_WORKER,
        num_workers=int(parallel.get("world_size", 1)),
        # Of several data-parallel engines, only the first one would answer.
        receives_weights=bool(own.get("receives_weights")) and parallel.get("data_parallel_size") == 1,
        text_config=model.get("text_config") or {},
        adapter_rank=int((told.get("lora_config") or {}).get("max_lora_rank") or 0),
        loads_adapters=bool(told.get("loads_adapters")),
    )
