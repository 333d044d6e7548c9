"""docs/algorithms.md tells of every algorithm and every setting.

That what it says under "Turn on" and "Metrics" is so, ``trainer/test_algorithms_in_the_loop.py`` checks.
"""

from __future__ import annotations

import inspect

import pytest
from algorithms.doc_sections import ALGORITHMS, CHAPTERS, item, sections, turn_on

KEYS = {"Advantages": "algorithm.advantage", "Policy losses": "algorithm.policy_loss"}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_name_has_its_section(chapter):
    assert set(sections(chapter)) == set(CHAPTERS[chapter].names())


@pytest.mark.parametrize(("chapter", "name"), ALGORITHMS)
def test_every_setting_is_named(chapter, name):
    parameters = inspect.signature(CHAPTERS[chapter].resolve(name)).parameters
    for setting in list(parameters)[1:]:
        assert f"`{setting}`" in item(chapter, name, "Settings"), f"{name}: {setting}"


@pytest.mark.parametrize(("chapter", "name"), ALGORITHMS)
def test_every_section_says_what_it_is_when_to_use_it_and_how(chapter, name):
    definition = sections(chapter)[name].partition("\n- ")[0]
    assert definition.strip()
    assert item(chapter, name, "When")
    key = f"{KEYS[chapter]}={name}" if chapter in KEYS else f"algorithm.corrections=[{name}]"
    assert key in turn_on(chapter, name)
