"""Exports over two ranks that fail, are left early or are read by another thread. No rank is left waiting."""

from __future__ import annotations

import json
import re

import forked
import pytest
from integration import failing_ranks
from integration.command import PROCESS_LIMIT_S

ERROR = "MemoryError: no room for a full tensor"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = forked.run(failing_ranks.__file__, folder, timeout=PROCESS_LIMIT_S)
    assert {path.stem for path in folder.iterdir()} == failing_ranks.CASES.keys(), done.stderr[-3000:]
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


def test_an_error_of_one_rank_in_an_export_ends_the_others_and_is_named(outcomes):
    assert outcomes["rank 0 fails"] == {
        "seen": [0], "error": ERROR, "later": f"RankFailed: rank 0: {ERROR}", "failure": f"rank 0: {ERROR}"
    }  # fmt: skip
    named = f"rank 1 of 2: {ERROR}"
    assert outcomes["rank 1 fails"] == {
        "seen": [0], "error": f"RankFailed: {named}", "later": f"RankFailed: {named}", "failure": named
    }  # fmt: skip


def test_a_killed_rank_is_named_before_the_limit_of_its_call(outcomes):
    failure = outcomes["killed"]["failure"]
    said = r"rank 1: its process has ended \(killed, out of memory or crashed; see its output\)"
    found = re.fullmatch(rf"{said}, noticed at most (\S+) s later", failure)
    assert found, failure
    assert float(found[1]) <= outcomes["killed"]["seconds"] + 5.0
    assert outcomes["killed"]["error"] in ("interrupt", f"RankFailed: {failure}")
    assert outcomes["killed"]["seconds"] < failing_ranks.TIMEOUT_S


def test_ranks_that_fail_alike_in_an_export_stay_usable(outcomes):
    error = "DataError: no room for a full tensor"
    assert outcomes["both fail"] == {"seen": [0], "error": error, "later": "no error", "failure": ""}


def test_an_export_that_is_left_early_leaves_the_ranks_usable(outcomes):
    assert outcomes["left early"] == {"seen": [0], "later": [1, 2]}


def test_a_call_never_comes_into_an_export_that_another_thread_reads(outcomes):
    outcome = outcomes["two threads"]
    assert outcome["refused"] == (
        "RankFailed: offload: the ranks still execute export, which has not been read to its end"
    )
    assert outcome["events"] == ["item 0", "item 1", "item 2", "call"]
    assert outcome["steps"] == 1
