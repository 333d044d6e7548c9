"""What SGLang's steering calls ask for: aborting, pausing and weights from disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headwater.config.schema import UpdateMode
from headwater.serving.errors import ApiError, wrong
from headwater.serving.fields import Fields, is_integer

PauseMode = Literal["abort", "retract", "in_place"]
_PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


@dataclass(frozen=True)
class AbortCall:
    rid: str | None
    """None aborts all."""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> AbortCall:
        fields = Fields(body)
        rid, abort_all = fields.text("rid"), fields.flag("abort_all", False)
        fields.ignored("finished_reason", "abort_message")
        fields.done()
        if not rid and not abort_all:
            raise ApiError("rid: is missing; name a request, or set abort_all = true", param="rid")
        return cls(None if abort_all else rid)


@dataclass(frozen=True)
class PauseCall:
    """``abort`` ends what runs; ``retract`` and ``in_place`` keep it, and here are one and the same."""

    mode: PauseMode

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> PauseCall:
        fields = Fields(body)
        mode = fields.choice("mode", _PAUSE_MODES)
        fields.done()
        return cls(mode or "abort")


def read_continue(body: Mapping[str, Any]) -> None:
    fields = Fields(body)
    fields.ignored("torch_empty_cache")  # about memory that the allocator keeps, not about answers
    fields.done()


@dataclass(frozen=True)
class UpdateFromDisk:
    model_path: str
    version: int | None
    """None is one more than the last."""
    mode: UpdateMode | None
    """None is the engine's own."""
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
        # Flushing the cache is starting running requests again from their tokens; keeping it is going on with old KV.
        mode: UpdateMode | None = None if flush is None else "interrupt" if flush else "in_flight"
        read = cls(
            model_path=path,
            version=_version(fields.raw("weight_version")),
            mode=mode,
            abort_all=fields.flag("abort_all_requests", False),
            keep_pause=fields.flag("keep_pause", False),
        )
        fields.neutral("load_format", ["auto", "safetensors"], "weights are read from safetensors files")
        fields.neutral("is_async", [False], "the reply tells whether the weights were taken")
        fields.neutral("manifest", [{}], "what a safetensors file holds is read from its header")
        fields.ignored("torch_empty_cache", "recapture_cuda_graph", "token_step")
        fields.done()
        return read


def _version(value: Any) -> int | None:
    """SGLang's versions are texts; ours are numbers, so a text must hold one."""
    if value is None:
        return None
    if is_integer(value) and value >= 0:
        return int(value)
    # isdecimal alone would take other scripts' digits as well.
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    raise wrong("weight_version", value, "must be a whole number >= 0, as a number or as text")
