"""What the tests of the endpoint share: an engine whose answers depend only on the request, and one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny

from headwater.core.protocols import EpisodeInput
from headwater.core.records import Prompt, Score, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams, derive_key
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.endpoint import EndpointWorkflow

AGENTS = Path(__file__).with_name("endpoint_agents.py")
END = "<|end|>"


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny.tokenizer().encode(text, add_special_tokens=False))


class KeyedEngine:
    """Answers with a number that the random key and the input decide, as a seeded engine does.

    ``texts`` are answers for the first requests instead. A request whose text has SLOW in it takes until it is
    cancelled.
    """

    def __init__(self, texts: Sequence[str] = (), *, delay_s: Callable[[ModelRequest], float] | None = None) -> None:
        self.texts = list(texts)
        self.requests: list[ModelRequest] = []
        self.cancelled: list[str] = []
        self._delay_s = delay_s

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        text = self.texts.pop(0) if self.texts else str(derive_key(request.rng_key, *request.input_tokens) % 1000)
        if self._delay_s is not None:
            await asyncio.sleep(self._delay_s(request))
        if "SLOW" in tiny.tokenizer().decode(request.input_tokens):
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled.append(request.request_id)
        tokens = encode(text + END)[: request.sampling.max_new_tokens]
        reason = "stop" if tokens[-1:] == encode(END) else "length"
        for stop in request.sampling.stop_strings:
            ends = [n for n in range(1, len(tokens) + 1) if stop in tiny.tokenizer().decode(tokens[:n])]
            tokens, reason = (tokens[: ends[0]], "stop") if ends else (tokens, reason)
        logprobs = tuple(-0.5 - n / 8 for n in range(len(tokens)))
        return ModelResponse(request.input_tokens, tokens, logprobs, (3,) * len(tokens), reason)


class LastDigit:
    """The run's reward function: the last digit of the last reply."""

    async def score(self, episode: Any) -> Score:
        digits = [each for each in episode.text if each.isdigit()]
        return Score(float(digits[-1]) if digits else -1.0, {"scored": episode.text})


def context(max_new_tokens: int = 120, **sampling: Any) -> WorkflowContext:
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return WorkflowContext(tiny.tokenizer(), LastDigit(), params, max_prompt_tokens=64)


async def episode(
    name: str, engine: Any, *, prompt: Prompt | None = None, sample: int = 0, room: int = 120, **settings: Any
) -> list[Trajectory]:
    """Run an agent of ``endpoint_agents.py``, or what the settings say if ``name`` is empty."""
    here = context(room)
    named = {"agent": f"{AGENTS}:{name}"} if name else {}
    workflow = EndpointWorkflow(here, **named, **settings)
    data = EpisodeInput(prompt or tiny.prompt(), sample, rng_key=11)
    return await workflow.run(Episode(here, engine, data))
