"""A reward and a workflow that hold one row back until a run has come to a step: a straggler, on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

from varied_reward import compute_score as varied

from headwater.core.trajectory import Trajectory


async def until_step(run: str, step: int) -> None:
    metrics = Path(run) / "metrics.jsonl"
    while not metrics.exists() or f'"kind": "train", "step": {step},' not in metrics.read_text():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, *, run: str, row: int, step: int, then_s: float = 0.0
) -> float:
    """The varied reward; of ``row`` not before ``step`` of ``run`` has ended, and ``then_s`` more."""
    if extra_info["index"] == row:
        await until_step(run, step)
        await asyncio.sleep(then_s)
    return varied(data_source, solution_str, ground_truth, extra_info)


class TwoParts:
    """Two answers in a row; between those to ``row`` the run goes on to ``step``."""

    def __init__(self, context, *, run: str, row: int, step: int) -> None:
        self._context = context
        self._run, self._row, self._step = run, row, step

    async def run(self, episode) -> Trajectory:
        for part in range(2):
            if part and episode.prompt.extra_info["index"] == self._row:
                await until_step(self._run, self._step)
            await episode.reply(self._context.sampling.max_new_tokens // 2, turn=part)
        return episode.finish(await episode.score())
