"""Our formulas against what verl and AReaL compute: every case of every family in tests/oracles."""

from __future__ import annotations

import algorithms.oracle_advantages
import algorithms.oracle_corrections
import algorithms.oracle_losses
import algorithms.oracle_pipeline
import algorithms.oracle_work  # noqa: F401
import pytest
from algorithms.oracle import FAMILIES, PROPERTIES, names, read, run


@pytest.mark.parametrize("name", names())
def test_family(name):
    for case in read(name)["public"]:
        try:
            run(name, case)
        except Exception as error:
            raise AssertionError(f"{case['id']}: {error}") from error


def test_every_family_has_a_check_and_every_case_is_run():
    assert set(names()) == set(FAMILIES) | set(PROPERTIES)
    assert len(names()) == 55
    identities = [case["id"] for name in names() for case in read(name)["public"]]
    assert len(identities) == len(set(identities)) == 755
