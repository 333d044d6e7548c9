"""Mean reward on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.randomness import derive_key
from headwater.core.records import Prompt, Trajectory
from headwater.data.load import PromptDataset
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import PromptDraw, episode_metrics, reward_metrics


@dataclass(frozen=True)
class Evaluation:
    reward_mean: float
    num_prompts: int
    num_dropped: int
    """Prompts without a result: rejected by the workflow, or failed with ``rollout.on_failure: drop``."""
    num_samples: int
    response_length_mean: float
    stopped_fraction: float
    """The share of responses that ended before the length limit."""
    rollouts: tuple[tuple[Prompt, Trajectory], ...]

    def metrics(self) -> dict[str, float]:
        return {
            "reward/mean": self.reward_mean,
            "response_length/mean": self.response_length_mean,
            "stopped_fraction": self.stopped_fraction,
            "num_prompts": self.num_prompts,
            "num_dropped": self.num_dropped,
            "num_samples": self.num_samples,
            **episode_metrics([each for _, each in self.rollouts]),
            **reward_metrics(self.rollouts),
        }


def evaluate(executor: WorkflowExecutor, dataset: PromptDataset, num_prompts: int, seed: int) -> Evaluation:
    """Run the first ``num_prompts`` rows. The same seed and the same weights give the same responses."""
    prompts = [dataset[row] for row in range(min(num_prompts, len(dataset)))]
    batch = executor.rollout_batch([PromptDraw(prompt, derive_key(seed, "eval", prompt.uid)) for prompt in prompts])
    rollouts = [(group.prompt, trajectory) for group in batch.groups for trajectory in group.trajectories]
    rewards = [reward for group in batch.groups for reward in group.episode_rewards()]
    count = len(rollouts)
    return Evaluation(
        reward_mean=sum(rewards) / len(rewards),
        num_prompts=len(batch.groups),
        num_dropped=len(batch.dropped),
        num_samples=len(rewards),
        response_length_mean=sum(len(each.response_tokens) for _, each in rollouts) / count,
        stopped_fraction=sum(each.stop_reason == "stop" for _, each in rollouts) / count,
        rollouts=tuple(rollouts),
    )
