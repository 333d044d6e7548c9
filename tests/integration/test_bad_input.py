"""Every bad input ends in one clear message and a non-zero exit, with a traceback only under --debug."""

from __future__ import annotations

import json

import pytest
from command import headwater, train_small

ROW = {"prompt": [{"role": "user", "content": "1+2="}], "data_source": "arithmetic", "ground_truth": "3"}

FILES = [
    "data.task_args={}", "data.num_train_rows=2048", "data.num_eval_rows=256", "eval.before=false", "eval.after=false",
    "eval.num_prompts=256",
]  # fmt: skip
"""Settings that go with file data instead of a generated task."""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def fails(tmp_path):
    def call(*arguments) -> str:
        result = train_small(tmp_path / "runs", *arguments)
        assert result.code == 2, result.stdout + result.stderr
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.stderr + result.stdout
        return result.stderr

    return call


def test_wrong_key(fails):
    assert "rollout.max_new_token (command line): no such key; did you mean rollout.max_new_tokens" in fails(
        "rollout.max_new_token=3"
    )


def test_wrong_type_and_wrong_value_are_reported_together(fails):
    message = fails("trainer.total_steps=many", "rollout.max_staleness=-1", "rollout.temperature=0")
    assert "3 problems" in message
    assert "trainer.total_steps = 'many'" in message
    assert "rollout.max_staleness = -1 (command line): must be >= 0; use 0 for synchronous training" in message


def test_missing_recipe():
    result = headwater("train", "recipes/no-such.yaml")
    assert result.code == 2
    assert "no-such.yaml" in result.stderr


def test_missing_data_file(fails, tmp_path):
    message = fails(*FILES, f"data.train={tmp_path}/absent.jsonl")
    assert "absent.jsonl" in message


def test_empty_dataset(fails, tmp_path):
    file = write_rows(tmp_path / "empty.jsonl", [])
    assert "empty.jsonl" in fails(*FILES, f"data.train={file}")


def test_a_row_without_a_prompt(fails, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [ROW, {"data_source": "arithmetic"}])
    message = fails(*FILES, f"data.train={file}")
    assert "rows.jsonl" in message
    assert "line 2" in message or "row 1" in message
    assert "prompt" in message


def test_a_prompt_over_the_limit(fails, tmp_path):
    long = {**ROW, "prompt": "1+" * 200}
    file = write_rows(tmp_path / "rows.jsonl", [ROW, long])
    message = fails(*FILES, f"data.train={file}", "data.truncation=error")
    assert "rows.jsonl" in message
    assert "data.max_prompt_tokens" in message


def test_a_reward_that_raises_keeps_what_was_written(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 20:\n"
        "        raise ValueError('cannot judge this')\n"
        "    return 0.5 * (calls % 2)\n"
    )
    settings = [
        "run.name=broken",
        f"reward.function={file}:compute_score",
        "eval.before=false",
        "trainer.total_steps=50",
    ]
    result = train_small(tmp_path / "runs", *settings)
    assert result.code == 2
    assert "reward compute_score on row largest_digit/train/" in result.stderr
    assert "ValueError: cannot judge this" in result.stderr
    assert "rollout.on_failure=drop" in result.stderr
    assert "Traceback" not in result.stderr
    run = tmp_path / "runs" / "broken"
    steps = (run / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2
    assert (run / "checkpoints" / "step_000002" / "state.json").exists()


def test_rewards_that_always_fail_stop_the_run_under_drop_too(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(**row):\n    raise ValueError('never')\n")
    result = train_small(
        tmp_path, f"reward.function={file}:compute_score", "rollout.on_failure=drop", "eval.before=false"
    )
    assert result.code == 2
    assert "were dropped; the first causes" in result.stderr
    assert "ValueError: never" in result.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.path=tiny:huge", "unknown preset 'huge'"),
        ("model.path=./no/such/folder", "no/such/folder"),
        ("model.device=cuda:99", "model.device = cuda:99"),
        ("rollout.workflow=my.module:Missing", "cannot import 'my.module'"),
        ("rollout.workflow_args={turns: 3}", "rollout.workflow_args.turns: no such argument"),
        ("algorithm.policy_loss_args={clip: 0.3}", "algorithm.policy_loss_args.clip: no such argument"),
        ("algorithm.advantage=grop", "did you mean 'grpo'"),
        ("data.task_args.num_digit=3", "num_digit"),
        ("data.task_args.num_digits=1", "data.task_args.num_digits = 1"),
        ("training.num_minibatches=3", "training.num_minibatches"),
        ("training.max_tokens_per_microbatch=10", "training.max_tokens_per_microbatch"),
    ],
)
def test_settings_that_cannot_work(fails, setting, message):
    assert message in fails(setting)


def test_nothing_is_left_behind_by_a_run_that_could_not_start(fails, tmp_path):
    fails("model.path=./no/such/folder")
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback(tmp_path):
    result = train_small(tmp_path, "model.path=./no/such/folder", "--debug")
    assert result.code == 1
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("arguments", [["eval", "."], ["train", "--resume", "."]])
def test_a_folder_that_is_no_run(arguments):
    result = headwater(*arguments)
    assert result.code == 2
    assert "no run there" in result.stderr
