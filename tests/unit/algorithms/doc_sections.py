"""What docs/algorithms.md says about each algorithm, item by item."""

from __future__ import annotations

import re
from pathlib import Path

from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.policy_losses import POLICY_LOSSES

TEXT = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
CHAPTERS = {"Advantages": ADVANTAGES, "Policy losses": POLICY_LOSSES, "Corrections": CORRECTIONS}
ALGORITHMS = [(chapter, name) for chapter, registry in CHAPTERS.items() for name in registry.names()]


def sections(chapter: str) -> dict[str, str]:
    text = TEXT.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", text, flags=re.MULTILINE | re.DOTALL))


def item(chapter: str, name: str, label: str) -> str:
    """The text of ``- label: ...``; a section has every item once."""
    (text,) = re.findall(rf"^- {label}: (.*?)(?=^- |\Z)", sections(chapter)[name], flags=re.MULTILINE | re.DOTALL)
    return text.strip()


def turn_on(chapter: str, name: str) -> list[str]:
    """The settings to add to a command: the first thing in quotes."""
    return item(chapter, name, "Turn on").split("`")[1].split(" ")


def metrics(chapter: str, name: str) -> set[str]:
    """Those reported with the default settings; metrics of other settings come after a semicolon."""
    return set(re.findall(r"`(\w+)`", item(chapter, name, "Metrics").partition(";")[0]))
