"""An SGLang server over HTTP (``python -m sglang.launch_server``), or a ``headwater serve``, which knows its calls.

A response is requested without streaming: SGLang's streams repeat the whole response in every event. When generation is
paused for an update, the server answers with the tokens so far, and the rest is requested under the new weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

import aiohttp

from headwater.backends.sglang.dialect import DIALECTS, OLDEST, Dialect, dialect_of
from headwater.backends.vllm import dialect as vllm_dialect
from headwater.backends.vllm.http import HttpLink, refusal
from headwater.backends.vllm.link import LinkLost, PauseMode, VllmInfo
from headwater.backends.vllm.wire import Chunk, Garbage
from headwater.core.errors import LogitsBroken, RequestError, RolloutFailed
from headwater.core.protocols import MemoryTag
from headwater.core.records import StopReason

_NO_LABELS = vllm_dialect.DIALECTS[-1]
"""Answers tell neither versions of tokens nor anything else that vLLM's newer ones do."""
_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_PAUSE_MODE: dict[PauseMode, str] = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
_NUM_CHARACTERS_SHOWN = 200


class SglangLink(HttpLink):
    """The calls to one server."""

    program: ClassVar[str] = "SGLang"

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__(url, api_key)
        self._spoken: Dialect = OLDEST
        self._num_streams = 0
        self._none_left = asyncio.Event()
        self.vocab_size: int | None = None
        """If the server tells it."""

    async def describe(self) -> VllmInfo:
        told = await self._call("GET", OLDEST.info_path)
        try:
            is_ours = "instance" in told
            self._spoken = DIALECTS[0] if is_ours else dialect_of(str(told["version"]))
            self.vocab_size = told.get("vocab_size")
            return read_info(told, await self._call("GET", "/get_model_info"))
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutFailed(
                f"{self.url}{OLDEST.info_path}: {type(error).__name__}: {error}; is this an SGLang server of a known "
                "version?"
            ) from error

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The whole answer as one chunk."""
        what = f"POST {self.url}/generate"
        self._num_streams += 1
        self._none_left.clear()
        try:
            async with self._streams.post(self.url + "/generate", json=write_body(body, self._spoken)) as reply:
                text = await reply.text(errors="replace")
                if reply.status != 200:
                    raise refusal(what, reply.status, text)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkLost(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._none_left.set()
        yield read_answer(text)

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_request", {"rid": request_id})

    async def pause(self, mode: PauseMode) -> None:
        if mode == "wait" and self._num_streams:  # no new ones are sent meanwhile
            await self._none_left.wait()
        body = {"mode": _PAUSE_MODE[mode]} if self._spoken.has_pause_modes else {}
        await self._call("POST", "/pause_generation", body)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def reload(self, folder: str) -> None:
        answer = await self._call("POST", "/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
        if not answer.get("success"):
            raise RolloutFailed(f"{self.url}/update_weights_from_disk: {answer.get('message', answer)}")

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})


def read_info(told: Mapping[str, Any], model: Mapping[str, Any]) -> VllmInfo:
    """From ``/get_server_info`` and ``/get_model_info``."""
    can: Mapping[str, Any] = told.get("capabilities") or {}
    # A process without an id differs from the one before in the seed that it chose, or has had no update yet.
    has_updates = model.get("weight_version", "default") != "default"
    instance = told.get("instance") or f"{told.get('random_seed')}-{'updated' if has_updates else 'new'}"
    return VllmInfo(
        version=str(told["version"]),
        dialect=_NO_LABELS,
        model=str(model["model_path"]),
        dtype=str(can.get("dtype") or told.get("dtype") or "auto"),
        instance=str(instance),
        max_model_tokens=int(told.get("context_length") or told.get("max_req_input_len") or 0),
        max_sequences=int(told.get("max_running_requests") or told.get("max_sequences") or 0),
        logprobs_mode="processed_logprobs",
        device=str(told.get("device") or ""),
        has_own_worker=False,
        can_sleep=bool(told.get("enable_memory_saver") or can.get("memory_tags")),
    )


def write_body(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The body of ``/generate`` for a request of ``vllm.wire.write_request``."""
    given: Mapping[str, Any] = body["sampling_params"]
    params: dict[str, Any] = {
        "max_new_tokens": given["max_tokens"],
        "min_new_tokens": given["min_tokens"],
        "temperature": given["temperature"],
        "top_p": given["top_p"],
        "top_k": given["top_k"] or -1,
        "min_p": given["min_p"],
        "stop_token_ids": given["stop_token_ids"],
        "ignore_eos": given["ignore_eos"],
        "skip_special_tokens": False,
    }
    if dialect.has_seeds:
        params["sampling_seed"] = given["seed"] & (2**31 - 1)
    return {
        "rid": body["request_id"],
        "input_ids": body["token_ids"],
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def read_answer(text: str) -> Chunk:
    """The answer of ``/generate``. The tokens are taken from their log-probs, which every version returns."""
    try:
        answer = json.loads(text)
        if "error" in answer:
            raise RequestError(f"SGLang refuses a request: {_shown(answer['error'])}")
        meta = answer["meta_info"]
        pairs = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
        kind = meta["finish_reason"]["type"]
        if kind not in _STOP_REASONS:
            raise Garbage(f"the finish reason {kind!r}")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Garbage(f"{type(error).__name__}: {error}; the answer: {_shown(text)}") from error
    for logprob, token in pairs:
        if not logprob <= 0.01:  # also for NaN
            raise LogitsBroken(f"SGLang reports the log-prob {logprob} for token {token}: its logits are not numbers")
    tokens, logprobs = tuple(token for _, token in pairs), tuple(min(each, 0.0) for each, _ in pairs)
    return Chunk(tokens, logprobs, _STOP_REASONS[kind])


def _shown(value: Any) -> str:
    return str(value)[:_NUM_CHARACTERS_SHOWN]
