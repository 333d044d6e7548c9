"""An agent loop in verl's interface: the model answers, is asked to check its answer, and answers again.

headwater train quickstart rollout.workflow=examples/verl_agent_loop.py:CheckTwice rollout.max_new_tokens=32

A file that imports these names from verl works unchanged.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from headwater.workflows.adapters.verl import AgentLoopBase, AgentLoopOutput, register, simple_timer

CHECK = {"role": "user", "content": "Check it."}


@register("check_twice")
class CheckTwice(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        check_ids = await self.apply_chat_template([CHECK], remove_system_prompt=True)
        ids, mask = list(prompt_ids), list[int]()
        request_id, metrics = uuid4().hex, dict[str, float]()
        params = {**sampling_params, "max_tokens": 8}
        for is_last in (False, True):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=params
                )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            if is_last or len(mask) + len(check_ids) >= self.rollout_config.response_length:
                break
            ids += check_ids
            mask += [0] * len(check_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=ids[len(prompt_ids) :],
            response_mask=mask,
            num_turns=3,
            metrics=metrics,
        )
