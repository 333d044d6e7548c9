"""An agent loop as one would write it for verl: all imports are verl's."""

import logging
import os
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__file__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


@register("answer_once")
class AnswerOnce(AgentLoopBase):
    def __init__(self, *args, bonus: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.bonus = bonus
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        images = (await self.process_vision_info(messages)).get("images")
        metrics = {}
        prompt_ids = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        )
        assert prompt_ids == await self.apply_chat_template(messages, images=images)
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=([1] * len(output.token_ids))[: self.response_length],
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            num_turns=2,
            metrics=metrics,
        )


class AnswerAltered(AnswerOnce):
    """Returns tokens for some rows that the model did not sample."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        if int(kwargs["uid"].rpartition("/")[2]) % 3 == 0:
            output.response_ids[0] = (output.response_ids[0] + 1) % 100
        return output
