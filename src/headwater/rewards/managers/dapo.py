"""verl's name for scores with a penalty for long responses."""

from __future__ import annotations

from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scoring import Scoring


@REWARD_MANAGERS.register
class DapoRewardManager(Scoring):
    """The same as ``naive``. The penalty is that of ``reward.overlong_tokens``, without which the config is refused.

    The trainer adds it to the score, because it depends on the tokens of the whole response.
    """
