"""Our formulas against what verl and AReaL compute: every case of every family in tests/oracles."""

from __future__ import annotations

import algorithms.oracle_advantages
import algorithms.oracle_corrections
import algorithms.oracle_losses
import algorithms.oracle_work  # noqa: F401
import pytest
from algorithms.oracle import FAMILIES, PROPERTIES, names, read, run

CASES = [pytest.param(name, case, id=case["id"]) for name in names() for case in read(name)["public"]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_case(name, case):
    run(name, case)


def test_every_family_has_a_check():
    assert set(names()) == set(FAMILIES) | set(PROPERTIES)
    assert len(names()) == 55


def test_every_case_is_run():
    assert len(CASES) == len({param.id for param in CASES}) == 755
