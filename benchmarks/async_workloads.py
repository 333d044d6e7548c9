"""Two kinds of episodes that make a synchronous learner wait: long-tailed lengths, and a tool that takes its time.

How long an episode takes is drawn from its prompt and sample, not from what runs beside it: every run draws the same.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np

from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.randomness import derive_key
from headwater.core.records import Trajectory
from headwater.workflows import WorkflowContext
from headwater.workflows.rlvr import RlvrWorkflow


def log_normal(data: EpisodeInput, *, mean: float, sigma: float) -> float:
    """The same number for the same prompt and sample; ``sigma`` is that of its logarithm."""
    key = derive_key(data.prompt.uid, data.sample)
    generator = np.random.default_rng(abs(key))
    return float(generator.lognormal(math.log(mean) - sigma**2 / 2, sigma))


class LongTailed(RlvrWorkflow):
    """Responses of log-normal length, the longest ``max_new_tokens``; the model's end token does not end them."""

    def __init__(self, context: WorkflowContext, *, mean_tokens: float, sigma: float) -> None:
        super().__init__(context)
        self._base, self._mean_tokens, self._sigma = context, mean_tokens, sigma

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        longest = self._base.sampling.max_new_tokens
        length = round(log_normal(data, mean=self._mean_tokens, sigma=self._sigma))
        sampling = replace(self._base.sampling, max_new_tokens=min(max(1, length), longest), ignore_end=True)
        return await RlvrWorkflow(replace(self._base, sampling=sampling)).arun_episode(engine, data)


class SlowTool(RlvrWorkflow):
    """Responses of ``max_new_tokens``, then a tool that answers after a log-normal time, then the score."""

    def __init__(self, context: WorkflowContext, *, mean_s: float, sigma: float) -> None:
        super().__init__(replace(context, sampling=replace(context.sampling, ignore_end=True)))
        self._mean_s, self._sigma = mean_s, sigma

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        trajectory = await super().arun_episode(engine, data)
        await asyncio.sleep(log_normal(data, mean=self._mean_s, sigma=self._sigma))
        return trajectory


def compute_score(*, solution_str: str, **_: Any) -> float:
    """Differs from response to response, so that every sample has something to teach."""
    return (len(solution_str) % 7) / 7
