"""Every bad input ends in one clear message and a non-zero exit, with a traceback only under --debug."""

from __future__ import annotations

import json
import sys

import pytest
from command import ROOT, SMALL, headwater, train_small

from headwater.cli.main import main
from headwater.core.errors import ConfigError
from headwater.core.registry import load_object

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
def fails(tmp_path, capsys, monkeypatch):
    """Runs the command in this process, which saves the seconds that importing torch takes in a new one."""
    monkeypatch.chdir(ROOT)

    def call(*arguments) -> str:
        code = main(["train", *SMALL, f"run.root={tmp_path}/runs", *map(str, arguments)])
        output = capsys.readouterr()
        assert code == 2, output.out + output.err
        assert output.err.startswith("error: ")
        assert "Traceback" not in output.err + output.out
        return output.err

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
    assert "data.train" in message


def test_empty_dataset(fails, tmp_path):
    file = write_rows(tmp_path / "empty.jsonl", [])
    assert "empty.jsonl" in fails(*FILES, f"data.train={file}")


def test_a_row_without_a_prompt(fails, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [ROW, {"data_source": "arithmetic"}])
    message = fails(*FILES, f"data.train={file}")
    assert "rows.jsonl" in message
    assert "line 2" in message
    assert "prompt" in message


def test_a_prompt_over_the_limit(fails, tmp_path):
    long = {**ROW, "prompt": "1+" * 200}
    file = write_rows(tmp_path / "rows.jsonl", [ROW, long])
    message = fails(*FILES, f"data.train={file}", "data.truncation=error")
    assert "rows.jsonl" in message
    assert "line 2" in message
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
        "reward.workers=1",  # each would count its own calls, and a busy machine starts a second one
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
    assert "were dropped and only 0 are complete; the first causes" in result.stderr
    assert "ValueError: never" in result.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.path=tiny:huge", "unknown preset 'huge'"),
        ("model.path=./no/such/folder", "no/such/folder"),
        ("model.device=cuda:99", "model.device = cuda:99"),
        ("rollout.workflow=my.module:Missing", "cannot import 'my.module'"),
        ("rollout.workflow_args={turns: 3}", "rollout.workflow_args.turns = 3: no such argument"),
        ("algorithm.policy_loss_args={clip: 0.3}", "algorithm.policy_loss_args.clip = 0.3 (command line): no such"),
        ("algorithm.advantage=grop", "did you mean 'grpo'"),
        ("data.task_args.num_digit=3", "num_digit"),
        ("data.task_args.num_digits=1", "data.task_args.num_digits = 1"),
        ("algorithm.policy_loss_args={clip_low: abc}", "algorithm.policy_loss_args.clip_low = 'abc'"),
        ("algorithm.advantage_args={normalize_by_std: maybe}", "algorithm.advantage_args.normalize_by_std = 'maybe'"),
        ("run.name=../elsewhere", "run.name = '../elsewhere'"),
        ("rollout.max_new_tokens=4000", "rollout.max_new_tokens"),
        ("rollout.top_k=5", "algorithm.old_logprobs=recompute"),
        ("learner.num_minibatches=3", "learner.num_minibatches"),
        ("learner.max_tokens_per_microbatch=10", "learner.max_tokens_per_microbatch"),
    ],
)
def test_settings_that_cannot_work(fails, setting, message):
    assert message in fails(setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.advantage=gae"], "algorithm.advantage = 'gae' (command line): needs the values of a critic"),
        (["algorithm.advantage=gdpo"], "algorithm.advantage = gdpo needs the column 'reward_parts'"),
        (
            ["algorithm.advantage=gae", "critic.enabled=true", "critic.path=./no/critic"],
            "critic.path = no/critic: no such folder",
        ),
        (["reward.model=./no/judge"], "reward.model = no/judge: no such folder"),
        (["lora.rank=4", "lora.targets=[nothing]"], "lora.targets = ['nothing']"),
        (
            ["algorithm.corrections_args={truncate: {upper: 3}}"],
            "algorithm.corrections_args.truncate = {upper: 3} (command line): algorithm.corrections does not name it",
        ),
        (
            [
                "algorithm.old_logprobs=recompute",
                "algorithm.corrections=[m2po]",
                "algorithm.corrections_args.m2po.low=3",
            ],
            "m2po.low = 3 (command line): no such argument; correction 'm2po' takes threshold",
        ),
        (
            [
                "algorithm.policy_loss=decoupled",
                "algorithm.old_logprobs=recompute",
                "algorithm.policy_loss_args={weight: clamp, metric: k1}",
            ],
            "algorithm.policy_loss_args.weight = 'clamp': clamps the weight itself",
        ),
    ],
)
def test_algorithms_that_cannot_work(fails, settings, message):
    assert message in fails(*settings)


BROKEN = """
class Dataset:
    def __init__(self, **arguments):
        raise KeyError("no such column")

class Workflow:
    def __init__(self, context):
        raise KeyError("no such column")

def loss(inputs):
    raise KeyError("no such column")

def advantage(inputs):
    raise KeyError("no such column")
"""


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.dataset", "Dataset"),
        ("rollout.workflow", "Workflow"),
        ("algorithm.policy_loss", "loss"),
        ("algorithm.advantage", "advantage"),
    ],
)
def test_an_extension_that_raises_is_named(fails, tmp_path, key, name):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    message = fails(f"{key}={file}:{name}")
    assert key in message
    assert "KeyError: 'no such column'" in message


def test_a_row_without_ground_truth_is_a_failure_and_not_a_zero(fails, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+2=", "data_source": "arithmetic"}] * 4)
    message = fails(*FILES, f"data.train={file}", "reward.function=")
    assert "the row has no ground truth" in message


def test_rows_with_images_are_refused_by_a_workflow_for_text(fails, tmp_path):
    file = tmp_path / "images.py"
    file.write_text(
        "import dataclasses\n"
        "from headwater.core.media import MediaBlock, MediaContent, PlacedMedia\n"
        "from headwater.data.rlhf_dataset import RLHFDataset\n"
        "SHOWN = PlacedMedia(MediaContent.of('image', [b'picture']), (MediaBlock(1, 2),))\n"
        "class Images(RLHFDataset):\n"
        "    def __getitem__(self, index):\n"
        "        return dataclasses.replace(super().__getitem__(index), media=(SHOWN,))\n"
    )
    assert "has images or videos, which rollout.backend = embedded cannot take" in fails(f"data.dataset={file}:Images")


def test_nothing_is_left_behind_by_a_run_that_could_not_start(fails, tmp_path):
    assert "was removed" not in fails("model.path=./no/such/folder")
    assert not (tmp_path / "runs").exists()
    reward = tmp_path / "raises.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    rows = write_rows(tmp_path / "rows.jsonl", [*[ROW] * 3, {**ROW, "prompt": [{"role": "nobody", "content": "?"}]}])
    starts = [
        [f"reward.function={reward}:compute_score"],
        [f"reward.function={reward}:compute_score", "eval.before=false"],
    ]
    for start in starts:
        removed = f"\n{tmp_path / 'runs' / 'quickstart'} was removed, because the run has recorded nothing\n"
        assert fails(*start).endswith(removed), start
        assert not any((tmp_path / "runs").iterdir()), start
    # Found before there is a directory.
    assert "removed" not in fails(*FILES, f"data.train={rows}", "data.truncation=left", "data.shuffle=false")
    assert not any((tmp_path / "runs").iterdir())


def test_what_a_warm_start_has_learned_is_kept(fails, tmp_path):
    reward = tmp_path / "raises.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    assert "was removed" not in fails(f"reward.function={reward}:compute_score", "warm_start.num_steps=1")
    run = tmp_path / "runs" / "quickstart"
    assert (run / "checkpoints" / "step_000000" / "state.json").exists()
    reward.write_text(reward.read_text().replace("1 / 0", "1.0"))
    sys.modules.pop(load_object(f"{reward}:compute_score").__module__)  # a new process would read it again
    assert main(["train", "--resume", str(run)]) == 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(tmp_path, place):
    arguments = ["train", "quickstart", "rollout.max_staleness=-1"]
    with pytest.raises(ConfigError):  # which Python shows with its traceback
        headwater(*(["--debug", *arguments] if place == "before" else [*arguments, "--debug"]))


@pytest.mark.parametrize("arguments", [["eval", "."], ["train", "--resume", "."]])
def test_a_folder_that_is_no_run(arguments):
    result = headwater(*arguments)
    assert result.code == 2
    assert "not a run directory" in result.stderr


def test_requests_that_do_not_fit_the_engine_are_refused_before_anything_is_trained(fails, tmp_path):
    settings = ["warm_start.num_steps=5", "engine.kv_cache_gib=0.00035", "rollout.max_new_tokens=200"]
    message = fails(*settings)
    assert "longest prompt of data.eval" in message
    assert "KV cache has room for 161; raise engine.kv_cache_gib" in message
    message = fails(*settings, "eval.before=false", "eval.after=false")
    assert "longest prompt of data.train" in message
    assert "lower rollout.max_new_tokens to" in message
    assert not (tmp_path / "runs").exists()
