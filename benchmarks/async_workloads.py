"""Two kinds of episodes that make a synchronous learner wait: long-tailed lengths, and a slow tool.

The duration of an episode depends only on its prompt and sample, so it is the same in every run.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np

from headwater.core.protocols import EpisodeInput
from headwater.core.records import Trajectory
from headwater.core.requests import derive_key
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.rlvr import rlvr


def log_normal(data: EpisodeInput, *, mean: float, sigma: float) -> float:
    """The same number for the same prompt and sample; ``sigma`` is that of its logarithm."""
    key = derive_key(data.prompt.uid, data.sample)
    generator = np.random.default_rng(abs(key))
    return float(generator.lognormal(math.log(mean) - sigma**2 / 2, sigma))


class LongTailed:
    """Responses of log-normal length, at most ``max_new_tokens``; the model's end token does not end them."""

    def __init__(self, context: WorkflowContext, *, mean_tokens: float, sigma: float) -> None:
        self._context, self._mean_tokens, self._sigma = context, mean_tokens, sigma

    async def run(self, episode: Episode) -> Trajectory:
        longest = self._context.sampling.max_new_tokens
        length = round(log_normal(episode.data, mean=self._mean_tokens, sigma=self._sigma))
        return await _full_length(self._context, episode, min(max(1, length), longest))


class SlowTool:
    """Responses of ``max_new_tokens``, then a tool that answers after a log-normal time, then the score."""

    def __init__(self, context: WorkflowContext, *, mean_s: float, sigma: float) -> None:
        self._context, self._mean_s, self._sigma = context, mean_s, sigma

    async def run(self, episode: Episode) -> Trajectory:
        trajectory = await _full_length(self._context, episode, self._context.sampling.max_new_tokens)
        await asyncio.sleep(log_normal(episode.data, mean=self._mean_s, sigma=self._sigma))
        return trajectory


async def _full_length(context: WorkflowContext, episode: Episode, num_tokens: int) -> Trajectory:
    sampling = replace(context.sampling, max_new_tokens=num_tokens, ignore_end=True)
    return await rlvr(Episode(replace(context, sampling=sampling), episode.engine, episode.data))


def compute_score(*, solution_str: str, **_: Any) -> float:
    """Differs from response to response, so that every sample has something to teach."""
    return (len(solution_str) % 7) / 7
