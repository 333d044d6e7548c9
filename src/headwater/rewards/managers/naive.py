"""One response at a time, each as soon as it is there."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import nullcontext

from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed, UnknownName
from headwater.core.records import Prompt, Score
from headwater.core.registry import blaming
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
        self._custom: ScoreFunction | None = None
        if config.function:
            with blaming(f"reward.function = {config.function}"):
                self._custom = SCORERS.resolve(config.function)
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
            # Rows are named after the file or task they come from.
            is_borrowed = prompt.uid.partition("/")[0].partition("#")[0] == prompt.data_source
            origin = ", the name of its file or task, which stands in where a row has none" if is_borrowed else ""
            raise RewardFailed(
                f"row {prompt.uid}: no built-in scorer for data_source {prompt.data_source!r}{origin} ({error}); "
                "add a data_source to the rows that names a scorer, or set reward.function to your own compute_score"
            ) from error
        return function
