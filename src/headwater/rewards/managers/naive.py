"""Scores one response per call."""

from __future__ import annotations

from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scoring import Scoring


@REWARD_MANAGERS.register
class NaiveRewardManager(Scoring):
    """Calls ``reward.function``, or the built-in scorer that the row's ``data_source`` names, for each response."""
