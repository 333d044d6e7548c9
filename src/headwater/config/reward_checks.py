"""Settings of reward managers and of mixtures that are valid alone but not together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from headwater.config.checks import Check, Clash, Layers, unread
from headwater.config.keys import value_at
from headwater.config.schema import Config
from headwater.core.registry import is_path, nearest

_PART_KEYS = ("function", "weight", "args")


def reward_manager_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    reward = config.reward
    if reward.manager != "batch" and not is_path(reward.manager):
        why = f"reward.manager = {reward.manager} scores one response per call; use batch"
        yield from unread(["reward.batch_size", "reward.batch_wait_s"], ("reward.manager",), why, layers)
    if reward.manager == "dapo" and reward.overlong_tokens == 0:
        yield Clash(
            ("reward.manager", "reward.overlong_tokens"),
            "adds a penalty for long responses, which reward.overlong_tokens = 0 turns off; set it, or use naive",
        )
    if reward.manager == "prime" and reward.where != "processes":
        yield Clash(
            ("reward.where", "reward.manager"),
            "reward.manager = prime scores in parallel processes; use processes, or reward.manager=naive",
        )
    if reward.where == "event_loop" and reward.workers:
        yield Clash(
            ("reward.workers", "reward.where"),
            "reward.where = event_loop calls plain functions one after the other; use processes, threads, or 0",
        )


def reward_functions_are_complete(config: Config, layers: Layers) -> Iterator[Clash]:
    reward = config.reward
    for key in ("reward.function", "reward.function_args"):
        if reward.functions and value_at(config, key):
            yield Clash((key, "reward.functions"), "reward.functions is used instead; remove one of the two")
    for name, part in reward.functions.items():
        key = f"reward.functions.{name}"
        if not name.isidentifier():
            reason = "the name becomes a metric and a column; use letters, digits and underscores"
            yield Clash((key,), reason, part)
        for field in part:
            if field not in _PART_KEYS:
                yield Clash((f"{key}.{field}",), f"no such key; {nearest(field, list(_PART_KEYS))}", part[field])
        weight, function, args = part.get("weight", 1.0), part.get("function", ""), part.get("args", {})
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            yield Clash((f"{key}.weight",), "must be a finite number", weight)
        if not isinstance(function, str):
            yield Clash((f"{key}.function",), "must be the name of a scorer or 'file.py:function'", function)
        if not isinstance(args, Mapping):
            yield Clash((f"{key}.args",), "must be a mapping; write it as {key: value}", args)


REWARD_CHECKS: tuple[Check, ...] = (reward_manager_settings_are_read, reward_functions_are_complete)
