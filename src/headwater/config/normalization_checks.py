"""Normalisations of rewards and advantages that would change nothing, or not what they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.config.clash import Check, Clash, Layers, unread
from headwater.config.keys import value_at
from headwater.config.schema import Config

REWARDS, ADVANTAGES = "algorithm.normalize_rewards", "algorithm.normalize_advantages"

# Whatever was done to a group's scores, these end at the same numbers.
SCALED_BY_GROUP = frozenset({"grpo", "grpo_passk"})

NEEDS_SCORES_AS_GIVEN = {
    "gpg": "counts the samples whose score is not 0",
    "remax": "compares with the greedy response's score, which is not normalised",
    "gdpo": "reads the scorer's reward_parts in place of the rewards",
}

# The optimal baseline is not among them: it has none for the tail of the longest sample, where a mean would tell.
COMPARED_IN_GROUPS = frozenset({"grpo", "grpo_passk", "rloo", "opo"})

WHITENED_ON_REQUEST = frozenset({"gae", "gae_turn", "reinforce_plus_plus"})
ALWAYS_WHITENED = frozenset({"reinforce_plus_plus_baseline", "gdpo"})


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
    if not _differs_within_a_response(config):
        keys.append(f"{ADVANTAGES}.mean_level")
    for key in keys:
        if value_at(config, key) == "group":
            yield Clash(
                (key, "rollout.num_samples_per_prompt"),
                "a group of one score has neither a mean nor a deviation to compare with; use batch, or "
                "rollout.num_samples_per_prompt=2 or more",
            )


def _differs_within_a_response(config: Config) -> bool:
    """Whether the tokens of a response get different advantages, not all that of its score."""
    algorithm = config.algorithm
    discounts = algorithm.advantage_args.get("gamma", 1.0) != 1.0
    return ":" in algorithm.advantage or "gae" in algorithm.advantage or discounts or algorithm.kl_in_reward > 0


def normalized_rewards_reach_the_advantage(config: Config, layers: Layers) -> Iterator[Clash]:
    """Normalised scores weigh differently against a divergence in the reward, so with one every setting changes
    something."""
    algorithm = config.algorithm
    normalization, advantage = algorithm.normalize_rewards, algorithm.advantage
    if not normalization.is_on:
        return
    key = f"{REWARDS}.{'mean_level' if normalization.mean_level != 'none' else 'std_level'}"
    keys, plain = (key, "algorithm.advantage"), "algorithm.advantage_args.whitened=false"
    off = f"use none, or algorithm.advantage=reinforce_plus_plus with {plain}"
    if advantage in NEEDS_SCORES_AS_GIVEN:
        yield Clash(keys, f"algorithm.advantage = {advantage} {NEEDS_SCORES_AS_GIVEN[advantage]}; {off}")
    elif algorithm.kl_in_reward > 0:
        return
    elif advantage in SCALED_BY_GROUP and algorithm.advantage_args.get("normalize_by_std") is not False:
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} normalises scores within the group anyway, so nothing would change; "
            f"{off}",
        )
    elif advantage == "reinforce_plus_plus_baseline" and normalization.std_level != "group":
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} takes a mean of the group off and whitens over the batch, so only a "
            f"deviation of the group could change anything; use none, {REWARDS}.std_level=group, or another advantage",
        )
    elif advantage == "reinforce_plus_plus" and _whitening_undoes(config):
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} whitens over the batch, which undoes what was done to all its returns "
            f"alike; use none, the level group, or {plain}",
        )
    elif advantage in COMPARED_IN_GROUPS and normalization.std_level == "none" and not normalization.leave_one_out:
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} compares with a mean of the group anyway, so only a deviation could "
            f"change anything; {off}",
        )


def _whitening_undoes(config: Config) -> bool:
    """A scale of the whole batch always; a mean only where every token's return has it, undiscounted."""
    algorithm, normalization = config.algorithm, config.algorithm.normalize_rewards
    shifts_alike = normalization.mean_level == "none" or algorithm.advantage_args.get("gamma", 1.0) == 1.0
    is_whitened = algorithm.advantage_args.get("whitened") is not False
    return is_whitened and shifts_alike and "group" not in (normalization.mean_level, normalization.std_level)


def advantages_are_normalized_once(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    normalization, advantage = algorithm.normalize_advantages, algorithm.advantage
    if not normalization.is_on:
        return
    key = f"{ADVANTAGES}.{'mean_level' if normalization.mean_level != 'none' else 'std_level'}"
    whitens = f"algorithm.advantage = {advantage} already whitens over the batch; use none"
    if advantage in WHITENED_ON_REQUEST and algorithm.advantage_args.get("whitened") is not False:
        yield Clash(
            (key, "algorithm.advantage_args", "algorithm.advantage"),
            f"{whitens}, or algorithm.advantage_args.whitened=false",
        )
    elif advantage in ALWAYS_WHITENED:
        yield Clash((key, "algorithm.advantage"), f"{whitens}, or another advantage, such as grpo")


NORMALIZATION_CHECKS: tuple[Check, ...] = (
    normalization_settings_are_read,
    group_has_statistics,
    normalized_rewards_reach_the_advantage,
    advantages_are_normalized_once,
)
