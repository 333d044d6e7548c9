"""Our formulas against what verl and AReaL compute: every case of every family in tests/oracles."""

from __future__ import annotations

import math

import algorithms.oracle_advantages
import algorithms.oracle_corrections
import algorithms.oracle_losses
import algorithms.oracle_pipeline
import algorithms.oracle_work  # noqa: F401
import pytest
from algorithms.oracle import FAMILIES, PROPERTIES, assert_equal, names, read, run


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


def test_nan_equals_only_nan():
    for actual, expected in ((math.nan, "nan"), ([1, [math.nan]], [1, ["nan"]]), (-math.inf, "-inf"), (1, 1.0)):
        assert_equal(actual, expected, "output")
    for actual, expected in ((math.nan, 0.0), (0.0, "nan"), (math.inf, "nan"), ([math.nan], [1.0]), ([math.nan], [])):
        with pytest.raises(AssertionError, match="output"):
            assert_equal(actual, expected, "output")
