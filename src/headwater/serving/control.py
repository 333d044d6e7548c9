"""Bodies of Headwater's control calls, and the weight update that they and SGLang's calls start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, get_args

from headwater.core.errors import WaitTimeout
from headwater.core.protocols import ALL_TAGS, InferenceEngine, MemoryTag, UpdateMode
from headwater.core.waits import wait_for_future
from headwater.models.checksum import dtype_of_checksum
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields
from headwater.weights.file import file_update

_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)
UPDATE_LIMIT_S = 600.0
"""How long an engine may take to accept new weights, unless the call gives another limit."""


def read_nothing(body: Mapping[str, Any]) -> None:
    Fields(body).done()


def read_memory_tags(body: Mapping[str, Any]) -> tuple[MemoryTag, ...]:
    """The body of calls about the engine's memory: ``{"tags": ["kv_cache"]}``. The default is all tags."""
    fields = Fields(body)
    names = fields.texts("tags")
    fields.done()
    for place, name in enumerate(names):
        if name not in ALL_TAGS:
            raise wrong(f"tags[{place}]", name, f"must be one of {', '.join(ALL_TAGS)}")
    return tuple(tag for tag in ALL_TAGS if tag in names) if names else ALL_TAGS


def read_version(body: Mapping[str, Any]) -> int:
    fields = Fields(body)
    version = _needed_version(fields)
    fields.done()
    return version


@dataclass(frozen=True)
class Abort:
    request_id: str | None
    """None aborts all requests."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Abort:
        fields = Fields(body)
        request_id, everything = fields.text("request_id"), fields.flag("all", False)
        fields.done()
        if (request_id is None) == (not everything):
            raise ApiError("request_id: name one request, or set all = true", param="request_id")
        return cls(request_id)


@dataclass(frozen=True)
class WeightsCall:
    """New weights from a file or folder."""

    version: int
    mode: UpdateMode | None
    """None uses the engine's own setting."""
    file: str
    limit_s: float = UPDATE_LIMIT_S
    is_checked: bool = False
    """The client has checked the values, so the file is read only once."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> WeightsCall:
        fields = Fields(body)
        version, mode, given = _needed_version(fields), fields.choice("mode", _MODES), fields.mapping("source")
        limit_s = fields.number("limit_s", UPDATE_LIMIT_S, minimum=1)
        fields.done()
        source = Fields(given or {}, "source")
        file, is_checked = source.text("file"), source.flag("is_checked", False)
        source.done()
        if not file:
            raise ApiError('source: is missing; give {"file": path}, a safetensors file or a folder', param="source")
        return cls(version, mode, file, limit_s, is_checked)


async def update_weights(
    engine: InferenceEngine,
    version: int,
    mode: UpdateMode | None,
    file: str,
    limit_s: float = UPDATE_LIMIT_S,
    *,
    is_checked: bool = False,
) -> None:
    """Have the engine take the weights of a file or folder, and return when it uses them.

    Generation continues while the file is checked.
    """

    def update() -> None:
        dtype = dtype_of_checksum(engine.capabilities.dtype)
        with file_update(file, version, dtype, is_checked=is_checked) as stream:
            _wait_for(engine.update_weights(stream, mode), file, limit_s)

    # Shielded, so that a client that disconnects does not cancel an update that has begun.
    await asyncio.shield(asyncio.to_thread(update))


def _wait_for(done: Future[None], source: str, limit_s: float) -> None:
    def describe() -> str:
        return (
            f"the engine takes the weights of {source}; running responses may have to end first, and limit_s (in a "
            "training run rollout.timeout_s) allows more time"
        )

    try:
        wait_for_future(done, describe, kind="weights", hard_limit_s=limit_s)
    except WaitTimeout:
        if not done.cancel() and done.done():
            return done.result()  # it finished at the last moment
        raise


def _needed_version(fields: Fields) -> int:
    version = fields.optional_integer("version", minimum=0)
    if version is None:
        raise ApiError("version: is missing; give the policy version, a whole number", param="version")
    return version
