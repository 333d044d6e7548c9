"""docs/coming-from-*.md: every setting and every operation of ours that the pages name exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import headwater.core.verl_functions
from headwater.algorithms.advantages import ADVANTAGES
from headwater.algorithms.corrections import CORRECTIONS
from headwater.algorithms.policy_losses import POLICY_LOSSES
from headwater.config.keys import settings
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto, DataProtoItem
from headwater.core.registry import Registry
from headwater.rewards.scorers import SCORERS
from headwater.workflows import WORKFLOWS
from headwater.workflows.adapters.verl_loop import EXTRA_SETTINGS

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("coming-from-verl.md", "coming-from-areal.md")
KEYS = settings(Config)
REGISTRIES: dict[str, Registry] = {
    "algorithm.advantage_args": ADVANTAGES,
    "algorithm.policy_loss_args": POLICY_LOSSES,
    "algorithm.corrections_args": CORRECTIONS,
    "reward.function_args": SCORERS,
    "rollout.workflow_args": WORKFLOWS,
}


ADAPTED = (EXTRA_SETTINGS, "gconfig", "reward_fn")
"""Arguments of classes for verl and AReaL."""


def rows(page: str, heading: str = "") -> Iterator[list[str]]:
    """The cells of the tables, without the first column, which has the names of the other project."""
    text = (DOCS / page).read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith(("| verl |", "| AReaL |")):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))][1:]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_setting(name: str) -> bool:
    key = name.partition("=")[0]
    owner, _, argument = key.rpartition(".")
    if owner == "rollout.workflow_args" and argument in ADAPTED:
        return True
    if owner in REGISTRIES:
        functions = [REGISTRIES[owner].resolve(each) for each in REGISTRIES[owner].names()]
        return any(argument in inspect.signature(function).parameters for function in functions)
    return key in KEYS


def test_every_row_of_settings_names_existing_ones() -> None:
    for page in PAGES:
        found = [name for ours, *_ in rows(page, "Settings") for name in code(ours)]
        assert len(found) > 50
        assert [name for name in found if not is_setting(name)] == [], page


def test_what_looks_like_a_setting_is_one() -> None:
    start = re.compile(rf"({'|'.join({key.partition('.')[0] for key in KEYS})})\.[a-z_]+[a-z_.]*(=\S+)?")
    for page in PAGES:
        cells = [cell for row in rows(page) for cell in row]
        text = (DOCS / page).read_text()
        prose = [line for line in text.splitlines() if not line.startswith("|")]
        found = [name for part in (*cells, *prose) for name in code(part) if start.fullmatch(name)]
        found += [word for name in code(" ".join(prose)) for word in name.split() if start.fullmatch(word)]
        wrong = [name for name in found if not is_setting(name) and not name.endswith((".yaml", ".json"))]
        assert wrong == [], page


def test_every_operation_exists() -> None:
    table = list(rows("coming-from-verl.md", "DataProto"))
    operations = [name for row in table if len(row) == 2 for name in code(row[0]) if name.isidentifier()]
    assert len(operations) > 25
    assert [name for name in operations if not hasattr(DataProto, name)] == []
    for name in ("pad_dataproto_to_divisor", "unpad_dataproto", "fold_batch_dim", "unfold_batch_dim"):
        assert hasattr(headwater.core.verl_functions, name)
    assert hasattr(headwater.core.verl_functions, "DataProtoFuture")
    assert list(inspect.signature(DataProtoItem).parameters) == ["tensors", "non_tensors", "meta_info"]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", (DOCS / page).read_text()):
            assert (DOCS / target).is_file(), f"{page}: {target}"
