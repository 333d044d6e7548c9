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
from headwater.config.foreign_keys import AREAL, TRL, VERL, ForeignKey, foreign_key
from headwater.config.keys import sections, settings
from headwater.config.schema import Config
from headwater.core.data_proto import DataProto, DataProtoItem
from headwater.core.registry import Registry
from headwater.rewards.scorers import SCORERS
from headwater.workflows import WORKFLOWS
from headwater.workflows.adapters.verl_loop import EXTRA_SETTINGS

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("coming-from-verl.md", "coming-from-areal.md", "coming-from-trl.md")
KEYS = settings(Config)
SECTIONS = {key.partition(".")[0] for key in KEYS}
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
        if line.startswith("| ") and not line.startswith(("| verl |", "| AReaL |", "| TRL |")):
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


def test_errors_about_names_of_trl_name_the_settings_of_its_page() -> None:
    table = [line.split("|", 2) for line in (DOCS / "coming-from-trl.md").read_text().splitlines() if line[:2] == "| "]
    for name, ours in TRL.items():
        described = [rest for _, theirs, rest in table if name in [each.partition("=")[0] for each in code(theirs)]]
        ours = ours.partition(",")[0]
        section = ours.partition(".")[0]
        assert any(f"`{ours}" in rest or f"`{section}=" in rest for rest in described), name


def foreign_rows(page: str) -> Iterator[tuple[list[str], str]]:
    """The other project's keys of each row of settings, in full, and our column."""
    section = (DOCS / page).read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            theirs, ours, *_ = [cell.strip() for cell in line.strip("|").split("|")]
            names = code(theirs)
            section_of_first = names[0].rpartition(".")[0]
            roots = {name.partition(".")[0] for name in (*VERL, *AREAL)}
            full = [name if name.partition(".")[0] in roots else f"{section_of_first}.{name}" for name in names]
            yield full, ours


def test_errors_about_their_keys_name_the_settings_of_the_pages() -> None:
    num_keys = 0
    for page, project in (("coming-from-verl.md", "verl"), ("coming-from-areal.md", "AReaL")):
        for theirs, ours in foreign_rows(page):
            for key in theirs:
                if key in KEYS:  # the same name on both sides: not an unknown key
                    assert f"`{key}`" in ours, key
                    continue
                found = foreign_key(key)
                assert found is not None, f"{page}: {key}"
                assert found.project == project, f"{page}: {key}"
                named = [name.partition("=")[0] for name in code(ours)]
                assert not named or set(found.keys) & set(named), f"{page}: {key} is {found.text}, not {ours}"
                num_keys += 1
    assert num_keys > 150


def test_errors_about_their_keys_name_settings_that_exist() -> None:
    for names in (VERL, AREAL, TRL):
        for key, text in names.items():
            assert key not in KEYS, f"{key} is our own key"
            words = [word for word in ForeignKey("", text).keys if word.partition(".")[0] in SECTIONS]
            wrong = [word for word in words if not is_setting(word) and word not in sections(Config)]
            assert wrong == [], f"{key}: {text}"


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
