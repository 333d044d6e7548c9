"""What the server's tests share: the tiny model's limits, and checks of error messages."""

from __future__ import annotations

import pytest
from tiny import tokenizer

from headwater.core.protocols import EngineLimits
from headwater.serving.errors import ApiError
from headwater.serving.options import ServerOptions
from headwater.serving.prompt import ModelLimits

NAME = "tiny:qwen3"
OPTIONS = ServerOptions(NAME)


def limits(max_model_tokens: int = 64, max_queue: int = 32, max_request_tokens: int | None = None) -> ModelLimits:
    """The KV cache holds everything the model supports, unless ``max_request_tokens`` is given."""
    most = max_model_tokens if max_request_tokens is None else max_request_tokens
    return ModelLimits(tokenizer(), EngineLimits(512, max_model_tokens, most, max_queue))


def refusal(call, *arguments) -> ApiError:
    """The error that ``call`` raises."""
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def assert_refused(read, cases) -> None:
    """``read`` refuses the body of every case with a message that contains the given part."""
    for body, part in cases:
        message = str(refusal(read, body))
        assert part in message, f"{body}: {message}"
