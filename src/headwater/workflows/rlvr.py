"""Single turn with a verifiable reward: one prompt, one response, one score."""

from __future__ import annotations

from headwater.core.errors import RolloutFailed
from headwater.core.protocols import EpisodeInput, InferenceEngine
from headwater.core.records import ModelRequest, Trajectory
from headwater.workflows import WORKFLOWS, WorkflowContext


@WORKFLOWS.register
class RlvrWorkflow:
    def __init__(self, context: WorkflowContext) -> None:
        self._context = context

    async def arun_episode(self, engine: InferenceEngine, data: EpisodeInput) -> Trajectory:
        if data.prompt.multi_modal:
            raise RolloutFailed(
                f"row {data.prompt.uid}: has {', '.join(data.prompt.multi_modal)}, and workflow rlvr is for text; "
                "leave those columns out, or set rollout.workflow to one that hands them to the model"
            )
        request = ModelRequest(
            request_id=f"{data.prompt.uid}#{data.sample}",
            input_tokens=data.prompt.tokens,
            sampling=self._context.sampling,
            rng_key=data.rng_key,
        )
        response = await engine.agenerate(request)
        text = self._context.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        score = await self._context.reward.score(data.prompt, text)
        return Trajectory.from_response(data.prompt, data.sample, response, score, {"response_text": text})
