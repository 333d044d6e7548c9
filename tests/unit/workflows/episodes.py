"""What the tests of workflows share: a reward that follows a list, and one episode run to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import tiny

from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.records import Prompt, ScorableEpisode, Score
from headwater.core.requests import SamplingParams
from headwater.workflows import Episode, WorkflowContext
from headwater.workflows.multi_turn import MultiTurnWorkflow

END = 1
FEEDBACK = "Wrong. Try again."


class ListedRewards:
    """The next number of a list for each response, whatever it says; an exception is raised."""

    def __init__(self, values: Sequence[float | Exception]) -> None:
        self._values = list(values)
        self.texts: list[str] = []

    async def score(self, episode: ScorableEpisode) -> Score:
        self.texts.append(episode.text)
        value = self._values[len(self.texts) - 1]
        if isinstance(value, Exception):
            raise value
        return Score(value, {"scored": len(self.texts)})


def encode(text: str) -> tuple[int, ...]:
    return tuple(tiny.tokenizer().encode(text, add_special_tokens=False))


def run_multi_turn(
    engine: EpisodeEngine,
    rewards: ListedRewards,
    prompt: Prompt | None = None,
    *,
    max_new_tokens: int = 200,
    **settings,
):
    context = WorkflowContext(tiny.tokenizer(), rewards, SamplingParams(max_new_tokens=max_new_tokens))
    workflow = MultiTurnWorkflow(context, **{"feedback": FEEDBACK, **settings})
    data = EpisodeInput(prompt or tiny.prompt(), sample=2, rng_key=7)
    return asyncio.run(workflow.run(Episode(context, engine, data)))
