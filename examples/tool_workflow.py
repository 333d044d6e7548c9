"""An episode that calls a service: the model guesses, a checker says higher or lower, the model guesses again.

    headwater train quickstart rollout.max_new_tokens=24 \
        rollout.workflow=examples/tool_workflow.py:HigherOrLower rollout.workflow_args.latency_s=0.01

docs/workflows.md explains this file step by step.
"""

from __future__ import annotations

import asyncio

from headwater.core.records import Trajectory
from headwater.workflows import Episode, WorkflowContext


async def ask_checker(guess: str, answer: str, latency_s: float) -> str:
    await asyncio.sleep(latency_s)  # other episodes run in the meantime; await a network request in the same way
    if not guess.strip().isdecimal():
        return "A number!"
    return "Higher." if int(guess) < int(answer) else "Lower."


class HigherOrLower:
    def __init__(self, context: WorkflowContext, *, guess_tokens: int = 4, latency_s: float = 0.01) -> None:
        self._guess_tokens, self._latency_s = guess_tokens, latency_s

    async def run(self, episode: Episode) -> Trajectory | None:
        hints: list[str] = []
        while True:
            guess = await episode.reply(self._guess_tokens)
            score = await episode.score()
            if score.value == 1.0 or hints:
                return episode.finish(score, info={"hints": hints})
            hints.append(await ask_checker(guess, episode.prompt.ground_truth, self._latency_s))
            if not episode.tell([{"role": "user", "content": hints[-1]}]):
                return None  # no room for a second guess: rejected and counted
