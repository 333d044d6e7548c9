"""verl's name for scoring in parallel processes with a time limit for each response."""

from __future__ import annotations

from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scoring import Scoring


@REWARD_MANAGERS.register
class PrimeRewardManager(Scoring):
    """The same as ``naive``, whose worker processes already do this. The config refuses any other ``reward.where``."""
