"""Your own episode: a class with `arun_episode`, named in the config.

    headwater train recipes/quickstart.yaml \
        rollout.workflow=examples/custom_workflow.py:BestOfTwo rollout.workflow_args.min_reward=0.0

This one answers twice and trains on the better answer. Return None to reject an episode: its group is dropped, counted
and replaced.
"""

from __future__ import annotations

from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.randomness import derive_key
from headwater.core.records import ModelRequest, Trajectory
from headwater.workflows import WorkflowContext


class BestOfTwo:
    def __init__(self, context: WorkflowContext, *, min_reward: float = 0.0) -> None:
        self._context = context
        self._min_reward = min_reward

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory | None:
        answers = [await self._answer(engine, data, attempt) for attempt in range(2)]
        best = max(answers, key=lambda answer: answer.reward)
        return best if best.reward >= self._min_reward else None

    async def _answer(self, engine: EpisodeEngine, data: EpisodeInput, attempt: int) -> Trajectory:
        request = ModelRequest(
            request_id=f"{data.prompt.uid}#{data.sample}.{attempt}",
            input_tokens=data.prompt.tokens,
            sampling=self._context.sampling,
            rng_key=derive_key(data.rng_key, attempt),  # each attempt draws its own tokens, reproducibly
        )
        response = await engine.agenerate(request)
        text = self._context.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        score = await self._context.reward.score(data.prompt, text)
        info = {"response_text": text, "attempt": attempt}
        return Trajectory.from_response(data.prompt, data.sample, response, score, info)
