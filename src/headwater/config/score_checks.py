"""Settings of rewards, scores and their normalisation that are valid alone but not together or with the advantage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from headwater.config.algorithm_checks import advantage_of
from headwater.config.clash import Check, Clash, Layers, unread
from headwater.config.declared import Declared
from headwater.config.keys import settings, value_at
from headwater.config.schema import Config
from headwater.config.traits import AdvantageTraits
from headwater.core.registry import is_path, nearest

REWARDS, ADVANTAGES = "algorithm.normalize_rewards", "algorithm.normalize_advantages"
SHAPING = ("reward.bias", "reward.scale", "reward.clip", "reward.zero_unfinished")
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


def greedy_baseline_is_whole(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = advantage_of(config)
    if advantage is None or not advantage.traits.needs_greedy_baseline:
        return
    lacking = {
        "reward.model": "does not score the greedy response",
        "reward.overlong_tokens": "does not count the tokens of the greedy response",
    }
    lacking |= dict.fromkeys(SHAPING, "does not change the score of the greedy response")
    for key, why in lacking.items():
        if value_at(config, key) != settings(Config)[key].default():
            yield Clash(
                ("algorithm.advantage", key),
                f"{key} {why}, so its baseline would lack that part; use another advantage, such as rloo",
            )


def scores_are_read_alone(config: Config, layers: Layers) -> Iterator[Clash]:
    advantage = advantage_of(config)
    if advantage is None or not advantage.traits.scores_alone:
        return
    shaping = SHAPING if advantage.traits.reads_reward_parts else ("reward.bias",)
    for key in ("algorithm.kl_in_reward", "reward.model", "reward.overlong_tokens", *shaping):
        if value_at(config, key) != settings(Config)[key].default():
            instead = ", or algorithm.kl_in_loss" if key == "algorithm.kl_in_reward" else ""
            yield Clash(
                ("algorithm.advantage", key),
                f"{advantage.traits.scores_alone.replace('{key}', key)}; use another advantage, such as grpo{instead}",
            )


def reward_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    if not config.reward.model:
        why = "reward.model is empty; name one"
        yield from unread(["reward.model_weight"], ("reward.model",), why, layers)
    if config.reward.overlong_tokens == 0:
        why = "reward.overlong_tokens = 0 means no penalty; set it too"
        yield from unread(
            ["reward.overlong_penalty", "reward.overlong_counts"], ("reward.overlong_tokens",), why, layers
        )


def overlong_tokens_fit(config: Config, layers: Layers) -> Iterator[Clash]:
    limit = config.rollout.max_new_tokens
    if config.reward.overlong_tokens > limit:
        yield Clash(
            ("reward.overlong_tokens", "rollout.max_new_tokens"),
            f"the penalty grows over the last tokens of rollout.max_new_tokens = {limit}; use at most {limit}",
        )


def normalization_settings_are_read(config: Config, layers: Layers) -> Iterator[Clash]:
    for section in (REWARDS, ADVANTAGES):
        for level, readers in (("mean_level", ("leave_one_out",)), ("std_level", ("unbiased", "epsilon"))):
            switch = f"{section}.{level}"
            if value_at(config, switch) == "none":
                why = f"{switch} = none; use batch or group"
                yield from unread([f"{section}.{reader}" for reader in readers], (switch,), why, layers)


def group_has_statistics(config: Config, layers: Layers) -> Iterator[Clash]:
    if config.rollout.num_samples_per_prompt > 1:
        return
    keys = [f"{REWARDS}.mean_level", f"{REWARDS}.std_level"]
    if not _varies_within_a_response(config):
        keys.append(f"{ADVANTAGES}.mean_level")
    for key in keys:
        if value_at(config, key) == "group":
            yield Clash(
                (key, "rollout.num_samples_per_prompt"),
                "a group of one score has neither a mean nor a deviation to compare with; use batch, or "
                "rollout.num_samples_per_prompt=2 or more",
            )


def _varies_within_a_response(config: Config) -> bool:
    advantage = advantage_of(config)
    if advantage is None or config.algorithm.kl_in_reward > 0:
        return True
    return advantage.traits.varies_by_token or _discounts(advantage, config)


def _discounts(advantage: Declared[AdvantageTraits], config: Config) -> bool:
    discount = advantage.traits.discount
    return bool(discount) and advantage.value(discount, config.algorithm.advantage_args) != 1


def normalized_rewards_reach_the_advantage(config: Config, layers: Layers) -> Iterator[Clash]:
    """With a divergence in the reward every normalisation has an effect, because it changes their proportion."""
    algorithm, advantage = config.algorithm, advantage_of(config)
    normalization = algorithm.normalize_rewards
    if advantage is None or not normalization.is_on:
        return
    traits, arguments, name = advantage.traits, algorithm.advantage_args, f"algorithm.advantage = {advantage.name}"
    whitens = advantage.is_on(traits.whitens, arguments)
    key = f"{REWARDS}.{'mean_level' if normalization.mean_level != 'none' else 'std_level'}"
    keys, plain = (key, "algorithm.advantage"), "algorithm.advantage_args.whitened=false"
    off = f"use none, or algorithm.advantage=reinforce_plus_plus with {plain}"
    if traits.scores_as_given:
        yield Clash(keys, f"{name} {traits.scores_as_given}; {off}")
    elif algorithm.kl_in_reward > 0:
        return
    elif advantage.is_on(traits.divides_by_group_std, arguments):
        yield Clash(keys, f"{name} already normalises scores within the group, so this would change nothing; {off}")
    elif traits.subtracts_group_mean and whitens and normalization.std_level != "group":
        yield Clash(
            keys,
            f"{name} subtracts the mean of the group and whitens over the batch, so only a deviation of the group "
            f"could change anything; use none, {REWARDS}.std_level=group, or another advantage",
        )
    elif whitens and not traits.needs_values and _whitening_undoes(advantage, config):
        remedy = f", or algorithm.advantage_args.{traits.whitens}=false" if isinstance(traits.whitens, str) else ""
        yield Clash(
            keys,
            f"{name} whitens over the batch, which undoes what is done to all its returns alike; use none, the level "
            f"group{remedy}",
        )
    elif traits.subtracts_group_mean and normalization.std_level == "none" and not normalization.leave_one_out:
        yield Clash(
            keys,
            f"{name} already subtracts the mean of the group, so only a deviation could change anything; {off}",
        )


def _whitening_undoes(advantage: Declared[AdvantageTraits], config: Config) -> bool:
    """A scale of the whole batch is always undone, a mean only if every return contains it without a discount."""
    normalization = config.algorithm.normalize_rewards
    shifts_alike = normalization.mean_level == "none" or not _discounts(advantage, config)
    return shifts_alike and "group" not in (normalization.mean_level, normalization.std_level)


def advantages_are_normalized_once(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm, advantage = config.algorithm, advantage_of(config)
    normalization = algorithm.normalize_advantages
    if advantage is None or not normalization.is_on:
        return
    switch = advantage.traits.whitens
    if advantage.is_on(switch, algorithm.advantage_args):
        key = f"{ADVANTAGES}.{'mean_level' if normalization.mean_level != 'none' else 'std_level'}"
        instead = (
            f"algorithm.advantage_args.{switch}=false" if isinstance(switch, str) else "another advantage, such as grpo"
        )
        yield Clash(
            (key, "algorithm.advantage_args", "algorithm.advantage"),
            f"algorithm.advantage = {advantage.name} already whitens over the batch; use none, or {instead}",
        )


SCORE_CHECKS: tuple[Check, ...] = (
    greedy_baseline_is_whole,
    scores_are_read_alone,
    reward_settings_are_read,
    overlong_tokens_fit,
    normalization_settings_are_read,
    group_has_statistics,
    normalized_rewards_reach_the_advantage,
    advantages_are_normalized_once,
    reward_manager_settings_are_read,
    reward_functions_are_complete,
)
