"""What the server's tests share: the tiny model's limits, and how a refusal reads."""

from __future__ import annotations

import pytest
from tiny import tokenizer

from headwater.core.protocols import EngineLimits
from headwater.serving.errors import ApiError
from headwater.serving.prompt import ModelLimits

NAME = "tiny:qwen3"


def limits(max_model_tokens: int = 64, max_queue: int = 32, max_request_tokens: int | None = None) -> ModelLimits:
    """The cache holds what the model takes unless ``max_request_tokens`` is less."""
    most = max_model_tokens if max_request_tokens is None else max_request_tokens
    return ModelLimits(tokenizer(), EngineLimits(512, max_model_tokens, most, max_queue))


def refusal(call, *arguments) -> ApiError:
    """The error that ``call`` raises."""
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value
