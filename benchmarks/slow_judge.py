"""A reward that comes as late as that of a judge: the score of the row's own scorer, after a log-normal time.

    python benchmarks/recipes.py 'sync=smollm2-arithmetic' \\
        'async 4, decoupled=smollm2-arithmetic+decoupled;rollout.max_staleness=4' \\
        --processes 6 --seeds 0 1 2 --limit 150 --by-time --at-s 20 30 40 50 \\
        --settings engine.kv_cache_gib=3 reward.function=benchmarks/slow_judge.py reward.where=threads \\
        reward.max_concurrent=4096

The mean is a second by default, and the slowest of 512 answers takes about four. A synchronous run waits for that one
in every step; one that may run ahead trains on complete groups meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from headwater.rewards.scorers import SCORERS, scorer_of


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    mean_s: float = 1.0,
    sigma: float = 0.5,
) -> Any:
    """``sigma`` is the standard deviation of the logarithm of the time."""
    await asyncio.sleep(random.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma))
    return SCORERS.resolve(scorer_of(data_source))(data_source, solution_str, ground_truth, extra_info)
