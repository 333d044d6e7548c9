"""Which scorer a row's data_source means."""

from __future__ import annotations

import pytest

from headwater.config.declared import read_declared
from headwater.config.traits import ScorerTraits
from headwater.core.errors import UnknownName
from headwater.rewards.scorers import SCORERS, declared_sources, scorer_of

VERL = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime": "math_dapo",
    "aime_2024": "math_dapo",
    "aime2025": "math_dapo",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "hiyouga/geometry3k": "geometry3k",
    "searchR1_nq": "search_qa",
    "searchR1_triviaqa": "search_qa",
    "searchR1_popqa": "search_qa",
    "searchR1_hotpotqa": "search_qa",
    "searchR1_2wikimultihopqa": "search_qa",
    "searchR1_musique": "search_qa",
    "searchR1_bamboogle": "search_qa",
}
"""The data sources that verl's default_compute_score knows, and the prefix ``aime``."""
OTHERS = {
    "math": "math",
    "MATH": "math",
    "someone/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math_dapo",
    "openai_humaneval": "code",
    "humaneval": "code",
    "mbpp": "code",
    "google-research-datasets/mbpp": "code",
    "leetcode": "code",
    "livecodebench": "code",
    "evalplus/humanevalplus": "code",
    "reasoning_gym:chain_sum": "reasoning_gym",
    "countdown": "countdown",
    "gsm8k": "gsm8k",
}


def test_names_of_verl_and_others():
    for source, scorer in (VERL | OTHERS).items():
        assert scorer_of(source) == scorer, source


def test_an_unknown_name_lists_the_scorers():
    with pytest.raises(UnknownName, match=r"unknown scorer 'gsm9k'; did you mean 'gsm8k'\? known: .*math_dapo"):
        scorer_of("openai/gsm9k")


def test_every_scorer_is_found_by_its_own_name_and_declares_readable_sources():
    for name in SCORERS.names():
        assert scorer_of(name) == name
        assert read_declared(ScorerTraits, name) is not None
        assert callable(SCORERS.resolve(name))
    assert declared_sources()["lighteval/math"] == "math"
