"""A workflow as one would write it for AReaL: all imports are AReaL's."""

import asyncio
import uuid

import torch
from areal.api.cli_args import GenerationHyperparameters
from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import ModelRequest
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow
from areal.utils import logging, stats_tracker
from areal.utils.data import concat_padded_tensors

logger = logging.getLogger("answer")


class AnswerWorkflow(RolloutWorkflow):
    def __init__(
        self,
        reward_fn,
        gconfig: GenerationHyperparameters,
        tokenizer,
        enable_thinking: bool,
        dump_dir: str | None = None,
    ):
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        self.reward = AsyncRewardWrapper(reward_fn, max_workers=self.gconfig.max_workers)

    async def arun_episode(self, engine: InferenceEngine, data):
        input_ids = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, enable_thinking=self.enable_thinking
        )
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        responses = await asyncio.gather(*[engine.agenerate(request) for _ in range(self.gconfig.n_samples)])
        assert engine.get_version() >= 0
        results = []
        for response in responses:
            reward = await self.reward(
                self.tokenizer.decode(input_ids),
                self.tokenizer.decode(response.output_tokens),
                response.input_tokens,
                response.output_tokens,
                **data,
            )
            stats_tracker.get("rollout").scalar(reported=reward)
            sequence = response.input_tokens + response.output_tokens
            results.append(
                {
                    "input_ids": torch.tensor(sequence).unsqueeze(0),
                    "loss_mask": torch.tensor([0] * response.input_len + [1] * response.output_len).unsqueeze(0),
                    "logprobs": torch.tensor([0.0] * response.input_len + response.output_logprobs).unsqueeze(0),
                    "versions": torch.tensor([-1] * response.input_len + response.output_versions).unsqueeze(0),
                    "attention_mask": torch.ones(len(sequence), dtype=torch.bool).unsqueeze(0),
                    "rewards": torch.tensor([float(reward)]),
                }
            )
        return concat_padded_tensors(results)
