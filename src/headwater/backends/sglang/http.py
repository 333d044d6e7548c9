"""An SGLang server over HTTP (``python -m sglang.launch_server``), or a ``headwater serve``, which knows its calls.

Responses are streamed if the server was started with ``--incremental-streaming-output``, so that their tokens are here
when the server dies. Without it, SGLang's streams repeat the whole response in every event, so a response is requested
as a whole, unless its caller wants a stream. When generation is paused for an update, the server answers with the
tokens so far, and the rest is requested under the new weights.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from headwater.backends.remote.http import HttpCalls, refusal
from headwater.backends.remote.link import (
    STREAM_INTERVAL,
    Garbage,
    LinkLost,
    PauseMode,
    Sending,
    ServerInfo,
    StreamedTokens,
    read_spans,
)
from headwater.backends.remote.media import data_url
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import HeadwaterError, LogitsBroken, RequestError, RolloutFailed
from headwater.core.requests import StopReason, derive_key

_STOP_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_PAUSE_MODE: dict[PauseMode, str] = {"abort": "abort", "keep": "in_place", "wait": "in_place"}
NO_FEATURES = {"SGLANG_VLM_CACHE_SIZE_MB": "0", "SGLANG_EXPOSE_OWN_ENV_VARS": "1"}
"""SGLang keeps what the vision tower has made of an image under the image's hash alone, and no call empties that cache:
after an update, images that were seen before would have the features of older weights. The first variable turns the
cache off. The second makes ``/server_info`` tell the first."""
_ALIVE_LIMIT_S = 20.0
_LEAVE_LIMIT_S = 10.0
_NUM_CHARACTERS_SHOWN = 200


@dataclass(frozen=True)
class SglangDialect:
    """How to talk to one range of versions."""

    since: tuple[int, int, int]
    """The first version."""
    labels_tokens: bool
    """``meta_info.weight_versions`` says which weights produced which tokens."""
    has_pause_modes: bool
    """``/pause_generation`` takes a mode. Otherwise it always ends the running requests with the tokens they have."""
    has_seeds: bool
    """``sampling_seed`` is a known sampling parameter. It has an effect with ``--enable-deterministic-inference``."""
    info_prefix: str = "/"
    """What comes before ``server_info`` and ``model_info`` in the paths of these calls."""
    has_update_calls: bool = False
    """Tensors are taken from a process group only between ``/begin_weight_update`` and ``/end_weight_update``."""
    streams_new_tokens: bool = False
    """With ``--incremental-streaming-output``, an event has the log-probs of its new tokens only. In versions before,
    whose option is ``--stream-output`` or the same, it repeats the log-probs of the whole response."""


DIALECTS = (
    SglangDialect(
        (0, 5, 21),
        labels_tokens=True,
        has_pause_modes=True,
        has_seeds=True,
        has_update_calls=True,
        streams_new_tokens=True,
    ),
    SglangDialect((0, 5, 19), labels_tokens=True, has_pause_modes=True, has_seeds=True, streams_new_tokens=True),
    SglangDialect((0, 5, 11), labels_tokens=False, has_pause_modes=True, has_seeds=True, streams_new_tokens=True),
    SglangDialect((0, 5, 6), labels_tokens=False, has_pause_modes=True, has_seeds=True),
    SglangDialect((0, 5, 3), labels_tokens=False, has_pause_modes=False, has_seeds=True, info_prefix="/get_"),
    SglangDialect((0, 5, 1), labels_tokens=False, has_pause_modes=False, has_seeds=False, info_prefix="/get_"),
)
"""The newest first. A version between two rows speaks the older of the two. Compared with the packages of all versions
from 0.5.1 to 0.5.23."""

OLDEST = DIALECTS[-1]
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def dialect_of(version: str) -> SglangDialect:
    """The row of the table for a version such as ``0.5.6.post2``."""
    found = _VERSION.match(version)
    number = tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    for dialect in DIALECTS:
        if number >= dialect.since:
            return dialect
    oldest = ".".join(map(str, OLDEST.since))
    raise RolloutFailed(f"SGLang {version} is not supported; install SGLang {oldest} or newer for the server")


class SglangLink(HttpCalls):
    """The calls to one server."""

    program: ClassVar[str] = "SGLang"

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__(url, api_key)
        self.dialect = OLDEST
        self._is_described = False
        self.is_ours = False
        """The server is a ``headwater serve``."""
        self.streams_new_tokens = False
        """Every response is streamed, because each event has only new tokens."""
        self._num_streams = 0
        self._none_left = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        """Wait for the end of streams that nothing reads any more."""
        self._paused: PauseMode | None = None
        """How it was paused, until it continues."""

    async def describe(self) -> ServerInfo:
        try:
            told = await self._call("GET", "/server_info")
        except RequestError:
            told = await self._call("GET", "/get_server_info")
        try:
            self.is_ours = "instance" in told
            self.dialect = DIALECTS[0] if self.is_ours else dialect_of(str(told["version"]))
            self.streams_new_tokens = self.dialect.streams_new_tokens and bool(told.get("incremental_streaming_output"))
            self._is_described = True
            return read_info(told, await self._call("GET", f"{self.dialect.info_prefix}model_info"), self.dialect)
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutFailed(
                f"{self.url}/server_info: {type(error).__name__}: {error}; is this an SGLang server of a known version?"
            ) from error

    async def check_alive(self) -> None:
        # SGLang's /health generates a token, which a server that is paused or asleep does not.
        path = "/health" if self.is_ours else f"{self.dialect.info_prefix}model_info"
        try:
            await self._call("GET", path, limit_s=_ALIVE_LIMIT_S)
        except RequestError:
            if self._is_described:
                raise
            await self._call("GET", "/model_info", limit_s=_ALIVE_LIMIT_S)  # its version is not known yet

    async def stream(self, sending: Sending) -> AsyncGenerator[StreamedTokens, None]:
        """The answer as it is generated, or as one chunk if events would repeat it and the caller wants no stream."""
        body = write_request(sending, self.dialect, streams_new_tokens=self.streams_new_tokens)
        self._count_streams(1)
        try:
            if not body["stream"]:
                yield read_answer(await self._answer("/generate", body))
                return
            async with aclosing(self._chunks(body)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._count_streams(-1)

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncGenerator[StreamedTokens, None]:
        events, num_read = self._events("/generate", body), 0
        is_ended = is_left = False
        reading: asyncio.Future[str | None] | None = None
        try:
            while not is_ended:
                reading = asyncio.ensure_future(_next(events))
                data = await asyncio.shield(reading)  # if the caller leaves, the stream can still be read to its end
                if data is None:
                    return
                chunk = read_answer(data, num_read)
                num_read += len(chunk.tokens)
                is_ended = chunk.stop_reason is not None
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            is_left = not is_ended and self._paused is None  # while it is paused, it ends no request
            raise
        finally:
            assert reading is not None, "set before anything is awaited"
            if is_left:
                self._count_streams(1)
                task = asyncio.create_task(self._end_stream(body["rid"], events, reading))
                self._leaving.add(task)
                task.add_done_callback(self._has_ended)
            else:
                await _close(events, reading)

    async def _end_stream(self, rid: str, events: AsyncGenerator[str, None], reading: asyncio.Future[Any]) -> None:
        """End a request whose caller has left, and wait until the server has.

        If the connection was closed at once, the request could still run when an update empties the cache. The update
        would fail, before SGLang 0.5.22 with an assertion of its scheduler.
        """
        try:
            with suppress(LinkLost, Garbage, HeadwaterError, TimeoutError):
                async with asyncio.timeout(_LEAVE_LIMIT_S):
                    await self._call("POST", "/abort_request", {"rid": rid})
                    await reading
                    async for _ in events:
                        pass
        finally:
            await _close(events, reading)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self._count_streams(-1)

    def _count_streams(self, difference: int) -> None:
        self._num_streams += difference
        if self._num_streams:
            self._none_left.clear()
        else:
            self._none_left.set()

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await super().close()

    async def abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_request", {"rid": _rid(request_id)})

    async def pause(self, mode: PauseMode) -> None:
        if mode != "keep" and self._holds_requests(mode):  # it would wait forever for requests that do not run
            await self.resume()
        if mode == "wait" and self._num_streams:  # no new ones are sent meanwhile
            await self._none_left.wait()
        body = {"mode": _PAUSE_MODE[mode]} if self.dialect.has_pause_modes else {}
        await self._call("POST", "/pause_generation", body, is_text=True)
        self._paused = mode if self.dialect.has_pause_modes else "abort"

    def _holds_requests(self, mode: PauseMode) -> bool:
        """Whether it may have requests that neither run nor can be ended. After it has ended all, it keeps new ones
        outside its scheduler, where only those that should finish are in the way."""
        if self._paused == "abort":
            return mode == "wait" and self._num_streams > 0
        return self._paused is not None

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, is_text=True)
        self._paused = None

    async def reload(self, folder: str, label: str, *, keeps_cache: bool = False) -> None:
        body = {"model_path": folder, "weight_version": label, "flush_cache": not keeps_cache}
        await self._succeeds("/update_weights_from_disk", body)

    async def set_label(self, label: str) -> bool:
        return False  # its call for that also ends all requests

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join the process group over which weights are sent; returns when all members have come."""
        await self._succeeds("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        await self._call("POST", "/destroy_weights_update_group", {"group_name": name}, limit_s=_LEAVE_LIMIT_S)

    async def begin_update(self) -> None:
        """Before the first tensors of an update."""
        if not self.dialect.has_update_calls or self.is_ours:
            return
        try:
            await self._succeeds("/begin_weight_update", {})
        except RequestError as refusal:
            try:
                await self._succeeds("/end_weight_update", {})  # of an update that broke and has left it open
            except RequestError:
                raise refusal from None  # none was open, so there is another reason
            await self._succeeds("/begin_weight_update", {})

    async def end_update(self) -> None:
        """After the last tensors of an update."""
        if self.dialect.has_update_calls and not self.is_ours:
            await self._succeeds("/end_weight_update", {})

    @property
    def takes_whole(self) -> bool:
        """``headwater serve`` checks the tensors of a model together."""
        return self.is_ours

    async def receive(self, body: Mapping[str, Any]) -> str:
        """Receive tensors over the group; returns when the model has them."""
        await self._succeeds("/update_weights_from_distributed", body)
        return ""  # SGLang tells no checksum

    async def _succeeds(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._call("POST", path, body)
        if not answer.get("success"):
            raise RolloutFailed(f"{self.url}{path}: {answer.get('message', answer)}")

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, is_text=True)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, is_text=True)


def read_info(told: Mapping[str, Any], model: Mapping[str, Any], dialect: SglangDialect) -> ServerInfo:
    """From ``/server_info`` and ``/model_info``."""
    can: Mapping[str, Any] = told.get("capabilities") or {}
    # Older versions tell only the seed that a process has chosen. The label of its weights differs, too.
    instance = told.get("instance") or f"{told.get('startup_time', '')}-{told.get('random_seed', '')}"
    vocab_size = told.get("vocab_size")
    # In older versions, model_path becomes the folder of the weights that the server was given last, in both answers.
    started_with = told["model_path"] if "launch_command" in told else model.get("tokenizer_path")
    return ServerInfo(
        version=str(told["version"]),
        model=str(started_with or model["model_path"]),
        dtype=str(can.get("dtype") or told.get("dtype") or "auto"),
        instance=str(instance),
        max_model_tokens=int(told.get("context_length") or told.get("max_req_input_len") or 0),
        max_sequences=int(told.get("max_running_requests") or told.get("max_sequences") or 0),
        device=str(told.get("device") or ""),
        # A server that prepares a step during the one before counts a token of the old weights as one of the new.
        labels_tokens=dialect.labels_tokens and ("instance" in told or bool(told.get("disable_overlap_schedule"))),
        can_sleep=bool(told.get("enable_memory_saver") or can.get("memory_tags")),
        label=str(model.get("weight_version") or ""),
        num_workers=int(told.get("tp_size") or 1),
        vocab_size=None if vocab_size is None else int(vocab_size),
        # Older versions do not tell. All take images if their model does.
        takes_media=bool(can.get("media", model.get("has_image_understanding", True))),
        published_names="instance" not in told,
        keeps_features="instance" not in told and not _keeps_no_features(told),
    )


def _keeps_no_features(told: Mapping[str, Any]) -> bool:
    """Whether every process of the server tells that it was started as ``NO_FEATURES`` says."""
    states = told.get("internal_states") or [{}]
    return all((each.get("env_vars") or {}).get("SGLANG_VLM_CACHE_SIZE_MB") == "0" for each in states)


async def _next(events: AsyncGenerator[str, None]) -> str | None:
    return await anext(events, None)


async def _close(events: AsyncGenerator[str, None], reading: asyncio.Future[Any]) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)  # a generator that runs cannot be closed
    await events.aclose()


def write_request(sending: Sending, dialect: SglangDialect, *, streams_new_tokens: bool = False) -> dict[str, Any]:
    """The body of ``/generate``. Stop strings are not sent: the session looks for them."""
    request = sending.request
    sampling, num_given = request.sampling, len(request.given_tokens)
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens - num_given,
        "min_new_tokens": max(0, sampling.min_new_tokens - num_given),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": [*(() if sampling.ignore_end else sending.end_tokens), *sampling.stop_token_ids],
        "ignore_eos": sampling.ignore_end,
        "skip_special_tokens": False,
    }
    if dialect.has_seeds:
        # A continued response must not draw the same random numbers again.
        params["sampling_seed"] = derive_key(request.rng_key, num_given) & (2**31 - 1)
    if streams_new_tokens:
        params["stream_interval"] = STREAM_INTERVAL
    # Without updates in flight, every update empties the cache.
    key = {"extra_key": sending.cache_key} if dialect.labels_tokens else {}
    return {
        **key,
        **({"image_data": list(map(data_url, sending.prompt.images))} if request.media else {}),
        "rid": _rid(request.request_id),
        "input_ids": sending.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "stream": sending.streams or streams_new_tokens,
    }


def _rid(request_id: str) -> str:
    """SGLang aborts every request whose name begins with the given one, so no name may be the beginning of another."""
    return f"{request_id};"


def read_answer(text: str, num_read: int | None = None) -> StreamedTokens:
    """An answer of ``/generate``, or an event of its stream after ``num_read`` tokens.

    The tokens are taken from their log-probs, which every version returns.
    """
    try:
        answer = json.loads(text)
        if "error" in answer:
            raise RequestError(f"SGLang refuses a request: {_shown(answer['error'])}")
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        ended = meta["finish_reason"]
        if ended is not None and ended["type"] not in _STOP_REASONS:
            raise Garbage(f"the finish reason {ended['type']!r}")
        if ended is not None and int(ended.get("status_code") or 0) >= 400:  # outside a stream, it is the answer's
            raise refusal("POST /generate", int(ended["status_code"]), str(ended.get("message")))
        if num_read is not None:
            entries = _new_entries(entries, int(meta["completion_tokens"]) - num_read, ended)
        pairs = [(float(entry[0]), int(entry[1])) for entry in entries]
        num_prompt = meta.get("prompt_tokens")
        spans, label = read_spans(meta.get("weight_versions")), str(meta.get("weight_version") or "")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Garbage(f"{type(error).__name__}: {error}; the answer: {_shown(text)}") from error
    for logprob, token in pairs:
        if not logprob <= 0.01:  # also for NaN
            raise LogitsBroken(f"SGLang reports the log-prob {logprob} for token {token}: its logits are not numbers")
    tokens, logprobs = tuple(token for _, token in pairs), tuple(min(each, 0.0) for each, _ in pairs)
    reason = None if ended is None else _STOP_REASONS[ended["type"]]
    return StreamedTokens(tokens, logprobs, reason, spans, label, num_prompt=num_prompt)


def _new_entries(entries: list[Any], num_new: int, ended: Any) -> list[Any]:
    """The log-probs of an event's new tokens.

    They are the last ones, whether the event has the whole response, only what is new, or both, which happens if a
    request is aborted after it was moved back into SGLang's queue.
    """
    if num_new <= len(entries):
        return entries[len(entries) - max(0, num_new) :]
    if ended is not None and ended["type"] == "abort":
        return []  # older versions tell no log-probs then
    raise LinkLost(f"{num_new - len(entries)} tokens of a stream are missing")


def _shown(value: Any) -> str:
    return str(value)[:_NUM_CHARACTERS_SHOWN]
