"""A brief supervised start: the model sees right answers until it knows what an answer looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headwater.algorithms.policy_losses import PolicyLoss
from headwater.config.schema import WarmStartConfig
from headwater.core.data_proto import DataProto
from headwater.core.errors import DataError
from headwater.core.records import Prompt, Trajectory
from headwater.data.load import PromptDataset
from headwater.data.sampler import ShufflingSampler
from headwater.learner.engine import TrainEngine
from headwater.observe.progress import Display
from headwater.rollout.padding import pad_trajectories

_CHECK_EVERY_STEPS = 10
_NUM_WARMUP_STEPS = 10


@dataclass(frozen=True)
class WarmStartResult:
    num_steps: int
    loss: float


def warm_start(
    config: WarmStartConfig,
    learner: TrainEngine,
    tokenizer: Any,
    dataset: PromptDataset,
    *,
    seed: int,
    sampled_reward: Callable[[], float],
    display: Display,
) -> WarmStartResult:
    """Maximise the likelihood of each row's ``extra_info["demonstration"]``.

    ``sampled_reward`` measures the model as it stands; it is asked every few steps when ``until_reward`` is set.
    """
    # An optimiser of its own: the averages of supervised gradients would mislead the first policy updates.
    # How many steps it takes is not known before, so there is nothing for a rate to fall towards.
    settings = replace(
        learner.config,
        learning_rate=config.learning_rate,
        num_warmup_steps=_NUM_WARMUP_STEPS,
        schedule="constant",
    )
    engine = learner.sibling(settings)
    sampler = ShufflingSampler(len(dataset), seed)
    step, loss = 0, 0.0
    with display.stage("warm start", config.num_steps) as reporter:
        for step in range(1, config.num_steps + 1):
            prompts = [dataset[draw.index] for draw in sampler.take(config.num_sequences_per_step)]
            demonstrations = [_demonstration(prompt, tokenizer) for prompt in prompts]
            batch = pad_trajectories(demonstrations, tokenizer.pad_token_id)
            loss = engine.train_step(batch, _negative_log_likelihood)["loss"]
            reporter.update(step, {"loss": f"{loss:.3f}"})
            if config.until_reward > 0 and step % _CHECK_EVERY_STEPS == 0 and sampled_reward() >= config.until_reward:
                break
    return WarmStartResult(step, loss)


def _negative_log_likelihood(outputs: Mapping[str, Tensor], batch: DataProto) -> PolicyLoss:
    return PolicyLoss(-outputs["logprobs"])


def _demonstration(prompt: Prompt, tokenizer: Any) -> Trajectory:
    """The right answer and the end token, as if the policy had produced them."""
    text = prompt.extra_info.get("demonstration")
    if not isinstance(text, str) or not text:
        raise DataError(
            f"row {prompt.uid}: no extra_info.demonstration for the supervised start; "
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
