"""Retry with feedback: the model answers, hears that it was wrong, and answers again; a later success is worth less.

The whole episode is one trajectory. The model learns from all its answers and not from the feedback between them.
``rollout.max_new_tokens`` is the room for all of it after the prompt, so that no number of turns makes a sequence that
the model or the learner cannot hold; an episode that has no room for another turn ends with stop reason ``length``.
"""

from __future__ import annotations

from dataclasses import replace

from headwater.core.errors import ConfigError, RolloutFailed
from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.randomness import derive_key
from headwater.core.records import ModelRequest, ModelResponse, Score, Trajectory
from headwater.core.transcript import Transcript
from headwater.data.next_turn import MODEL_TURN, tokens_until_next_turn
from headwater.workflows import WORKFLOWS, WorkflowContext, refuse_media


@WORKFLOWS.register
class MultiTurnWorkflow:
    """``reward = turn_discount ** (turns - 1) * score of the last answer``; ``stop_reward`` ends the episode early.

    ``max_turn_tokens`` keeps one long answer from using up the room of the others; 0 leaves it all to whoever is first.
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
        self._context = context
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._feedback = feedback
        self._stop_reward = stop_reward
        self._max_turn_tokens = max_turn_tokens

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        refuse_media(data.prompt, "multi_turn")
        transcript = Transcript(data.prompt, data.sample)
        chat = [*data.prompt.messages]
        scores: list[Score] = []
        while True:
            response = await self._answer(engine, data, transcript, turn=len(scores))
            text = self._context.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            scores.append(await self._context.reward.score(data.prompt, text))
            stop_reason = response.stop_reason
            if scores[-1].value >= self._stop_reward or len(scores) == self._max_turns:
                break
            chat += [MODEL_TURN, {"role": "user", "content": self._feedback}]
            feedback = tokens_until_next_turn(
                self._context.tokenizer, chat, response.output_tokens, self._context.chat_template_args
            )
            if self._room(transcript) < len(feedback) + max(1, self._context.sampling.min_new_tokens):
                stop_reason = "length"
                break
            transcript.add_given(feedback)
        reward = self._turn_discount ** (len(scores) - 1) * scores[-1].value
        info = {"response_text": text, "num_turns": len(scores), "first_reward": scores[0].value}
        return transcript.finish(
            reward=reward,
            stop_reason=stop_reason,
            turn_rewards=(0.0,) * (len(scores) - 1) + (reward,),
            info={**scores[-1].info, **info},
        )

    async def _answer(
        self, engine: EpisodeEngine, data: EpisodeInput, transcript: Transcript, turn: int
    ) -> ModelResponse:
        room = self._room(transcript)
        if self._max_turn_tokens:
            room = min(room, self._max_turn_tokens)
        request = ModelRequest(
            request_id=f"{data.prompt.uid}#{data.sample}/{turn}",
            input_tokens=transcript.tokens,
            sampling=replace(self._context.sampling, max_new_tokens=room),
            rng_key=derive_key(data.rng_key, "turn", turn),
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            # Half an answer is no wrong answer: scoring it would turn a failure into a reward.
            raise RolloutFailed(f"request {request.request_id}: the engine aborted it")
        transcript.add_response(response)
        return response

    def _room(self, transcript: Transcript) -> int:
        return self._context.sampling.max_new_tokens - transcript.num_response_tokens


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
        problems.append(f"{key}.max_turn_tokens = {max_turn_tokens}: must be >= 0; use 0 for no limit of its own")
    if problems:
        raise ConfigError(problems)
