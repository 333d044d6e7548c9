"""Scoring functions, one file each, chosen by a row's ``data_source``.

All have the signature ``compute_score(data_source, solution_str, ground_truth, extra_info, **settings)`` and return a
number, a dict with a ``score`` entry, or an awaitable of either.
"""

from headwater.core.registry import Registry

SCORERS = Registry("scorer", "headwater.rewards.scorers")
