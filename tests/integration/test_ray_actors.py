"""Actors of a real Ray: tools with their state and their failures, actors that end, and a rank that is stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration import ray_actors
from integration.command import PROCESS_LIMIT_S, ROOT

pytest.importorskip("ray")


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the actors have left there, and ``results.json``."""
    made = tmp_path_factory.mktemp("actors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    done = subprocess.run(
        [sys.executable, ray_actors.__file__, str(made)],
        capture_output=True, text=True, env=environment, timeout=PROCESS_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_tools_in_actors_behave_like_those_of_the_process(folder, results):
    assert results["names"] == ["count", "fail", "draw", "python"]
    homes = []
    for number, (first, second, rewards) in enumerate(results["episodes"]):
        (value, pid), (next_value, next_pid) = (each["text"].split(" in ") for each in (first, second))
        assert (value, next_value) == (f"{10 * number + 1}", f"{10 * number + 2}"), "each episode has its own state"
        assert pid == next_pid, "an episode stays in its actor"
        assert (first["reward"], first["metrics"], first["failure"]) == (0.5, {"by": 1.0}, None)
        assert rewards == {"count": 10 * number + 2}
        homes.append(pid)
    assert len(set(homes)) == 2, "episodes are spread over the actors"
    assert set((folder / "checked").read_text().split()) == set(homes), "every actor checks its tools"
    failures = {how: (results[how]["failure"], results[how]["text"]) for how in ("unavailable", "slow", "bytes", "key")}
    assert failures == {
        "unavailable": ("unavailable", "Error: fail is not available: the service is down"),
        "slow": ("timed_out", f"Error: fail did not finish within {ray_actors.TIMEOUT_S} s"),
        "bytes": ("bad_result", "Error: fail returned no valid result"),
        "key": ("raised", "Error: fail raised LookupError: no key"),
    }
    assert results["slow took"] < 300, "the function in the actor is interrupted"
    assert results["python"]["text"].strip() == "42", results["python"]
    assert results["drawn"] == [56, 56], "data.max_image_pixels holds in actors, too"
    assert "create of tool count does not take begin" in results["row"]
    died, lost = results["after death"]
    assert (died["failure"], lost["failure"]) == ("unavailable", "unavailable")
    assert "its actor tools-" in died["text"]
    assert results["later"][1]["text"].startswith("32 in "), "a new episode runs in the actor that was started again"
    assert results["counts"].get("release_failed", 0) == 0
    assert len((folder / "released").read_text().split()) == 5, "all but the one whose actor ended"


def test_a_reward_actor_that_ends_is_started_again_and_its_calls_are_repeated_once(folder, results):
    rewards = results["rewards"]
    assert rewards["died once"] == [[0.5], [0.5]], "the call that ended the actor, and the one that it had besides"
    failure = rewards["died twice"]
    assert failure["cause"] == "worker_died"
    assert failure["text"].startswith("ended its actor reward-0: ")
    assert rewards["later"] == [0.5]
    pids = {number: (folder / f"{number} deaths").read_text().split() for number in (0, 1, 2)}
    assert (len(pids[1]), len(pids[2])) == (2, 2), "once more, and not again"
    assert len({*pids[1], *pids[2], pids[0][-1]}) == 4, "the actors of one start and of three restarts"


def test_a_rank_that_is_stopped_is_named_at_the_limit_of_its_call_and_ended(results):
    stopped = results["stopped rank"]
    limit = rf"\(learner\.rank_timeout_s = {ray_actors.HUNG_S:g}\)"
    who = rf"rank 1 \(node \S+, process {stopped['pid']}\) does not answer \(.*\)"
    told = rf"gave up after {ray_actors.HUNG_S:g} s: 2 ranks execute offload {limit}; {who}"
    assert re.fullmatch(told, stopped["failure"]), stopped["failure"]
    assert stopped["error"] == f"RankFailed: {stopped['failure']}"
