"""A trajectory in the making: what the model saw and wrote so far, token by token.

For episodes of more than one response. Tokens are only ever added, so what the model reads in its next turn is exactly
what stands in the trajectory that it learns from:

    transcript = Transcript(data.prompt, data.sample)
    response = await engine.agenerate(ModelRequest(..., input_tokens=transcript.tokens, ...))
    transcript.add_response(response)
    transcript.add_given(tokens_of_the_reply)
    ...
    return transcript.finish(reward=score.value, stop_reason=response.stop_reason)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.records import NOT_SAMPLED, ModelResponse, Prompt, StopReason, Trajectory


class Transcript:
    def __init__(self, prompt: Prompt, sample: int) -> None:
        self._prompt = prompt
        self._sample = sample
        self._tokens: list[int] = []
        self._loss_mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.add_given(prompt.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything so far: the input of the next request."""
        return tuple(self._tokens)

    @property
    def num_response_tokens(self) -> int:
        """Everything after the prompt, whoever wrote it: what counts against rollout.max_new_tokens."""
        return len(self._tokens) - len(self._prompt.tokens)

    def add_response(self, response: ModelResponse) -> None:
        """What the model wrote, to be trained on. It must have seen this transcript and nothing else."""
        if response.input_tokens != self.tokens:
            raise ValueError(
                f"{self._prompt.uid}#{self._sample}: the response was made for {len(response.input_tokens)} other "
                f"tokens than the {len(self._tokens)} of the transcript; send transcript.tokens as they are"
            )
        self._tokens += response.output_tokens
        self._loss_mask += [1] * len(response.output_tokens)
        self._logprobs += response.output_logprobs
        self._versions += response.output_versions

    def add_given(self, tokens: Sequence[int]) -> None:
        """What the model reads and did not write: feedback, the reply of a tool, the template around them."""
        self._tokens += tokens
        self._loss_mask += [0] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [NOT_SAMPLED] * len(tokens)

    def finish(
        self,
        *,
        reward: float,
        stop_reason: StopReason,
        turn_rewards: Sequence[float] = (),
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        return Trajectory(
            uid=self._prompt.uid,
            sample=self._sample,
            tokens=self.tokens,
            prompt_length=len(self._prompt.tokens),
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            reward=reward,
            stop_reason=stop_reason,
            turn_rewards=tuple(turn_rewards),
            info=info or {},
        )
