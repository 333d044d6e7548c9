"""Retry with feedback: the model answers, is told that it was wrong, and answers again. Later success is worth less.

The whole episode is one trajectory. The model is trained on all its answers, but not on the feedback between them.
"""

from __future__ import annotations

from headwater.core.errors import ConfigError
from headwater.core.records import Score, Trajectory
from headwater.rewards.functions import info_of_all
from headwater.workflows import WORKFLOWS, Episode, WorkflowContext


@WORKFLOWS.register
class MultiTurnWorkflow:
    """``reward = turn_discount ** (turns - 1) * score of the last answer``. A score of ``stop_reward`` ends it early.

    ``max_turn_tokens`` limits each answer, so that one long answer does not use up the room of the others. 0 means no
    limit per answer.
    """

    def __init__(
        self,
        context: WorkflowContext,
        *,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        feedback: str = "That is not right. Look at your answer again, then give a better one.",
        stop_reward: float = 1.0,
        max_turn_tokens: int = 0,
    ) -> None:
        _check(max_turns, turn_discount, feedback, max_turn_tokens)
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._feedback = {"role": "user", "content": feedback}
        self._stop_reward = stop_reward
        self._max_turn_tokens = max_turn_tokens or None

    async def run(self, episode: Episode) -> Trajectory:
        scores: list[Score] = []
        for turn in range(self._max_turns):
            await episode.reply(self._max_turn_tokens, turn=turn)
            scores.append(await episode.score())
            is_over = scores[-1].value >= self._stop_reward or turn + 1 == self._max_turns
            if is_over or not episode.tell([self._feedback]):
                break
        reward = self._turn_discount ** (len(scores) - 1) * scores[-1].value
        return episode.finish(
            Score(reward, info_of_all(scores)),
            turn_scores=(0.0,) * (len(scores) - 1) + (reward,),
            info={"num_turns": len(scores), "first_reward": scores[0].value},
        )


def _check(max_turns: int, turn_discount: float, feedback: str, max_turn_tokens: int) -> None:
    key = "rollout.workflow_args"
    problems = []
    if max_turns < 1:
        problems.append(f"{key}.max_turns = {max_turns}: must be >= 1; use 1 for a single answer")
    if not 0 < turn_discount <= 1:
        problems.append(f"{key}.turn_discount = {turn_discount}: must be in (0, 1]; use 1 for no discount")
    if not feedback.strip():
        problems.append(f"{key}.feedback is empty: write what the model is told after a wrong answer")
    if max_turn_tokens < 0:
        problems.append(f"{key}.max_turn_tokens = {max_turn_tokens}: must be >= 0; use 0 for no limit per answer")
    if problems:
        raise ConfigError(problems)
