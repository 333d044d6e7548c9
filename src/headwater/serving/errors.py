"""Error replies: a status code, and a message that names the field, its value and the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headwater.core.errors import (
    BaseMissing,
    HeadwaterError,
    LogitsBroken,
    MemoryRefused,
    ModelError,
    QueueFull,
    RequestError,
    RolloutFailed,
    WaitTimeout,
    WeightsError,
    WeightsIncomplete,
)

RETRY_AFTER_S = 1
_NUM_CHARACTERS_SHOWN = 60
_LONGEST_NAME = 100
_MESSAGE_BEGIN, _MESSAGE_END = 1200, 400
"""A longer message loses its middle. Its beginning names the field, its end the remedy."""


class ApiError(HeadwaterError):
    """An error reply in the format that OpenAI's clients read."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _MESSAGE_BEGIN + _MESSAGE_END:
            message = f"{message[:_MESSAGE_BEGIN]} [...] {message[-_MESSAGE_END:]}"
        super().__init__(message)
        self.status = status
        self.param = None if param is None else cut(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def cut(name: str) -> str:
    """A name that a client chose, such as that of an unknown field, short enough for a message."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def wrong(field: str, value: Any, rule: str, *, code: str | None = None) -> ApiError:
    """``max_tokens = 0: must be >= 1``"""
    return ApiError(f"{cut(field)} = {shown(value)}: {rule}", param=field, code=code)


def unsupported_by_engine(message: str, *, param: str | None = None) -> ApiError:
    """The call is valid, but the engine behind this server lacks the capability for it."""
    return ApiError(message, status=501, param=param, code="unsupported_by_engine")


def api_error(error: HeadwaterError) -> ApiError:
    """The reply for an error that another part of Headwater raised."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, QueueFull):
        return ApiError(message, status=429, code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, RequestError):
        return ApiError(message, code="bad_request")
    if isinstance(error, WeightsIncomplete):
        return ApiError(message, status=500, code="weights_incomplete")
    if isinstance(error, BaseMissing):
        return ApiError(message, status=409, code="weights_base_missing")
    if isinstance(error, WeightsError | ModelError):
        return ApiError(message, code="weights_refused")
    if isinstance(error, WaitTimeout):
        return ApiError(message, status=504, code="timeout")
    if isinstance(error, MemoryRefused):
        return ApiError(message, status=409, code="memory_refused")
    if isinstance(error, LogitsBroken):
        return ApiError(message, status=500, code="logits_broken")
    if isinstance(error, RolloutFailed):  # an engine raises this after it has failed or was closed
        return ApiError(message, status=503, code="engine_unavailable")
    return ApiError(message, status=500, code="internal_error")


def shown(value: Any) -> str:
    """A JSON value for a message. The text is short even if the value is long."""
    if isinstance(value, dict | list) and len(value) > 8:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        value = value[:_NUM_CHARACTERS_SHOWN]  # do not encode megabytes to show a line
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _NUM_CHARACTERS_SHOWN else f"{text[: _NUM_CHARACTERS_SHOWN - 3]}..."
