"""What one training step reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from headwater.rollout.group import RolloutBatch
from headwater.rollout.ledger import LedgerCounts


def step_metrics(
    batch: RolloutBatch,
    update: Mapping[str, float],
    seconds: Mapping[str, float],
    step_s: float,
    ledger: LedgerCounts,
) -> dict[str, float]:
    rewards = [each.reward for each in batch.trajectories]
    lengths = [len(each.response_tokens) for each in batch.trajectories]
    filtered = sum(each.is_filtered for each in batch.dropped)
    stale = sum(each.is_stale for each in batch.dropped)
    informative = sum(len({each.reward for each in group.trajectories}) > 1 for group in batch.groups)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": max(lengths),
        "stopped_fraction": sum(each.stop_reason == "stop" for each in batch.trajectories) / len(rewards),
        # Groups whose samples all scored the same have no advantage and teach nothing.
        "groups/informative_fraction": informative / len(batch.groups),
        "groups/dropped": len(batch.dropped) - filtered - stale,
        "groups/filtered": filtered,
        "groups/lost_samples": sum(group.num_lost for group in batch.groups),
        "staleness/dropped_groups": stale,
        "staleness/masked_tokens": batch.num_masked_tokens,
        "rollouts/buffered": ledger.buffered,
        "rollouts/in_flight": ledger.in_flight,
        **update,
        **{f"time/{name}_s": value for name, value in seconds.items()},
        "time/step_s": step_s,
        "throughput/generated_tokens_per_s": sum(lengths) / step_s,
    }


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    """The few numbers a person follows while the run trains."""
    split = "/".join(f"{metrics.get(f'time/{name}_s', 0.0):.2f}" for name in ("generate", "reward", "train"))
    return {
        "reward": f"{metrics['reward/mean']:.3f}",
        "length": f"{metrics['response_length/mean']:.1f}",
        "tok/s": f"{metrics['throughput/generated_tokens_per_s']:.0f}",
        "gen/rew/train": f"{split} s",
    }
