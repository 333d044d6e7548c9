"""Normalisations that would change nothing, or not what they seem to, are refused with the remedy."""

from __future__ import annotations

import pytest

from headwater.config.explain import to_yaml
from headwater.config.load import load_config

REWARDS, ADVANTAGES = "algorithm.normalize_rewards", "algorithm.normalize_advantages"
PLAIN_RETURNS = ["algorithm.advantage=reinforce_plus_plus", "algorithm.advantage_args.whitened=false"]
ONE_SAMPLE = [*PLAIN_RETURNS, "rollout.num_samples_per_prompt=1"]

CLASHES = [
    (
        [*PLAIN_RETURNS, f"{REWARDS}.std_level=batch", f"{REWARDS}.leave_one_out=true"],
        f"{REWARDS}.leave_one_out = true",
        [f"nothing reads this, because {REWARDS}.mean_level = none; use batch or group, or remove this"],
    ),
    *(
        (
            [f"{ADVANTAGES}.mean_level=batch", f"{ADVANTAGES}.{name}={value}"],
            f"{ADVANTAGES}.{name} = {value}",
            [f"{ADVANTAGES}.std_level = none"],
        )
        for name, value in (("unbiased", "false"), ("epsilon", "0.1"))
    ),
    *(
        (
            [*ONE_SAMPLE, f"{REWARDS}.{level}=group"],
            f"{REWARDS}.{level} = 'group'",
            ["a group of one score", "use batch, or rollout.num_samples_per_prompt=2"],
        )
        for level in ("mean_level", "std_level")
    ),
    (
        [*ONE_SAMPLE, f"{ADVANTAGES}.mean_level=group"],
        f"{ADVANTAGES}.mean_level = 'group'",
        ["a group of one score", "rollout.num_samples_per_prompt=2"],
    ),
    *(
        (
            [f"algorithm.advantage={name}", f"{REWARDS}.std_level=batch"],
            f"{REWARDS}.std_level = 'batch'",
            [f"{name} whitens over the batch, which undoes", remedy],
        )
        for name, remedy in (
            ("reinforce_plus_plus", "algorithm.advantage_args.whitened=false"),
            ("reinforce_plus_plus_baseline", "or another advantage"),
        )
    ),
    *(
        ([f"algorithm.advantage={name}", f"{REWARDS}.std_level=batch"], f"{REWARDS}.std_level = 'batch'", [reason])
        for name, reason in (
            ("gpg", "counts the samples whose score is not 0; use none, or"),
            ("remax", "the greedy response's score, which is not normalised"),
            ("gdpo", "reward_parts"),
            ("grpo", "algorithm.advantage = grpo normalises scores within the group anyway, so nothing would change"),
            ("grpo_passk", "nothing would change; use none, or algorithm.advantage=reinforce_plus_plus"),
        )
    ),
    *(
        (
            [f"algorithm.advantage={name}", *more, f"{REWARDS}.mean_level=group"],
            f"{REWARDS}.mean_level = 'group'",
            [f"{name} compares with a mean of the group anyway, so only a deviation could change anything"],
        )
        for name, more in (
            ("grpo", ["algorithm.advantage_args.normalize_by_std=false"]),
            ("rloo", []),
            ("opo", []),
            ("reinforce_plus_plus_baseline", []),
        )
    ),
    *(
        (
            [f"algorithm.advantage={name}", *more, f"{ADVANTAGES}.mean_level=batch"],
            f"{ADVANTAGES}.mean_level = 'batch'",
            [f"algorithm.advantage = {name} already whitens over the batch", remedy],
        )
        for name, more, remedy in (
            ("gae", ["critic.enabled=true"], "algorithm.advantage_args.whitened=false"),
            ("gae_turn", ["critic.enabled=true"], "algorithm.advantage_args.whitened=false"),
            ("reinforce_plus_plus", [], "algorithm.advantage_args.whitened=false"),
            ("reinforce_plus_plus_baseline", [], "such as grpo"),
            ("gdpo", [], "such as grpo"),
        )
    ),
]


@pytest.mark.parametrize(("overrides", "blamed", "mentions"), CLASHES)
def test_a_clash_names_both_keys_and_the_remedy(assert_clash, overrides, blamed, mentions):
    assert_clash(overrides, blamed, mentions)


FITTING = [
    [
        *PLAIN_RETURNS,
        f"{REWARDS}={{mean_level: group, std_level: group, leave_one_out: true, unbiased: false, epsilon: 1.0e-3}}",
        f"{ADVANTAGES}={{mean_level: batch, std_level: batch}}",
    ],
    [*ONE_SAMPLE, f"{REWARDS}={{mean_level: batch, std_level: batch}}"],
    [*ONE_SAMPLE, "algorithm.advantage_args.gamma=0.9", f"{ADVANTAGES}={{mean_level: group, std_level: group}}"],
    ["algorithm.kl_in_reward=0.1", f"{REWARDS}={{mean_level: batch, std_level: batch}}"],
    ["algorithm.advantage=rloo", f"{REWARDS}={{mean_level: group, leave_one_out: true}}"],
    ["algorithm.advantage=reinforce_plus_plus", f"{REWARDS}={{mean_level: group, std_level: group}}"],
    ["algorithm.advantage_args.normalize_by_std=false", f"{REWARDS}.std_level=batch"],
    ["algorithm.advantage=rloo", f"{REWARDS}.std_level=group"],
    [f"{ADVANTAGES}={{mean_level: batch, std_level: batch}}"],
    ["algorithm.advantage=my.module:advantage", f"{REWARDS}.mean_level=batch", f"{ADVANTAGES}.std_level=batch"],
]


@pytest.mark.parametrize("overrides", FITTING)
def test_settings_that_go_together_load_and_load_again_when_resolved(overrides, write):
    config = load_config(None, overrides).config
    assert load_config(write("resolved.yaml", to_yaml(config))).config == config


def test_a_level_that_does_not_exist_is_named(problems):
    (line,) = problems(None, f"{REWARDS}.mean_level=groups")
    assert "no such choice" in line
    assert "group" in line
