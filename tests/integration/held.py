"""A reward and a workflow that hold one row back until a run has come to a step: a straggler, on demand."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a run that a test starts does not have it

from varied_reward import compute_score as varied

from headwater.core.records import Trajectory


def has_ended(run: str, step: int) -> bool:
    metrics = Path(run) / "metrics.jsonl"
    return metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text()


async def until_step(run: str, step: int) -> None:
    while not has_ended(run, step):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def until_buffered(run: str, step: int, count: int) -> None:
    """Wait until the run says that ``count`` groups are complete, as long as it does not go on after ``step``."""
    while (status := json.loads((Path(run) / "status.json").read_text())).get("step", 0) <= step:
        if status.get("step") == step and status["ledger"]["buffered"] >= count:
            return
        await asyncio.sleep(0.01)


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, *, run: str, row: int, step: int, buffered: int = 0
) -> float:
    """The varied reward; of ``row`` not before ``step`` of ``run`` has ended and ``buffered`` groups are complete."""
    if extra_info["index"] == row:
        await until_step(run, step)
        await until_buffered(run, step, buffered)
    return varied(data_source, solution_str, ground_truth, extra_info)


async def until_told(data_source, solution_str, ground_truth, extra_info, *, run: str, step: int, go: str) -> float:
    """The varied reward; when ``step`` of ``run`` has ended, not before there is a file ``go``."""
    while has_ended(run, step) and not Path(go).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    return varied(data_source, solution_str, ground_truth, extra_info)


def waits_for(go: Path, run: Path, step: int) -> list[str]:
    """Settings that hold a run soon after ``step`` until the file ``go`` exists."""
    arguments = f"reward.function_args={{run: {run}, step: {step}, go: {go}}}"
    return ["reward.function=tests/integration/held.py:until_told", arguments, "reward.timeout_s=1200"]


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
