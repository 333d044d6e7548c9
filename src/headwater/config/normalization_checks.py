"""Normalisations of rewards and advantages that would change nothing, or not what they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.config.algorithm_checks import GROUP_ADVANTAGES
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
    """Only of scores: the advantages of one response are many."""
    if config.rollout.num_samples_per_prompt > 1:
        return
    for key in (f"{REWARDS}.mean_level", f"{REWARDS}.std_level"):
        if value_at(config, key) == "group":
            yield Clash(
                (key, "rollout.num_samples_per_prompt"),
                "a group of one score has neither a mean nor a deviation to compare with; use batch, or "
                "rollout.num_samples_per_prompt=2 or more",
            )


def normalized_rewards_reach_the_advantage(config: Config, layers: Layers) -> Iterator[Clash]:
    algorithm = config.algorithm
    normalization, advantage = algorithm.normalize_rewards, algorithm.advantage
    if not normalization.is_on:
        return
    key = f"{REWARDS}.{'mean_level' if normalization.mean_level != 'none' else 'std_level'}"
    keys, off = (key, "algorithm.advantage"), "use none, or algorithm.advantage=reinforce_plus_plus"
    if advantage in NEEDS_SCORES_AS_GIVEN:
        yield Clash(keys, f"algorithm.advantage = {advantage} {NEEDS_SCORES_AS_GIVEN[advantage]}; {off}")
    elif advantage in SCALED_BY_GROUP and algorithm.advantage_args.get("normalize_by_std") is not False:
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} normalises scores within the group anyway, so nothing would change; "
            f"{off}",
        )
    elif advantage in GROUP_ADVANTAGES - {"optimal_token_baseline"} and normalization.std_level == "none":
        yield Clash(
            keys,
            f"algorithm.advantage = {advantage} compares with a mean of the group anyway, so only a deviation could "
            f"change anything; {off}",
        )


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
