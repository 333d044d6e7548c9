"""A custom workflow: an async function, named in the config.

    headwater train quickstart \
        rollout.workflow=examples/custom_workflow.py:best_of_two rollout.workflow_args.min_reward=0.0

This one answers twice and trains on the better answer. Returning None rejects the episode: its group is dropped,
counted and replaced.
"""

from __future__ import annotations

from headwater.core.records import Trajectory
from headwater.workflows import Episode


async def best_of_two(episode: Episode, *, min_reward: float = 0.0) -> Trajectory | None:
    answers = []
    for number in range(2):
        attempt = episode.branch()  # the same prompt, with separate randomness
        await attempt.reply()
        answers.append(attempt.finish(await attempt.score(), info={"attempt": number}))
    best = max(answers, key=lambda answer: answer.reward)
    return best if best.reward >= min_reward else None
