"""Single turn with a verifiable reward: one prompt, one response, one score."""

from __future__ import annotations

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.records import ModelRequest, Trajectory
from headwater.workflows import WORKFLOWS, WorkflowContext, refuse_media


@WORKFLOWS.register
class RlvrWorkflow:
    def __init__(self, context: WorkflowContext) -> None:
        self._context = context

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        refuse_media(data.prompt, "rlvr")
        request = ModelRequest(
            request_id=f"{data.prompt.uid}#{data.sample}",
            input_tokens=data.prompt.tokens,
            sampling=self._context.sampling,
            rng_key=data.rng_key,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            # Somebody else ended it in mid-sentence: what is there was never the answer, so it is not scored as one.
            raise RolloutFailed(f"request {request.request_id}: the engine aborted it")
        text = self._context.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        score = await self._context.reward.score(data.prompt, text)
        return Trajectory.from_response(data.prompt, data.sample, response, score, {"response_text": text})
