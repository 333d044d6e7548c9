"""docs/algorithms.md describes every algorithm and every setting.

``trainer/test_algorithms_in_the_loop.py`` checks what it says under "Turn on" and "Metrics".
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from algorithms.doc_sections import ALGORITHMS, CHAPTERS, TEXT, item, sections, turn_on

KEYS = {"Advantages": "algorithm.advantage", "Policy losses": "algorithm.policy_loss"}


def test_every_name_has_its_section():
    for chapter, registry in CHAPTERS.items():
        assert set(sections(chapter)) == set(registry.names()), chapter


def test_every_setting_is_named():
    for chapter, name in ALGORITHMS:
        parameters = inspect.signature(CHAPTERS[chapter].resolve(name)).parameters
        for setting in list(parameters)[1:]:
            assert f"`{setting}`" in item(chapter, name, "Settings"), f"{name}: {setting}"


def test_every_section_says_what_it_is_when_to_use_it_and_how():
    for chapter, name in ALGORITHMS:
        definition = sections(chapter)[name].partition("\n- ")[0]
        assert definition.strip(), name
        assert item(chapter, name, "When"), name
        key = f"{KEYS[chapter]}={name}" if chapter in KEYS else f"algorithm.corrections=[{name}]"
        assert key in turn_on(chapter, name), name


def test_algorithms_without_vectors_of_another_system_are_named():
    adapters = "".join(path.read_text() for path in Path(__file__).parent.glob("oracle_*.py"))
    unchecked = {name for _, name in ALGORITHMS if not re.search(rf"\b{name}\b", adapters)}
    (told,) = re.findall(r"((?:`\w+`[ ,and]*)+)ha(?:s|ve) no counterpart there", TEXT)
    assert set(re.findall(r"`(\w+)`", told)) == unchecked
