"""One response at a time, each as soon as it is there."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import nullcontext

from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed, UnknownName
from headwater.core.records import Prompt, Score
from headwater.observe.spans import Spans
from headwater.rewards.function import ScoreFunction, call_score_function
from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scorers import SCORERS


@REWARD_MANAGERS.register
class NaiveRewardManager:
    """Calls ``reward.function``, or the built-in scorer named by the row's ``data_source``."""

    def __init__(self, config: RewardConfig, spans: Spans) -> None:
        self._config = config
        self._spans = spans
        self._custom: ScoreFunction | None = SCORERS.resolve(config.function) if config.function else None
        if self._custom is not None and not callable(self._custom):
            raise RewardFailed(f"reward.function = {config.function}: not callable; name a function")
        self._free = asyncio.Semaphore(config.max_concurrent)

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        function = self._custom or self._built_in(prompt)
        # The clock of reward.timeout_s starts when a call does, not while it waits its turn.
        async with nullcontext() if inspect.iscoroutinefunction(function) else self._free:
            with self._spans.span("reward"):
                return await call_score_function(
                    function, prompt, response_text, self._config.function_args, timeout_s=self._config.timeout_s
                )

    def _built_in(self, prompt: Prompt) -> ScoreFunction:
        # "reasoning_gym:leg_counting" and "openai/gsm8k" name the scorers reasoning_gym and gsm8k.
        name = prompt.data_source.partition(":")[0].rpartition("/")[2]
        try:
            function: ScoreFunction = SCORERS.resolve(name)
        except UnknownName as error:
            raise RewardFailed(
                f"row {prompt.uid}: no built-in scorer for data_source {prompt.data_source!r} ({error}); "
                "set reward.function to your own compute_score"
            ) from error
        return function
