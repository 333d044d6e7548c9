"""The score that reasoning-gym gives an answer to one of its tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headwater.core.errors import RewardFailed
from headwater.data.tasks.reasoning_gym import gym_entry
from headwater.rewards.scorers import SCORERS

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@SCORERS.register
def reasoning_gym(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """The gym's score, 0.0 to 1.0, of the text in the last <answer>, or of the whole response if there is none."""
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    gym = extra_info["gym"]
    rules = _rules(gym["dataset"], json.dumps(gym["options"], sort_keys=True))
    return float(rules.score_answer(answer=answer, entry=gym_entry(extra_info)))


@lru_cache(maxsize=64)
def _rules(dataset: str, options: str) -> Any:
    try:
        import reasoning_gym as gym
    except ImportError as error:
        raise RewardFailed("reasoning-gym is not installed; run: pip install 'headwater[tasks]'") from error
    return gym.create_dataset(dataset, **json.loads(options))
