"""Training with agents that talk to the model through an endpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from command import CUT_DOWN, headwater, metrics, python_of, same_weights, train_here, weights

from headwater.observe.run_directory import RunDirectory

AGENT = "rollout.workflow_args.agent=tests/integration/endpoint_agent.py"
SETTINGS = [
    "quickstart", *CUT_DOWN, "rollout.workflow=endpoint", "rollout.max_new_tokens=32", "rollout.max_staleness=2",
    "eval.before=false", "eval.after=false",
]  # fmt: skip


def left_behind() -> list[str]:
    """The processes of agents whose run has ended."""
    found = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "fork_server.py" in line and line.split()[0] == str(os.getpid())]


def assert_nothing_is_left() -> None:
    deadline = time.monotonic() + 300
    while left := left_behind():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_agents_that_fail_are_dropped_and_counted(tmp_path):
    train_here(
        *SETTINGS, f"{AGENT}:unreliable", f"run.root={tmp_path}", "run.name=failing", "trainer.total_steps=3",
        "rollout.on_failure=drop", "rollout.workflow_args.timeout_s=8",
    )  # fmt: skip
    run = tmp_path / "failing"
    last = RunDirectory.open(run).read_ledger()[-1]["counts"]
    assert last["dispatched"] == last["trained"] + last["dropped"] + last["buffered"] + last["in_flight"]
    dropped = [each for record in RunDirectory.open(run).read_ledger() for each in record["dropped"]]
    assert {each["kind"] for each in dropped} <= {"agent_failed", "agent_timed_out"}
    said = " ".join(each["message"] for each in dropped)
    assert sum(words in said for words in ("a bad row", "exited with status 4", "killed by SIGKILL", "no reply")) >= 2
    assert sum(each["groups/dropped_agent_failed"] for each in metrics(run, "train")) > 0
    assert_nothing_is_left()


def test_a_run_with_agents_is_replayed_bit_by_bit_and_evaluated(tmp_path):
    train_here(
        *SETTINGS, f"{AGENT}:two_turns", f"run.root={tmp_path}", "run.name=recorded", "engine.deterministic=true"
    )
    rows = pq.read_table(tmp_path / "recorded" / "rollouts" / "step_000001.parquet").to_pylist()
    assert all(json.loads(row["info"])["agent_calls"] == {"answered": 2} for row in rows)
    assert json.loads((tmp_path / "recorded" / "status.json").read_text())["state"] == "finished"
    result = headwater("replay", tmp_path / "recorded")
    assert result.code == 0, result.stderr
    assert "equal the recorded ones, bit for bit" in result.stdout
    evaluated = headwater("eval", tmp_path / "recorded", "eval.num_prompts=4", "--show", "4")
    assert evaluated.code == 0, evaluated.stderr
    assert evaluated.stdout.count("    [user]\n    Sure?\n    [assistant]\n") == 4
    assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_with_agents_is_resumed(tmp_path):
    recipe = [
        *SETTINGS, f"{AGENT}:two_turns", f"run.root={tmp_path}", "engine.deterministic=true", "rollout.max_staleness=0",
    ]  # fmt: skip
    train_here(*recipe, "run.name=straight")
    train_here(*recipe, "run.name=resumed", "trainer.total_steps=1")
    train_here("--resume", tmp_path / "resumed", "trainer.total_steps=2")
    assert same_weights(weights(tmp_path / "resumed", 2), weights(tmp_path / "straight", 2))
    rows = pq.read_table(tmp_path / "resumed" / "rollouts" / "step_000002.parquet").to_pylist()
    assert {(row["num_turns"], row["ended_by"]) for row in rows} == {(2, "agent")}
    assert {each["episode/ended_by/agent"] for each in metrics(tmp_path / "resumed", "train")} == {1.0}
    assert_nothing_is_left()


def test_an_agent_that_cannot_be_imported_stops_the_run_with_its_error(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    result = headwater("train", *SETTINGS, f"run.root={tmp_path}", f"rollout.workflow_args.agent={broken}:solve")
    assert result.code != 0
    assert "No module named 'no_such_package'" in result.stderr + result.stdout


def sdk_python() -> str:
    """An interpreter that has the Agents SDK."""
    if importlib.util.find_spec("agents") is not None:
        return sys.executable
    python, is_installed = python_of("clients")
    if not is_installed:
        pytest.skip("NO AGENT FRAMEWORK WAS TESTED: run `pip install openai-agents`, or `make setup-clients`")
    return str(python)


@pytest.mark.slow
def test_agents_of_the_agents_sdk_are_rollouts_through_both_apis(tmp_path):
    train_here(
        *SETTINGS, "rollout.workflow_args.agent=tests/integration/sdk_agent.py:solve", f"run.root={tmp_path}",
        "run.name=sdk", f"rollout.workflow_args.python={sdk_python()}", "rollout.workflow_args.parser=hermes",
    )  # fmt: skip
    rows = pq.read_table(tmp_path / "sdk" / "rollouts" / "step_000002.parquet").to_pylist()
    infos = [json.loads(row["info"]) for row in rows]
    assert {info["api"] for info in infos} <= {"chat_completions", "responses"}
    assert all(info["agent_calls"] == {"answered": 1} for info in infos)
    assert all(row["reward"] == info["length"] % 3 for row, info in zip(rows, infos, strict=True))
    assert_nothing_is_left()


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_an_agent_of_the_agents_sdk_learns_to_call_its_tool(tmp_path):
    python = sdk_python()
    train_here(
        "examples/openai_agent.yaml", f"run.root={tmp_path}", "trainer.total_steps=12",
        "eval.every_steps=12", "eval.num_prompts=64",
        "rollout.workflow_args.agent=examples/openai_agents_sdk.py:solve", f"rollout.workflow_args.python={python}",
    )  # fmt: skip
    before, after = (each["reward/mean"] for each in metrics(tmp_path / "openai-agent", "eval"))
    assert after > before + 0.1
    rows = pq.read_table(tmp_path / "openai-agent" / "rollouts" / "step_000012.parquet").to_pylist()
    assert any('{"name": "calculator", "arguments": ' in row["response"] for row in rows)
