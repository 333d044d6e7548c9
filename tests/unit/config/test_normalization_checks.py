"""Normalisations that would change nothing, or not what they seem to, are refused with the remedy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from headwater.algorithms.advantages import ADVANTAGES as ADVANTAGES_BY_NAME
from headwater.algorithms.advantages import AdvantageInputs
from headwater.algorithms.normalize import normalize_rewards
from headwater.config.load import load_config
from headwater.core.errors import ConfigError

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
    (
        ["algorithm.advantage=reinforce_plus_plus", f"{REWARDS}.std_level=batch"],
        f"{REWARDS}.std_level = 'batch'",
        ["reinforce_plus_plus whitens over the batch, which undoes", "algorithm.advantage_args.whitened=false"],
    ),
    *(
        (
            ["algorithm.advantage=reinforce_plus_plus_baseline", f"{REWARDS}.{level}={value}"],
            f"{REWARDS}.{level} = '{value}'",
            ["so only a deviation of the group could change anything", f"use none, {REWARDS}.std_level=group, or"],
        )
        for level, value in (("std_level", "batch"), ("mean_level", "group"))
    ),
    *(
        ([f"algorithm.advantage={name}", f"{REWARDS}.std_level=batch"], f"{REWARDS}.std_level = 'batch'", [reason])
        for name, reason in (
            ("gpg", "counts the samples whose score is not 0; use none, or"),
            ("remax", "the score of the greedy response, which is not normalised"),
            ("gdpo", "reward_parts"),
            ("grpo", "algorithm.advantage = grpo already normalises scores within the group"),
            ("grpo_passk", "so this would change nothing; use none, or algorithm.advantage=reinforce_plus_plus"),
        )
    ),
    *(
        (
            [f"algorithm.advantage={name}", *more, f"{REWARDS}.mean_level=group"],
            f"{REWARDS}.mean_level = 'group'",
            [f"{name} already subtracts the mean of the group, so only a deviation could change anything"],
        )
        for name, more in (
            ("grpo", ["algorithm.advantage_args.normalize_by_std=false"]),
            ("rloo", []),
            ("opo", []),
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


def test_a_clash_names_both_keys_and_the_remedy(assert_clashes):
    assert_clashes(CLASHES)


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


def test_settings_that_go_together_load_and_load_again_when_resolved(assert_loads_again):
    assert_loads_again(FITTING)


ADVANTAGES_OF_SCORES = [
    ("grpo", {}),
    ("grpo", {"normalize_by_std": False}),
    ("grpo_passk", {}),
    ("grpo_passk", {"normalize_by_std": False}),
    ("rloo", {}),
    ("opo", {}),
    ("reinforce_plus_plus", {}),
    ("reinforce_plus_plus", {"whitened": False}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
    ("reinforce_plus_plus", {"gamma": 0.9, "whitened": False}),
    ("reinforce_plus_plus_baseline", {}),
    ("optimal_token_baseline", {}),
    ("gae", {}),
    ("gae", {"gamma": 0.9, "whitened": False}),
    ("gae_turn", {}),
]
SETTINGS = [
    {"mean_level": mean, "std_level": std, "leave_one_out": leave_one_out}
    for mean, std, leave_one_out in product(("none", "batch", "group"), ("none", "batch", "group"), (False, True))
    if (mean, std) != ("none", "none") and not (mean == "none" and leave_one_out)
]


def advantage_inputs(num_turns: int) -> AdvantageInputs:
    """Five groups of four responses of two turns, with a reward at the end of the last turn or of both."""
    generator = torch.Generator().manual_seed(0)
    shape, rows = (20, 9), torch.arange(20)
    lengths = torch.randint(4, 10, (20,), generator=generator)
    mask = (torch.arange(9) < lengths[:, None]).double()
    mask[:, 2] = 0
    scores = torch.randn(2, 20, generator=generator, dtype=torch.float64)
    rewards = torch.zeros(shape, dtype=torch.float64)
    rewards[rows, lengths - 1] = scores[0]
    if num_turns == 2:
        rewards[rows, 1] = scores[1]
    noise = torch.rand(3, *shape, generator=generator, dtype=torch.float64)
    turns = (torch.arange(9) > 2).long().expand(shape)
    return AdvantageInputs(
        rewards, mask, rows // 4, values=noise[0], turns=turns, old_logprobs=-noise[1], sum_pi_squared=noise[2]
    )


def changes_something(name: str, args: dict, chosen: dict, num_turns: int) -> bool:
    """Whether training would be another one: by its advantages, or by the returns that a critic learns."""
    estimate, inputs = ADVANTAGES_BY_NAME.resolve(name), advantage_inputs(num_turns)
    columns = inputs.mask.shape[1] - 1 - inputs.mask.flip(1).argmax(dim=1)
    rewards = normalize_rewards(inputs.rewards, columns, groups=inputs.groups, unbiased=True, epsilon=1e-5, **chosen)
    plain, made = (estimate(each, **args) for each in (inputs, replace(inputs, rewards=rewards)))
    pairs = [(plain.advantages, made.advantages)]
    if "gae" in name:
        pairs.append((plain.returns, made.returns))
    return not all(torch.allclose(*pair, atol=1e-3, rtol=1e-3) for pair in pairs)


@pytest.mark.parametrize(("name", "args"), ADVANTAGES_OF_SCORES)
def test_what_is_refused_changes_nothing_and_what_loads_does(name, args):
    """Every combination, compared with its effect."""
    overrides = [f"algorithm.advantage={name}", "rollout.num_samples_per_prompt=4"]
    overrides += [f"algorithm.advantage_args.{key}={str(value).lower()}" for key, value in args.items()]
    overrides += ["critic.enabled=true"] if "gae" in name else []
    overrides += ["algorithm.old_logprobs=recompute"] if name == "optimal_token_baseline" else []
    load_config(None, overrides)
    for chosen in SETTINGS:
        given = [f"{REWARDS}.{key}={str(value).lower()}" for key, value in chosen.items() if value]
        does_load = loads(*overrides, *given)
        assert does_load == changes_something(name, args, chosen, num_turns=1), chosen
        # The mean of the others is another one for every response, which rewards of turns show by a few per cent.
        if not does_load and not chosen["leave_one_out"]:
            assert not changes_something(name, args, chosen, num_turns=2), chosen


def loads(*overrides: str) -> bool:
    try:
        load_config(None, overrides)
    except ConfigError:
        return False
    return True


def test_a_level_that_does_not_exist_is_named(problems):
    (line,) = problems(None, f"{REWARDS}.mean_level=groups")
    assert "no such choice" in line
    assert "group" in line
