"""docs/scorers.md says what the code does."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import yaml

from headwater.rewards.programs.cases import read_cases
from headwater.rewards.scorers import SCORERS, declared_sources, scorer_of

PAGE = (Path(__file__).parents[3] / "docs" / "scorers.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    section = PAGE.split(f"# {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_scorer_and_its_data_sources():
    described = set()
    for scorers, sources, _ in rows("Built-in scorers"):
        described |= set(names(scorers))
        for source in names(sources):
            if source not in ("reasoning_gym:<task>",):
                assert source.lower() in declared_sources(), source
            assert scorer_of(source.replace("*", "x")) == names(scorers)[0]
    assert described == set(SCORERS.names())


def test_settings_and_defaults():
    scorer, described = "", {}
    for scorers, setting, default, _ in rows("Settings"):
        scorer = scorers or scorer
        value = yaml.safe_load(names(default)[0] if "`" in default else default or "''")
        for each in names(scorer):
            described[each, names(setting)[0]] = value
    real = {
        (name, parameter.name): list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for name in SCORERS.names()
        if name != "llm_judge"  # its settings are on another page
        for parameter in inspect.signature(SCORERS.resolve(name)).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "sandbox"
    }
    assert described == real


def test_layouts_of_unit_tests():
    for _, truth in rows("Programs"):
        given = json.loads(names(truth)[0])
        assert len(read_cases(given, {})) == len(read_cases(json.dumps(given), {})) == 1
