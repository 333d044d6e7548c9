"""Warm start: brief supervised training on correct answers, until the model produces the expected format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.chat.next_turn import next_turn
from headwater.chat.render import MODEL_TURN
from headwater.config.schema import WarmStartConfig
from headwater.core.errors import DataError
from headwater.core.learner import Learner
from headwater.core.records import NOT_SAMPLED, Prompt, Trajectory
from headwater.data.load import PromptDataset, prompts_of
from headwater.data.sampler import ShufflingSampler
from headwater.observe.progress import Display
from headwater.rollout.group import pad_trajectories

_CHECK_EVERY_STEPS = 10


@dataclass(frozen=True)
class WarmStartResult:
    num_steps: int
    loss: float


def warm_start(
    config: WarmStartConfig,
    learner: Learner,
    tokenizer: Any,
    dataset: PromptDataset,
    *,
    seed: int,
    template_args: Mapping[str, Any],
    sampled_reward: Callable[[], float],
    display: Display,
) -> WarmStartResult:
    """Maximise the likelihood of each row's ``extra_info["demonstration"]``.

    ``template_args`` are ``data.chat_template_args``. ``sampled_reward`` measures the present policy; it is called
    every few steps if ``until_reward`` is set.
    """
    sampler = ShufflingSampler(len(dataset), seed)
    step, loss = 0, 0.0
    with display.stage("warm start", config.num_steps) as reporter:
        for step in range(1, config.num_steps + 1):
            prompts = prompts_of(dataset, [draw.index for draw in sampler.take(config.num_sequences_per_step)])
            demonstrations = [demonstration(prompt, tokenizer, template_args) for prompt in prompts]
            batch = pad_trajectories(demonstrations, tokenizer.pad_token_id)
            loss = learner.supervise(batch)["loss"]
            reporter.update(step, {"loss": f"{loss:.3f}"})
            if config.until_reward > 0 and step % _CHECK_EVERY_STEPS == 0 and sampled_reward() >= config.until_reward:
                break
    return WarmStartResult(step, loss)


def demonstration(prompt: Prompt, tokenizer: Any, template_args: Mapping[str, Any]) -> Trajectory:
    """The row's ``extra_info["demonstration"]``, as if the policy had generated it.

    It is the text of one reply, or the messages of a conversation after the prompt. Messages of the role ``assistant``
    are trained, each with an end token; ``content`` is all that the model writes, also its tool calls.
    """
    chat: list[Mapping[str, Any]] = list(prompt.messages)
    arguments = {**template_args, **({"tools": list(prompt.tool_schemas)} if prompt.tool_schemas else {})}
    tokens, mask = list(prompt.tokens), [0] * len(prompt.tokens)
    reply: list[int] = []
    for message, *others in _turns(prompt):
        reply = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        chat += [{**message, **MODEL_TURN}, *others]
        between = next_turn(tokenizer, chat, reply, arguments).tokens if others else ()
        tokens += [*reply, *between]
        mask += [1] * len(reply) + [0] * len(between)
    return Trajectory(
        uid=prompt.uid,
        sample=0,
        tokens=tuple(tokens),
        prompt_length=len(prompt.tokens),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * len(tokens),
        versions=tuple(0 if is_trained else NOT_SAMPLED for is_trained in mask),
        reward=0.0,
        stop_reason="stop",
        media=prompt.media,
    )


def _turns(prompt: Prompt) -> list[list[Mapping[str, Any]]]:
    """Each message of the model, with the messages after it that others wrote."""
    given = prompt.extra_info.get("demonstration")
    if isinstance(given, str) and given:
        return [[{"role": "assistant", "content": given}]]
    turns: list[list[Mapping[str, Any]]] = []
    for message in given if isinstance(given, (list, tuple)) else ():
        is_model = isinstance(message, Mapping) and message.get("role") == "assistant"
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or not (turns or is_model):
            raise DataError(
                f"row {prompt.uid}: extra_info.demonstration has the entry {str(message)[:80]!r}; write messages with "
                "role and content, of which the first has the role assistant"
            )
        turns.append([message]) if is_model else turns[-1].append(message)
    if not turns or len(turns[-1]) > 1:
        raise DataError(
            f"row {prompt.uid}: no extra_info.demonstration for the warm start; add that column with the text of a "
            "reply, or with messages of which the last is the model's, or set warm_start.num_steps=0"
        )
    return turns
