"""An engine that answers what it was told to, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.requests import ModelRequest, ModelResponse


class ScriptedEngine:
    """One list of tokens per request, cut at the request's limit; the version rises with every request."""

    def __init__(self, answers: Sequence[Sequence[int]], end_token: int, version: int = 0) -> None:
        self._answers = [tuple(answer) for answer in answers]
        self._end_token = end_token
        self._version = version
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        turn = len(self.requests)
        self.requests.append(request)
        output = self._answers[turn][: request.sampling.max_new_tokens]
        return ModelResponse(
            input_tokens=request.input_tokens,
            output_tokens=output,
            output_logprobs=tuple(-0.5 - turn - 0.01 * position for position in range(len(output))),
            output_versions=(self._version + turn,) * len(output),
            stop_reason="stop" if output and output[-1] == self._end_token else "length",
        )
