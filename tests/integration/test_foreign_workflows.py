"""Classes for verl and AReaL train like the workflows of Headwater that do the same."""

from __future__ import annotations

import json
import os

import pyarrow.parquet as pq
import pytest
from command import SMALL, headwater, metrics, train_here

FOREIGN = "tests/integration/foreign"
VERL = f"rollout.workflow={FOREIGN}/verl_answer.py:AnswerOnce"
AREAL = f"rollout.workflow={FOREIGN}/areal_answer.py:AnswerWorkflow"


def trained(root, name, *settings):
    """The columns of the first rollouts, and the checksum of the weights after each step."""
    train_here(*SMALL, f"run.root={root}", f"run.name={name}", *settings)
    table = pq.read_table(root / name / "rollouts" / "step_000001.parquet")
    columns = ["uid", "sample", "tokens", "loss_mask", "logprobs", "versions", "reward", "stop_reason", "response"]
    ledger = [json.loads(line) for line in (root / name / "ledger.jsonl").read_text().splitlines()]
    rows = [{**row, "reward": round(row["reward"], 6)} for row in table.select(columns).to_pylist()]
    return rows, [each["weights"] for each in ledger if each["kind"] == "step"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "rlvr")


def test_an_agent_loop_for_verl_trains_bit_for_bit_as_rlvr(plain, tmp_path):
    assert trained(tmp_path, "verl", VERL, "rollout.workflow_args.bonus=0.5") == plain


def test_a_workflow_for_areal_trains_bit_for_bit_as_rlvr(plain, tmp_path):
    assert trained(tmp_path, "areal", AREAL) == plain
    rows = pq.read_table(tmp_path / "areal" / "rollouts" / "step_000001.parquet").to_pylist()
    assert all(json.loads(row["info"])["reported"] == pytest.approx(row["reward"]) for row in rows)


def test_a_reward_function_for_areal_is_used(tmp_path):
    settings = [AREAL, f"rollout.workflow_args.reward_fn={FOREIGN}/areal_reward.py:length_reward"]
    rows, _ = trained(tmp_path, "reward", *settings)
    for row in rows:
        assert row["reward"] % 1 == pytest.approx(len(row["response"]) / 100, abs=0.2), "the text has special tokens"
    infos = pq.read_table(tmp_path / "reward" / "rollouts" / "step_000001.parquet")["info"].to_pylist()
    assert os.getpid() not in {json.loads(each)["process"] for each in infos}, "in a worker"


def test_wrong_arguments_are_named_before_a_run_begins(tmp_path):
    cases = {
        f"{AREAL} rollout.workflow_args.max_turn=2": "rollout.workflow_args.max_turn = 2: no such argument",
        f"{AREAL} rollout.workflow_args.gconfig.top_q=1": "rollout.workflow_args.gconfig",
        f"{AREAL} rollout.workflow_args.reward_fn={FOREIGN}/areal_reward.py:nothing": "has no 'nothing'",
        f"rollout.workflow={FOREIGN}/accept.py:broken": "broken",
        "rollout.min_new_tokens=4": "algorithm.old_logprobs=recompute",
        "rollout.min_p=0.1": "algorithm.old_logprobs=recompute",
        "rollout.min_p=1.0": "must be < 1",
        "rollout.stop_token_ids=[100000]": "not in the vocabulary",
        "rollout.stop_token_ids=[-1]": "must be >= 0",
        'rollout.stop=[""]': "must not be empty",
        "rollout.min_new_tokens=999": "use at most",
        "rollout.should_accept=nothing": "path/to/file.py:function",
        f"rollout.should_accept={FOREIGN}/accept.py:nothing": "has no 'nothing'",
    }
    for settings, message in cases.items():
        result = headwater("train", *SMALL, f"run.root={tmp_path}", "run.name=wrong", *settings.split())
        assert result.code != 0, settings
        assert message in result.stderr, (settings, result.stderr)
    assert not list(tmp_path.iterdir()), "no run directory is made"


def test_stops_and_truncation_of_a_recipe_have_an_effect_in_training_and_evaluation(tmp_path):
    stops = list(range(60, 90))
    settings = [
        "rollout.stop=[a,e]", f"rollout.stop_token_ids={stops}", "rollout.min_new_tokens=3", "rollout.min_p=0.001",
        "rollout.max_new_tokens=12", "algorithm.old_logprobs=recompute", "eval.temperature=1.0",
    ]  # fmt: skip
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=stops", *settings)
    for folder in ("rollouts", "eval"):
        files = sorted((tmp_path / "stops" / folder).glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        ended = set()
        for row in rows:
            response = row["tokens"][row["prompt_length"] :]
            assert len(response) >= 3
            assert not {*stops} & {*response[:-1]}, "not sampled before the minimum, and the end afterwards"
            by_token, by_text = response[-1] in stops, row["response"][-1:] in ("a", "e")
            ended |= {name for name, is_so in (("token", by_token), ("text", by_text)) if is_so}
            assert row["stop_reason"] == "stop" if len(response) < 12 else True
        assert ended == {"token", "text"}, folder
    (step, *_) = metrics(tmp_path / "stops", "train")
    assert (
        step["time/rollout/generate_s/max"]
        >= step["time/rollout/generate_s/mean"]
        >= step["time/rollout/generate_s/min"]
        > 0
    )
    assert step["time/rollout/queue_s/mean"] >= 0
    assert step["time/rollout/group_s/max"] >= step["time/rollout/generate_s/max"]
    assert step["rollouts/enqueued"] == 0
    assert step["rollouts/rejected"] == 0


def test_should_accept_replaces_groups_and_counts_them(tmp_path):
    settings = [f"rollout.should_accept={FOREIGN}/accept.py:any_is_long", "algorithm.filter_groups=true"]
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=accept", *settings)
    steps = metrics(tmp_path / "accept", "train")
    assert sum(each["groups/refused"] for each in steps) == steps[-1]["rollouts/rejected"] - sum(
        each["groups/filtered"] for each in steps
    )
    rows = pq.read_table(tmp_path / "accept" / "rollouts" / "step_000001.parquet").to_pylist()
    for uid in {row["uid"] for row in rows}:
        assert max(len(row["tokens"]) - row["prompt_length"] for row in rows if row["uid"] == uid) > 2
    failing = f"rollout.should_accept={FOREIGN}/accept.py:broken"
    result = headwater("train", *SMALL, f"run.root={tmp_path}", "run.name=broken", failing)
    assert result.code != 0
    assert "accept.py:broken on row" in result.stderr
    assert "has no attribute 'nothing'" in result.stderr


def test_tokens_that_were_not_sampled_are_a_counted_failure_and_never_trained(tmp_path):
    workflow = f"rollout.workflow={FOREIGN}/verl_answer.py:AnswerAltered"
    result = headwater("train", *SMALL, f"run.root={tmp_path}", "run.name=stop", workflow)
    assert result.code != 0
    assert "is marked as the model's, but the engine did not sample it" in result.stderr
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=drop", workflow, "rollout.on_failure=drop")
    steps = metrics(tmp_path / "drop", "train")
    num_invalid = sum(each["groups/dropped_invalid"] for each in steps)
    assert num_invalid > 0
    assert num_invalid == sum(each["groups/dropped"] for each in steps) == steps[-1]["rollouts/rejected"]
    for file in (tmp_path / "drop" / "rollouts").glob("*.parquet"):
        assert all(int(uid.rpartition("/")[2]) % 3 for uid in pq.read_table(file)["uid"].to_pylist())
    ledger = [json.loads(line) for line in (tmp_path / "drop" / "ledger.jsonl").read_text().splitlines()]
    counts = [each["counts"] for each in ledger if each["kind"] == "step"][-1]
    assert counts["dispatched"] == sum(count for name, count in counts.items() if name != "dispatched")


@pytest.mark.slow
def test_a_run_with_classes_stops_and_a_filter_is_replayed_bit_for_bit(tmp_path):
    settings = [
        "trainer.total_steps=3", "rollout.max_staleness=2", "rollout.max_new_tokens=32",
        "engine.deterministic=true", "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute",
        "eval.before=false", "eval.after=false", "rollout.max_concurrent_groups=6", "rollout.min_p=0.001",
        "rollout.min_new_tokens=2", "rollout.stop=[a]", f"rollout.should_accept={FOREIGN}/accept.py:any_is_long",
    ]  # fmt: skip
    workflow = "rollout.workflow=examples/verl_agent_loop.py:CheckTwice"
    train_here(*SMALL, f"run.root={tmp_path}", "run.name=recorded", *settings, workflow)
    result = headwater("replay", tmp_path / "recorded")
    assert result.code == 0, result.stderr
