"""An episode with a service in it: the model guesses, a checker says higher or lower, the model guesses again.

    headwater train recipes/quickstart.yaml rollout.max_new_tokens=24 \
        rollout.workflow=examples/tool_workflow.py:HigherOrLower rollout.workflow_args.latency_s=0.01

docs/workflows.md goes through this file step by step.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.randomness import derive_key
from headwater.core.records import ModelRequest, Trajectory
from headwater.core.transcript import Transcript
from headwater.data.next_turn import MODEL_TURN, tokens_until_next_turn
from headwater.workflows import WorkflowContext


async def ask_checker(guess: str, answer: str, latency_s: float) -> str:
    await asyncio.sleep(latency_s)  # other episodes run meanwhile; a request over the network is awaited like this
    if not guess.strip().isdecimal():
        return "A number!"
    return "Higher." if int(guess) < int(answer) else "Lower."


class HigherOrLower:
    def __init__(self, context: WorkflowContext, *, guess_tokens: int = 4, latency_s: float = 0.01) -> None:
        self._context, self._guess_tokens, self._latency_s = context, guess_tokens, latency_s

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory | None:
        context, prompt = self._context, data.prompt
        transcript, hints = Transcript(prompt, data.sample), list[str]()
        while True:
            request = ModelRequest(
                request_id=f"{prompt.uid}#{data.sample}/{len(hints)}",
                input_tokens=transcript.tokens,
                sampling=replace(context.sampling, max_new_tokens=self._guess_tokens),
                rng_key=derive_key(data.rng_key, len(hints)),  # each guess draws its own tokens, reproducibly
            )
            response = await engine.agenerate(request)
            transcript.add_response(response)
            guess = context.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            score = await context.reward.score(prompt, guess)
            if score.value == 1.0 or hints:
                break
            hints.append(await ask_checker(guess, prompt.ground_truth, self._latency_s))
            chat = [*prompt.messages, MODEL_TURN, {"role": "user", "content": hints[0]}]
            reply = tokens_until_next_turn(context.tokenizer, chat, response.output_tokens, context.chat_template_args)
            if transcript.num_response_tokens + len(reply) + self._guess_tokens > context.sampling.max_new_tokens:
                return None  # no room for a second guess: rejected, and counted
            transcript.add_given(reply)
        info = {"response_text": guess, "hints": hints}
        return transcript.finish(reward=score.value, stop_reason=response.stop_reason, info=info)
