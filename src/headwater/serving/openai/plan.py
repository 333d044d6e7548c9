"""What an OpenAI request comes to: requests for the engine, and what the reply should show."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.records import ModelRequest, SamplingParams
from headwater.serving.randomness import sample_keys
from headwater.serving.text import TextRules


@dataclass(frozen=True)
class Shape:
    """What a reply shows, and how."""

    stream: bool
    include_usage: bool
    """End a stream with the token counts."""
    logprobs: bool
    token_ids: bool
    rules: TextRules


@dataclass(frozen=True)
class Plan:
    """``requests`` holds the samples of the first prompt, then those of the second; choices are numbered alike."""

    name: str
    model: str
    created: int
    requests: tuple[ModelRequest, ...]
    num_samples: int
    shape: Shape

    @classmethod
    def build(
        cls,
        prefix: str,
        model: str,
        prompts: Sequence[tuple[tuple[int, ...], SamplingParams]],
        *,
        num_samples: int,
        seed: int | None,
        shape: Shape,
    ) -> Plan:
        name = f"{prefix}-{uuid.uuid4().hex}"
        requests: list[ModelRequest] = []
        for tokens, sampling in prompts:
            for key in sample_keys(seed, num_samples):
                requests.append(ModelRequest(f"{name}-{len(requests)}", tokens, sampling, key))
        return cls(name, model, int(time.time()), tuple(requests), num_samples, shape)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.input_tokens) for request in self.requests[:: self.num_samples])

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """For ``ActiveRequests``: the reply's id stands for all its choices."""
        return {self.name: tuple(request.request_id for request in self.requests)}
