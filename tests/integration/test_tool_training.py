"""Training with tools: a tiny model learns to call the calculator, exactly resumable, and whatever the tools do."""

from __future__ import annotations

import json
import signal
import time

import pyarrow.parquet as pq
import pytest
from command import (
    CUT_DOWN,
    headwater,
    is_gone,
    metrics,
    same_weights,
    start_headwater,
    train_here,
    weights,
)
from odd_tools import count

from headwater.cli.process import EXIT_INTERRUPTED
from headwater.observe.run_directory import RunDirectory

RECIPE = "quickstart-tools"


def rollouts(run, step: int) -> list[dict]:
    return pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def is_balanced(run) -> bool:
    counts = [each["counts"] for each in RunDirectory.open(run).read_ledger()]
    parts = ("trained", "dropped", "buffered", "in_flight")
    return bool(counts) and all(each["dispatched"] == sum(each[part] for part in parts) for each in counts)


@pytest.mark.slow
@pytest.mark.xdist_group("calculator")
def test_a_tiny_model_learns_to_call_the_calculator(warm, tmp_path):
    run = learns(warm, tmp_path)
    trained = metrics(run, "train")
    assert all(each["tools/failures/raised"] == 0 and each["episode/turns"] <= 2 for each in trained)
    assert trained[-1]["tools/calls"] > trained[0]["tools/calls"] - 0.05
    row = max(rollouts(run, trained[-1]["step"]), key=lambda row: row["reward"])
    info, messages = json.loads(row["info"]), json.loads(row["messages"])
    assert (row["reward"], info["num_tool_calls"], info["tool_calls"]) == (1.0, 1, {"calculator": 1})
    assert messages[-2]["role"] == "tool"
    assert messages[-2]["content"] == messages[-1]["content"] == json.loads(row["ground_truth"])
    assert [mask for mask, version in zip(row["loss_mask"], row["versions"], strict=True) if version >= 0].count(0) == 0


@pytest.mark.slow
@pytest.mark.xdist_group("calculator")
def test_it_learns_with_stale_rollouts(warm, tmp_path):
    settings = ["rollout.max_staleness=4", "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute"]
    trained = metrics(learns(warm, tmp_path, *settings), "train")
    # How old the tokens become depends on the machine, but some are older than the weights they train.
    assert any(each.get(f"staleness/lag_{lag}", 0) > 0 for each in trained for lag in range(1, 5))


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A model that knows how calls are written."""
    root = tmp_path_factory.mktemp("warm")
    train_here(RECIPE, f"run.root={root}", "trainer.total_steps=1", "eval.every_steps=0", "eval.num_prompts=16")
    return root / RECIPE / "checkpoints" / "step_000001" / "model"


def learns(model, root, *settings: str):
    """Train with the recipe, shortened, and check that the reward rises and the ledger balances."""
    train_here(
        RECIPE, f"run.root={root}", f"model.path={model}", "warm_start.num_steps=0", "trainer.total_steps=15",
        "eval.every_steps=0", "eval.num_prompts=64", *settings,
    )  # fmt: skip
    run = root / RECIPE
    before, after = (each["reward/mean"] for each in metrics(run, "eval"))
    assert before < 0.4
    assert after > before + 0.2
    assert is_balanced(run)
    return run


@pytest.mark.slow
def test_the_reward_of_a_tool_is_learned(tmp_path):
    """Without a warm start: the model learns to write digits, because its tool rewards them."""
    train_here(
        "quickstart", *CUT_DOWN, f"run.root={tmp_path}", "rollout.workflow=tool_agent", "trainer.total_steps=6",
        f"tools.parser={ODD}:WholeReply", f"tools.use=[{ODD}:measure]", f"reward.function={ODD}:no_score",
        "rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 2, tool_reward_weight: 1.0}",
        "rollout.max_new_tokens=32", "data.max_prompt_tokens=96", "trainer.num_prompts_per_step=8",
        "rollout.num_samples_per_prompt=8", "learner.learning_rate=3e-3", "eval.before=false", "eval.after=false",
    )  # fmt: skip
    trained = metrics(tmp_path / "quickstart", "train")
    rewards = [each["reward/mean"] for each in trained]
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert {each["tools/calls"] for each in trained} == {1.0}
    assert is_balanced(tmp_path / "quickstart")


@pytest.mark.slow
def test_a_tiny_model_learns_to_write_what_the_calculator_answers(tmp_path):
    """Without a warm start: every reply is a call. The test above learns from a tool's reward instead."""
    train_here(
        "quickstart", *CUT_DOWN, f"run.root={tmp_path}", "rollout.workflow=tool_agent", "trainer.total_steps=6",
        f"tools.parser={ODD}:WholeExpression", "tools.use=[calculator]", f"reward.function={ODD}:calculated",
        "rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 2}", "rollout.max_new_tokens=64",
        "data.max_prompt_tokens=96", "trainer.num_prompts_per_step=8",
        "rollout.num_samples_per_prompt=8", "learner.learning_rate=3e-3", "eval.before=false", "eval.after=false",
    )  # fmt: skip
    trained = metrics(tmp_path / "quickstart", "train")
    rewards = [each["reward/mean"] for each in trained]
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert {each["tools/calls/calculator"] for each in trained} == {1.0}
    assert is_balanced(tmp_path / "quickstart")


ODD = "tests/integration/odd_tools.py"
UNTRAINED = [
    "quickstart", *CUT_DOWN, "rollout.workflow=tool_agent", f"tools.parser={ODD}:EveryReply",
    "rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 4}", "rollout.max_new_tokens=96",
    "data.max_prompt_tokens=96", "eval.before=false", "eval.after=false",
]  # fmt: skip
"""An untrained model, in whose replies a parser finds calls."""


def odd(*names: str) -> str:
    return f"tools.use=[{', '.join(f'{ODD}:{name}' for name in names)}]"


@pytest.mark.slow
def test_a_step_and_another_are_two(tmp_path):
    # When a tool answers decides which requests the engine batches, and thereby the last bits of log-probs.
    short = ("rollout.workflow_args={max_turn_tokens: 4, max_assistant_turns: 3}", "rollout.max_new_tokens=64")
    recipe = [*UNTRAINED, *short, odd("fine", "raises"), f"run.root={tmp_path}", "engine.deterministic=true"]
    train_here(*recipe, "run.name=straight", "trainer.total_steps=2")
    train_here(*recipe, "run.name=resumed", "trainer.total_steps=1")
    train_here("--resume", tmp_path / "resumed", "trainer.total_steps=2")
    assert same_weights(weights(tmp_path / "resumed", 2), weights(tmp_path / "straight", 2))
    timed = ("time", "throughput", "memory", "engine", "mfu", "rollout/")
    one, other = (
        [{k: v for k, v in each.items() if not k.startswith(timed)} for each in metrics(tmp_path / name, "train")]
        for name in ("straight", "resumed")
    )
    assert one == other
    assert one[-1]["tools/calls"] > 0 < one[-1]["tools/failures/raised"]


@pytest.mark.slow
def test_an_asynchronous_run_with_tools_is_replayed_bit_for_bit(tmp_path):
    train_here(
        *UNTRAINED, odd("fine", "raises"), f"run.root={tmp_path}", "run.name=recorded", "trainer.total_steps=3",
        "engine.deterministic=true", "rollout.max_staleness=2", "rollout.max_concurrent_groups=6",
        "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute",
    )  # fmt: skip
    result = headwater("replay", tmp_path / "recorded")
    assert result.code == 0, result.stderr
    assert "The weights of all 3 steps equal the recorded ones, bit for bit" in result.stdout


def test_a_run_continues_whatever_its_tools_do(tmp_path, monkeypatch):
    monkeypatch.setenv("ODD_TOOLS", str(tmp_path))
    names = ("fine", "raises", "hangs", "huge", "odd", "Kept")
    train_here(
        *UNTRAINED, odd(*names), f"run.root={tmp_path}", "run.name=odd", "tools.timeout_s=0.3",
        "tools.max_result_tokens=16", "trainer.num_prompts_per_step=8", "rollout.max_new_tokens=160",
    )  # fmt: skip
    run = tmp_path / "odd"
    trained = metrics(run, "train")
    assert len(trained) == 2
    totals = {
        kind: sum(each[f"tools/failures/{kind}"] for each in trained) for kind in ("raised", "timed_out", "bad_result")
    }
    assert all(totals.values()), totals
    assert is_balanced(run)
    assert 0 < count(tmp_path, "created") == count(tmp_path, "released")
    longest = max(len(row["tokens"]) - row["prompt_length"] for row in rollouts(run, 1))
    assert longest <= 160
    evaluated = headwater("eval", run, "eval.num_prompts=4", "eval.temperature=1", "--show", "4")
    assert evaluated.code == 0, evaluated.stderr
    assert "[tool]" in evaluated.stdout


@pytest.mark.slow
def test_ctrl_c_during_tool_calls_leaves_a_run_that_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("ODD_TOOLS", str(tmp_path))
    recipe = [*UNTRAINED, odd("Kept", "blocks"), f"run.root={tmp_path}", "tools.timeout_s=600"]
    (tmp_path / "hang").touch()
    seen = ("calling kept", "calling tools")
    process = start_headwater("train", *recipe, "run.name=stopped")
    deadline = time.monotonic() + 600
    while not count(tmp_path, "hanging"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no tool was called"
        time.sleep(0.05)
    # The run writes what it is doing every two seconds, or later on a busy machine.
    while not all(words in (report := headwater("doctor", tmp_path / "stopped")).stdout for words in seen):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, report.stdout
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == EXIT_INTERRUPTED, errors
    assert count(tmp_path, "created") == count(tmp_path, "released") > 0
    assert is_gone(process.pid)
    (tmp_path / "hang").unlink()
    train_here("--resume", tmp_path / "stopped", "tools.timeout_s=0.2", "trainer.total_steps=1")
    (trained,) = metrics(tmp_path / "stopped", "train")
    assert trained["tools/failures/timed_out"] > 0, "the tool that blocks a thread"
    assert is_balanced(tmp_path / "stopped")
