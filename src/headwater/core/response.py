"""What an engine returns: every token with its log-prob and policy version, complete or in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["stop", "length", "tool_calls", "abort"]

Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probs, the most likely first."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probs of the prompt's tokens under the model's own distribution, at temperature 1.

    There is one entry per token except for the first token, which nothing precedes.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...] = ()
    """Empty unless alternatives were requested."""


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """The response to a request: every token with its log-prob and the policy version that produced it."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_versions: tuple[int, ...]
    stop_reason: StopReason
    queue_s: float = 0.0
    generate_s: float = 0.0
    output_top_logprobs: tuple[Alternatives, ...] = ()
    """Per output token, its alternatives; empty unless requested."""
    prompt_scores: PromptScores | None = None

    def __post_init__(self) -> None:
        count = len(self.output_tokens)
        if len(self.output_logprobs) != count or len(self.output_versions) != count:
            raise ValueError(
                f"response has {count} tokens, {len(self.output_logprobs)} logprobs and "
                f"{len(self.output_versions)} versions; the three must be equally long"
            )

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a response. The last delta of a response has a ``stop_reason``."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason | None = None
    top_logprobs: tuple[Alternatives, ...] = ()
    """Per token, its alternatives; empty unless requested."""
    prompt_scores: PromptScores | None = None
    """In the first delta, if requested."""

    @classmethod
    def of(cls, response: ModelResponse) -> Delta:
        """A complete response as one delta."""
        return cls(
            response.output_tokens,
            response.output_logprobs,
            response.output_versions,
            response.stop_reason,
            response.output_top_logprobs,
            response.prompt_scores,
        )
