"""What the built-in algorithms declare: as the source says it, so Python has it, and nonsense is refused."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
from algorithms.doc_sections import ALGORITHMS, CHAPTERS

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.declared import read_declared
from headwater.config.traits import AdvantageTraits, CorrectionTraits, LossTraits

TRAITS = {"Advantages": AdvantageTraits, "Policy losses": LossTraits, "Corrections": CorrectionTraits}


def test_types_and_ranges_read_from_the_source_are_those_of_the_function():
    for chapter, name in ALGORITHMS:
        declared, function = read_declared(TRAITS[chapter], name), CHAPTERS[chapter].resolve(name)
        hints = get_type_hints(function, include_extras=True)
        defaults = inspect.unwrap(function).__kwdefaults__ or {}
        assert list(declared.parameters) == list(defaults), name
        for argument, parameter in declared.parameters.items():
            assert parameter.hint == hints[argument], f"{name}: {argument}"
            assert parameter.hint is not Any, f"{name}: {argument}"
            assert parameter.default == defaults[argument], f"{name}: {argument}"


def test_defaults_are_allowed():
    for chapter, name in ALGORITHMS:
        declared = read_declared(TRAITS[chapter], name)
        defaults = {argument: parameter.default for argument, parameter in declared.parameters.items()}
        assert list(declared.problems(defaults)) == [], name


NONSENSE = [
    (AdvantageTraits, "grpo", {"epsilon": 0}),
    (AdvantageTraits, "gpg", {"divisor": 0}),
    (AdvantageTraits, "gae", {"gamma": 1.1}),
    (AdvantageTraits, "gae", {"lam": -0.1}),
    (AdvantageTraits, "gdpo", {"reward_weights": ["a"]}),
    (AdvantageTraits, "rloo", {"singleton": "one"}),
    (LossTraits, "ppo", {"clip_low": -0.1}),
    (LossTraits, "ppo", {"dual_clip": 1.0}),
    (LossTraits, "decoupled", {"dual_clip": 0.5}),
    (LossTraits, "decoupled", {"lower": 6.0}),
    (LossTraits, "sapo", {"tau_positive": 0}),
    (LossTraits, "sapo", {"aggregation": "token_mean"}),
    (LossTraits, "dro", {"beta": 0}),
    (LossTraits, "dro", {"beta": -0.1}),
    (LossTraits, "kl_cov", {"fraction": 2}),
    (LossTraits, "kl_cov", {"fraction": 0}),
    (LossTraits, "ppo", {"max_log_ratio": 0}),
    (LossTraits, "gspo", {"clip_high": -1e-4}),
    (LossTraits, "geo_mean", {"clip_low": -0.4}),
    (LossTraits, "clip_cov", {"upper": 0}),
    (LossTraits, "dppo_tv", {"bound_low": -1}),
    (CorrectionTraits, "truncate", {"lower": 3.0}),
    (CorrectionTraits, "truncate", {"upper": 0}),
    (CorrectionTraits, "icepop", {"upper": 0.4}),
    (CorrectionTraits, "reject", {"upper": 1.0, "lower": 2.0}),
    (CorrectionTraits, "m2po", {"threshold": 0}),
]
USEFUL = [
    (AdvantageTraits, "gdpo", {"reward_weights": [1, 0.5]}),
    (LossTraits, "ppo", {"dual_clip": float("inf")}),
    (LossTraits, "decoupled", {"metric": "k1", "lower": -1.0, "dual_clip": None}),
    (LossTraits, "sapo", {"aggregation": None}),
    (CorrectionTraits, "truncate", {"upper": float("inf")}),
]


RESOLVE = {AdvantageTraits: ADVANTAGES, LossTraits: POLICY_LOSSES, CorrectionTraits: CORRECTIONS}


def test_nonsense_is_refused_and_useful_values_are_not():
    """In a recipe, and in a call from Python code: arguments are checked before inputs are read."""
    for traits, name, arguments in NONSENSE:
        assert len(list(read_declared(traits, name).problems(arguments))) == 1, (name, arguments)
        with pytest.raises(ValueError, match=f"{name}: "):
            RESOLVE[traits].resolve(name)(None, **arguments)
    for traits, name, arguments in USEFUL:
        assert list(read_declared(traits, name).problems(arguments)) == [], (name, arguments)
