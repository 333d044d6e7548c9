"""Why a group of samples is not trained on."""

from __future__ import annotations

from enum import StrEnum


class DropKind(StrEnum):
    """Why a group of samples is not trained on. Ledger, metrics and doctor use this value, never the message."""

    FAILED = "failed"
    """The workflow raised an error."""
    INVALID = "invalid"
    """The workflow returned something that is not a trajectory, or one that cannot be trained on."""
    ENGINE_FAILED = "engine_failed"
    """The engine could not answer a request."""
    AGENT_FAILED = "agent_failed"
    """An agent of the workflow ``endpoint`` raised, ended with an error, was killed, or never called the model."""
    AGENT_TIMED_OUT = "agent_timed_out"
    """An agent of the workflow ``endpoint`` did not end within its time limit."""
    REWARD_FAILED = "reward_failed"
    """The reward raised an error or returned something that is not a number."""
    REWARD_TIMED_OUT = "reward_timed_out"
    """A reward took longer than ``reward.timeout_s``."""
    TIMED_OUT = "timed_out"
    """The episodes took longer than ``rollout.episode_timeout_s``."""
    REJECTED = "rejected"
    """The workflow returned None."""
    FILTERED = "filtered"
    """All samples have the same reward, so there is nothing to learn (``algorithm.filter_groups``)."""
    REFUSED = "refused"
    """``rollout.should_accept`` returned false."""
    STALE = "stale"
    """The group is older than ``rollout.max_staleness`` allows."""

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong. Filtered, refused and stale groups are an expected part of training."""
        return self not in (DropKind.FILTERED, DropKind.REFUSED, DropKind.STALE)
