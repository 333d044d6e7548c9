"""docs/algorithms.md tells of every algorithm and every setting."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.policy_losses import POLICY_LOSSES

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
CHAPTERS = {"Advantages": ADVANTAGES, "Policy losses": POLICY_LOSSES, "Corrections": CORRECTIONS}


def sections(chapter: str) -> dict[str, str]:
    text = TEXT.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_name_has_its_section(chapter):
    assert set(sections(chapter)) == set(CHAPTERS[chapter].names())


@pytest.mark.parametrize(
    ("chapter", "name"), [(chapter, name) for chapter, registry in CHAPTERS.items() for name in registry.names()]
)
def test_every_setting_is_named(chapter, name):
    parameters = inspect.signature(CHAPTERS[chapter].resolve(name)).parameters
    for setting in list(parameters)[1:]:
        assert f"`{setting}`" in sections(chapter)[name], f"{name}: {setting}"
