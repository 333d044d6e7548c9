"""Warm start: brief supervised training on correct answers, until the model produces the expected format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.config.schema import WarmStartConfig
from headwater.core.errors import DataError
from headwater.core.protocols import Learner
from headwater.core.records import Prompt, Trajectory
from headwater.data.load import PromptDataset
from headwater.data.sampler import ShufflingSampler
from headwater.observe.progress import Display
from headwater.rollout.padding import pad_trajectories

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
    sampled_reward: Callable[[], float],
    display: Display,
) -> WarmStartResult:
    """Maximise the likelihood of each row's ``extra_info["demonstration"]``.

    ``sampled_reward`` measures the present policy. It is called every few steps if ``until_reward`` is set.
    """
    sampler = ShufflingSampler(len(dataset), seed)
    step, loss = 0, 0.0
    with display.stage("warm start", config.num_steps) as reporter:
        for step in range(1, config.num_steps + 1):
            prompts = [dataset[draw.index] for draw in sampler.take(config.num_sequences_per_step)]
            demonstrations = [_demonstration(prompt, tokenizer) for prompt in prompts]
            batch = pad_trajectories(demonstrations, tokenizer.pad_token_id)
            loss = learner.supervise(batch)["loss"]
            reporter.update(step, {"loss": f"{loss:.3f}"})
            if config.until_reward > 0 and step % _CHECK_EVERY_STEPS == 0 and sampled_reward() >= config.until_reward:
                break
    return WarmStartResult(step, loss)


def _demonstration(prompt: Prompt, tokenizer: Any) -> Trajectory:
    """The correct answer and the end token, as if the policy had generated them."""
    text = prompt.extra_info.get("demonstration")
    if not isinstance(text, str) or not text:
        raise DataError(
            f"row {prompt.uid}: no extra_info.demonstration for the warm start; "
            "add that column, or set warm_start.num_steps=0"
        )
    answer = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    num_prompt, num_answer = len(prompt.tokens), len(answer)
    return Trajectory(
        uid=prompt.uid,
        sample=0,
        tokens=prompt.tokens + answer,
        prompt_length=num_prompt,
        loss_mask=(0,) * num_prompt + (1,) * num_answer,
        logprobs=(0.0,) * (num_prompt + num_answer),
        versions=(-1,) * num_prompt + (0,) * num_answer,
        reward=0.0,
        stop_reason="stop",
    )
