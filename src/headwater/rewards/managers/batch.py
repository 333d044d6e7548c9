"""Scores many responses per call, for functions of lists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.config.rollout_schema import RewardConfig, SandboxConfig
from headwater.core.errors import RewardFailed
from headwater.core.records import Prompt, ScorableEpisode, Score
from headwater.observe.spans import Spans
from headwater.rewards.functions import ScoreFunction, ScoringFunction
from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scoring import Part, Scoring


@dataclass(eq=False)
class _Batch:
    """Episodes that wait for the next call of a function."""

    episodes: list[ScorableEpisode] = field(default_factory=list)
    scores: list[asyncio.Future[Score]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


@REWARD_MANAGERS.register
class BatchRewardManager(Scoring):
    """Collects responses that end at about the same time, and calls the function once for all of them.

    A call waits up to ``reward.batch_wait_s`` for at most ``reward.batch_size`` responses. Which responses share a call
    depends on when they end, so the score of one must not depend on the others. If a call fails, all its responses do.
    """

    def __init__(
        self,
        config: RewardConfig,
        spans: Spans,
        function: ScoreFunction | None = None,
        *,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        super().__init__(config, spans, function, sandbox=sandbox)
        self._batches: dict[ScoringFunction, _Batch] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def _function(self, part: Part, prompt: Prompt) -> ScoringFunction:
        function = super()._function(part, prompt)
        if not function.signature.is_batched:
            raise RewardFailed(
                f"reward.manager = batch: {function.place} scores one response per call; name a function of lists, "
                "such as compute_score(data_sources, solution_strs, ground_truths, extra_infos), or use "
                "reward.manager=naive",
                cause="bad_arguments",
            )
        return function

    async def _score_one(self, function: ScoringFunction, episode: ScorableEpisode) -> Score:
        loop = asyncio.get_running_loop()
        batch = self._batches.setdefault(function, _Batch())
        score: asyncio.Future[Score] = loop.create_future()
        batch.episodes.append(episode)
        batch.scores.append(score)
        if len(batch.episodes) >= self._config.batch_size:
            self._begin(function)
        elif batch.timer is None:
            batch.timer = loop.call_later(self._config.batch_wait_s, self._begin, function)
        return await score

    def _begin(self, function: ScoringFunction) -> None:
        """Call the function for the responses that are there."""
        batch = self._batches.pop(function)
        if batch.timer is not None:
            batch.timer.cancel()
        call = asyncio.get_running_loop().create_task(self._run(function, batch.episodes, batch.scores))
        self._calls.add(call)  # the event loop itself does not keep tasks
        call.add_done_callback(self._calls.discard)

    async def _run(
        self,
        function: ScoringFunction,
        episodes: Sequence[ScorableEpisode],
        waiting: Sequence[asyncio.Future[Score]],
    ) -> None:
        try:
            scores = await self._scores(function, episodes)
        except Exception as error:  # noqa: BLE001  raised again where the scores are awaited
            for each in waiting:
                if not each.done():
                    each.set_exception(error)
            return
        for each, score in zip(waiting, scores, strict=True):
            if not each.done():
                each.set_result(score)
