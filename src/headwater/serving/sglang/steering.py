"""Bodies of SGLang's control calls: abort, pause, continue, and weights from disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headwater.core.capabilities import UpdateMode
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, is_integer

PauseMode = Literal["abort", "retract", "in_place"]
_PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


@dataclass(frozen=True)
class AbortCall:
    rid: str | None
    """None aborts all requests."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> AbortCall:
        fields = Fields(body)
        rid, abort_all = fields.text("rid"), fields.flag("abort_all", False)
        fields.ignored("finished_reason", "abort_message", "weight_versions")
        fields.done()
        if not rid and not abort_all:
            raise ApiError("rid: is missing; name a request, or set abort_all = true", param="rid")
        return cls(None if abort_all else rid)


@dataclass(frozen=True)
class PauseCall:
    """``abort`` ends the running requests. ``retract`` and ``in_place`` keep them, and are the same here."""

    mode: PauseMode

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> PauseCall:
        fields = Fields(body)
        mode = fields.choice("mode", _PAUSE_MODES)
        fields.done()
        return cls(mode or "abort")


def read_continue(body: Mapping[str, Any]) -> None:
    fields = Fields(body)
    fields.ignored("torch_empty_cache")  # concerns the memory allocator only
    fields.done()


@dataclass(frozen=True)
class UpdateFromDisk:
    model_path: str
    version: int | None
    """None increments the current version."""
    mode: UpdateMode | None
    """None uses the engine's own setting."""
    abort_all: bool
    keep_pause: bool

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> UpdateFromDisk:
        fields = Fields(body)
        path = fields.text("model_path")
        if not path:
            raise ApiError("model_path: is missing; give a safetensors file or a model folder", param="model_path")
        flush = fields.raw("flush_cache")
        if flush is not None and not isinstance(flush, bool):
            raise wrong("flush_cache", flush, "must be true or false")
        # With a flushed cache running requests are recomputed from their tokens, otherwise they keep their old KV.
        mode: UpdateMode | None = None if flush is None else "interrupt" if flush else "in_flight"
        read = cls(
            model_path=path,
            version=read_weight_version(fields.raw("weight_version")),
            mode=mode,
            abort_all=fields.flag("abort_all_requests", False),
            keep_pause=fields.flag("keep_pause", False),
        )
        fields.neutral("load_format", ["auto", "safetensors"], "weights are read from safetensors files")
        fields.neutral("is_async", [False], "the reply says whether the update succeeded")
        fields.neutral("manifest", [{}], "the contents of a safetensors file are read from its header")
        fields.ignored("torch_empty_cache", "recapture_cuda_graph", "token_step")
        fields.done()
        return read


def read_weight_version(value: Any) -> int | None:
    """SGLang's versions are texts. Ours are numbers, so a text must contain one."""
    if value is None:
        return None
    if is_integer(value) and value >= 0:
        return int(value)
    # isdecimal alone would also accept digits of other scripts.
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    raise wrong("weight_version", value, "must be a whole number >= 0, as a number or as text")
