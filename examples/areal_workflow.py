"""A workflow in AReaL's interface: a wrong answer is tried again, for less reward.

headwater train quickstart rollout.workflow=examples/areal_workflow.py:Retry rollout.max_new_tokens=32

A file that imports these names from AReaL works unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from headwater.workflows.adapters.areal import AsyncRewardWrapper, ModelRequest, RolloutWorkflow

AGAIN = {"role": "user", "content": "Again."}


class Retry(RolloutWorkflow):
    def __init__(self, reward_fn: Any, gconfig: Any, tokenizer: Any, max_turns: int = 2) -> None:
        self.reward = AsyncRewardWrapper(reward_fn)
        self.gconfig = gconfig.new(max_new_tokens=8)
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.again = tokenizer.apply_chat_template([AGAIN], add_generation_prompt=True)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        ids = self.tokenizer.apply_chat_template(data["messages"], add_generation_prompt=True)
        mask, versions = [0], [-1]
        prompt, reward, turn = self.tokenizer.decode(ids), 0.0, 0
        while reward == 0 and turn < self.max_turns:
            ids += self.again if turn else []
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig))
            mask += [0] * (len(ids) - len(mask)) + [1] * response.output_len
            versions += [-1] * (len(ids) - len(versions)) + response.output_versions
            ids = ids + response.output_tokens
            completion = self.tokenizer.decode(response.output_tokens)
            reward = await self.reward(prompt, completion, response.input_tokens, response.output_tokens, **data)
            turn += 1
        columns = {"input_ids": ids, "loss_mask": mask, "versions": versions, "attention_mask": [1] * len(ids)}
        rewards = {"rewards": torch.tensor([reward * 0.9 ** (turn - 1)])}
        return {name: torch.tensor([values]) for name, values in columns.items()} | rewards
