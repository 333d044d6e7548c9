"""What Headwater's own control calls ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from headwater.config.schema import UpdateMode
from headwater.serving.errors import ApiError
from headwater.serving.fields import Fields

_MODES: tuple[UpdateMode, ...] = get_args(UpdateMode)


def read_nothing(body: Mapping[str, Any]) -> None:
    Fields(body).done()


def read_version(body: Mapping[str, Any]) -> int:
    fields = Fields(body)
    version = _needed_version(fields)
    fields.done()
    return version


@dataclass(frozen=True)
class Abort:
    request_id: str | None
    """None aborts all."""

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
    """New weights from a file or folder, or from memory that another process filled."""

    version: int
    mode: UpdateMode | None
    """None is the engine's own."""
    file: str | None
    shared_memory: str | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> WeightsCall:
        fields = Fields(body)
        version, mode, given = _needed_version(fields), fields.choice("mode", _MODES), fields.mapping("source")
        fields.done()
        if given is None:
            raise ApiError('source: is missing; give {"file": path} or {"shared_memory": name}', param="source")
        source = Fields(given, "source")
        file, shared_memory = source.text("file"), source.text("shared_memory")
        source.done()
        if bool(file) == bool(shared_memory):
            raise ApiError('source: give {"file": path} or {"shared_memory": name}, one of the two', param="source")
        return cls(version, mode, file or None, shared_memory or None)


def _needed_version(fields: Fields) -> int:
    version = fields.optional_integer("version", minimum=0)
    if version is None:
        raise ApiError("version: is missing; give the number of the policy version", param="version")
    return version
