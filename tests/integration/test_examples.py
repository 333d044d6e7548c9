"""Each example trains with the command in its docstring, and stays short."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest
from command import ROOT, SMALL, metrics, train_here

EXAMPLES = {
    "custom_reward.py": [
        "reward.function=examples/custom_reward.py:compute_score", "reward.function_args.close_score=0.3",
    ],
    "custom_dataset.py": ["data.dataset=examples/custom_dataset.py:Doubling"],
    "custom_workflow.py": [
        "rollout.workflow=examples/custom_workflow.py:best_of_two", "rollout.workflow_args.min_reward=0.0",
    ],
    "tool_workflow.py": [
        "rollout.workflow=examples/tool_workflow.py:HigherOrLower", "rollout.workflow_args.latency_s=0.01",
        "rollout.max_new_tokens=24",
    ],
    "openai_agent.py": [
        "rollout.workflow=endpoint", "rollout.workflow_args.agent=examples/openai_agent.py:solve",
        "rollout.workflow_args.max_concurrent=3", "rollout.max_new_tokens=24",
    ],
    "openai_async_agent.py": [
        "rollout.workflow=endpoint", "rollout.workflow_args.agent=examples/openai_async_agent.py:check_twice",
        "rollout.workflow_args.run_in=thread", "rollout.max_new_tokens=24",
    ],
    "verl_agent_loop.py": ["rollout.workflow=examples/verl_agent_loop.py:CheckTwice", "rollout.max_new_tokens=32"],
    "areal_workflow.py": ["rollout.workflow=examples/areal_workflow.py:Retry", "rollout.max_new_tokens=32"],
}  # fmt: skip

IN_OTHER_ENVIRONMENTS = {"openai_agents_sdk.py", "train_from_python.py"}
"""Trained by test_endpoint_training.py and test_python_api.py."""


def test_every_example_is_listed_and_short():
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert found.keys() == EXAMPLES.keys() | IN_OTHER_ENVIRONMENTS
    assert all(lines < 50 for lines in found.values())


SLOW = {"openai_agent.py"}
"""It starts a process for every agent, as do the agents of test_endpoint_training.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in EXAMPLES]
)
def test_an_example_trains(name, tmp_path):
    no_evaluation = ("eval.before=false", "eval.after=false")
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=example", *no_evaluation, *EXAMPLES[name])
    run = tmp_path / "example"
    assert len(metrics(run, "train")) == 2
    rows = pq.read_table(run / "rollouts" / "step_000001.parquet").to_pylist()
    CHECKS[name](rows)


def _reward_was_used(rows) -> None:
    assert all('"is_number"' in row["info"] for row in rows)


def _dataset_was_used(rows) -> None:
    assert all(row["uid"].startswith("doubling/train/") and "2*" in row["prompt"] for row in rows)


def _workflow_was_used(rows) -> None:
    assert {json.loads(row["info"])["attempt"] for row in rows} == {0, 1}


def _tool_was_used(rows) -> None:
    hints = [hint for row in rows for hint in json.loads(row["info"])["hints"]]
    assert hints
    assert set(hints) <= {"Higher.", "Lower.", "A number!"}
    for row in rows:
        asked = bool(json.loads(row["info"])["hints"])
        mask = "".join(map(str, row["loss_mask"]))
        assert re.fullmatch("0+1+0+1+" if asked else "0+1+", mask)


def _agent_was_used(rows) -> None:
    assert all(json.loads(row["info"])["agent_calls"] == {"answered": 1} for row in rows)
    assert all(row["reward"] in (0.0, 1.0) for row in rows)


def _async_agent_was_used(rows) -> None:
    for row in rows:
        assert json.loads(row["info"])["agent_calls"] == {"answered": 2}
        assert re.fullmatch("0+1+0+1+", "".join(map(str, row["loss_mask"])))
        assert "Sure?" in row["response"]


def _loop_was_used(rows) -> None:
    for row in rows:
        assert re.fullmatch("0+1+0+1+", "".join(map(str, row["loss_mask"])))
        info = json.loads(row["info"])
        assert info["num_turns"] == 3
        assert info["loop_metrics"]["generate_sequences"] > 0


def _areal_workflow_was_used(rows) -> None:
    for row in rows:
        assert re.fullmatch("0+1+(0+1+)?", "".join(map(str, row["loss_mask"])))
        assert json.loads(row["info"])["num_turns"] == 1 + ("10" in "".join(map(str, row["loss_mask"])))


CHECKS = {
    "openai_agent.py": _agent_was_used,
    "openai_async_agent.py": _async_agent_was_used,
    "verl_agent_loop.py": _loop_was_used,
    "areal_workflow.py": _areal_workflow_was_used,
    "custom_reward.py": _reward_was_used,
    "custom_dataset.py": _dataset_was_used,
    "custom_workflow.py": _workflow_was_used,
    "tool_workflow.py": _tool_was_used,
}


def test_a_dotted_path_works_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    settings = [each.replace("examples/", "examples.").replace(".py:", ":") for each in EXAMPLES["tool_workflow.py"]]
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=dotted", *settings)
    _tool_was_used(pq.read_table(tmp_path / "dotted" / "rollouts" / "step_000001.parquet").to_pylist())
