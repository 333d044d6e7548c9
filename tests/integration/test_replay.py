"""An asynchronous run, once more to the same bits."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path

import pytest
from books import check_books
from command import CUT_DOWN, ROOT, Result, after_step, metrics, send, train_here
from running import Running
from test_ranks_resume import Ranks

from headwater.cli.main import main
from headwater.cli.process import EXIT_INTERRUPTED
from headwater.data.sampler import ShufflingSampler
from headwater.observe.run_directory import RunDirectory

# Few rows at a time and long responses: updates arrive in the middle of many of them.
SETTINGS = [
    "quickstart", *CUT_DOWN, "trainer.total_steps=5", "rollout.max_staleness=2",
    "rollout.max_new_tokens=24", "rollout.max_concurrent_groups=6", "engine.decode_steps=1",
    "algorithm.policy_loss=decoupled", "algorithm.old_logprobs=recompute", "eval.before=false", "eval.after=false",
]  # fmt: skip
NUM_TOKENS = (24, 96, 192, 384)
"""Responses as long as is needed for an update in the middle of one: training has fixed costs, generation has not."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    for num_tokens in NUM_TOKENS:
        root = tmp_path_factory.mktemp("runs")
        settings = [f"run.root={root}", "run.name=recorded", "engine.deterministic=true", "trainer.total_steps=3"]
        settings += [f"rollout.max_new_tokens={num_tokens}"]
        train_here(*SETTINGS, *settings)
        if is_updated_midway(root / "recorded"):
            break  # where training is slow, every response may end between two updates
    return root / "recorded"


@pytest.fixture
def replay(capsys, monkeypatch):
    def run(*arguments: object) -> Result:
        monkeypatch.chdir(ROOT)
        code = main(["replay", *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return run


def parts(run: Path) -> list[list]:
    """Of every response, its ``[version, number of tokens]`` parts."""
    records = RunDirectory.open(run).read_ledger()
    return [made for record in records for group in record["trained"] for _, _, made in group["requests"]]


def is_updated_midway(run: Path) -> bool:
    return any(len(made) > 1 for made in parts(run))


def copy_of(run: Path, name: str) -> Path:
    copy = run.with_name(name)
    shutil.rmtree(copy, ignore_errors=True)  # of a first attempt
    shutil.copytree(run, copy)
    return copy


def change_ledger(run: Path, change) -> None:
    path = run / "ledger.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_every_step_gives_the_recorded_weights(replay, recorded):
    assert is_updated_midway(recorded), "no update came in the middle of a response"
    result = replay(recorded)
    assert result.code == 0, result.stderr
    assert "The weights of all 3 steps equal the recorded ones, bit for bit" in result.stdout
    weights = [
        [each["weights"] for each in RunDirectory.open(run).read_ledger()]
        for run in (recorded, recorded.with_name("recorded-replay"))
    ]
    assert weights[0] == weights[1]
    assert len(set(weights[0])) == 3


def test_other_weights_are_noticed_at_their_step(replay, recorded):
    run = copy_of(recorded, "tampered")
    change_ledger(run, lambda records: records[1].update(weights="float32-0"))
    result = replay(run)
    assert result.code == 2
    assert "the weights after step 2 differ from the recorded run" in result.stderr


def test_another_order_of_groups_gives_other_weights(replay, recorded):
    """What is compared does depend on the schedule: a group that is trained on twice is not what happened."""
    run = copy_of(recorded, "reordered")

    def repeat_a_group(records):
        records[1]["trained"][0] = records[1]["trained"][1] | {"id": records[1]["trained"][0]["id"]}

    change_ledger(run, repeat_a_group)
    result = replay(run)
    assert result.code == 2
    assert "step 2" in result.stderr


@pytest.mark.parametrize("num_lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_that_was_interrupted_and_resumed(replay, num_lost, tmp_path):
    """What was finished is kept, what was in flight begins again; with a checkpoint lost, the last step does so too."""
    run = tmp_path / "resumed"
    settings = ["engine.deterministic=true", "trainer.checkpoint_every_steps=1", "rollout.max_new_tokens=12"]
    with after_step(2, lambda: send(signal.SIGINT)), contextlib.chdir(ROOT):
        code = main(["train", *SETTINGS, f"run.root={tmp_path}", "run.name=resumed", *settings])
    assert code == EXIT_INTERRUPTED
    *_, last = RunDirectory.open(run).read_ledger()
    assert last["counts"]["buffered"] + last["counts"]["in_flight"] > 0
    if num_lost:
        shutil.rmtree(run / "checkpoints" / f"step_{last['step']:06d}")
    num_steps = 5  # prompts of all of them may have been drawn when the run was interrupted
    train_here("--resume", run)
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["kind"] == "resume"] == [last["step"] - num_lost]
    assert sum(each["kind"] == "step" for each in lines) == num_steps + num_lost
    check_books(run, num_steps)
    result = replay(run)
    assert result.code == 0, result.stderr
    assert f"The weights of all {num_steps} steps equal the recorded ones, bit for bit" in result.stdout


@pytest.mark.slow
def test_a_run_in_which_tokens_were_masked_as_too_old(replay, tmp_path):
    """The first half of the first prompt's responses is of version 0, the second of version 3 or later."""
    run = tmp_path / "masked"
    row = ShufflingSampler(num_rows=50, seed=0).take(1)[0].index
    train_here(
        *SETTINGS, f"run.root={tmp_path}", "run.name=masked", "engine.deterministic=true", "rollout.on_stale=mask",
        "rollout.max_staleness=1", "rollout.max_new_tokens=12", "rollout.workflow=tests/integration/held.py:TwoParts",
        f"rollout.workflow_args={{run: {run}, row: {row}, step: 3}}",
    )  # fmt: skip
    assert sum(each["staleness/masked_tokens"] for each in metrics(run, "train")) > 0
    result = replay(run)
    assert result.code == 0, result.stderr
    assert "The weights of all 5 steps equal the recorded ones, bit for bit" in result.stdout


def test_only_some_steps(replay, recorded):
    result = replay(recorded, "--steps", "1")
    assert result.code == 0, result.stderr
    assert "of all 1 steps equal" in result.stdout


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "engine.deterministic = false"),
        (["engine.deterministic=true", "engine.update_mode=in_flight"], "engine.update_mode = in_flight"),
    ],
)
def test_what_cannot_be_repeated_is_refused(replay, recorded, settings, reason):
    run = copy_of(recorded, f"other{len(settings)}")
    text = (run / "config.yaml").read_text()
    text = text.replace("deterministic: true", "deterministic: false") if not settings else text
    text = text.replace("update_mode: auto", "update_mode: in_flight") if settings else text
    (run / "config.yaml").write_text(text)
    result = replay(run)
    assert result.code == 2
    assert reason in result.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_run_of_two_ranks_and_two_servers_is_replayed_on_two_ranks(replay, tmp_path):
    """An asynchronous run in which updates arrive in the middle of responses, interrupted and resumed."""
    run, ranks = tmp_path / "ranks", Ranks(tmp_path / "log")
    servers = [Running("engine.deterministic=true", "engine.decode_steps=1").start() for _ in range(2)]
    try:
        urls = ", ".join(each.ready().url for each in servers)
        settings = [each for each in SETTINGS if not each.startswith("engine.decode_steps")]  # an option of the servers
        settings += ["rollout.backend=native", f"rollout.servers=[{urls}]", "engine.deterministic=true"]
        settings += ["trainer.total_steps=3", "trainer.checkpoint_every_steps=1"]
        for num_tokens in NUM_TOKENS:  # where training is slow, every response may end between two updates
            shutil.rmtree(run, ignore_errors=True)
            named = [f"run.root={tmp_path}", "run.name=ranks", f"rollout.max_new_tokens={num_tokens}"]
            assert ranks(*settings, *named) == [0, 0], ranks.log.read_text()[-3000:]
            assert ranks("--resume", run, "trainer.total_steps=5") == [0, 0], ranks.log.read_text()[-3000:]
            if is_updated_midway(run):
                break
        status = json.loads((run / "status.json").read_text())
        assert status["learner"]["num_ranks"] == len(status["servers"]) == 2
        assert is_updated_midway(run), "no update came in the middle of a response"
        assert ranks(run, command="replay") == [0, 0], ranks.log.read_text()[-3000:]
        assert "The weights of all 5 steps equal the recorded ones, bit for bit" in ranks.log.read_text()
        found, again = (
            [each["weights"] for each in RunDirectory.open(each).read_ledger() if each["kind"] == "step"]
            for each in (run, run.with_name("ranks-replay"))
        )
        assert found == again
        assert len(set(found)) == 5
        change_ledger(run, lambda records: records[2].update(weights="float32-0"))
        assert ranks(run, command="replay") == [2, 0], ranks.log.read_text()[-3000:]
        assert "the weights after step 3 differ from the recorded run" in ranks.log.read_text()
    finally:
        ranks.close()
        for each in servers:
            each.kill()
    refused = replay(run)
    assert refused.code == 2
    assert "torchrun --standalone --nproc-per-node 2 -m headwater replay" in refused.stderr


def test_another_number_of_ranks_is_refused_with_the_command_to_use(replay, recorded, monkeypatch):
    run = copy_of(recorded, "ranks")
    status = json.loads((run / "status.json").read_text())
    assert status["learner"]["num_ranks"] == 1
    resumed_on_one = run / "metrics.jsonl"
    first, rest = resumed_on_one.read_text().split("\n", 1)
    shares = {"ranks/tokens_min": 10.0, "ranks/tokens_max": 12.0}
    resumed_on_one.write_text(json.dumps({**json.loads(first), **shares}) + "\n" + rest)
    assert "was resumed with another number of learner ranks" in replay(run).stderr
    (run / "status.json").write_text(json.dumps({**status, "learner": {**status["learner"], "num_ranks": 2}}))
    assert "was resumed with another number of learner ranks" in replay(run).stderr
    rows = [json.loads(line) | shares for line in resumed_on_one.read_text().splitlines()]
    resumed_on_one.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = replay(run)
    assert result.code == 2
    assert "was trained by 2 learner ranks, and the results of 1 learner rank differ" in result.stderr
    assert f"torchrun --standalone --nproc-per-node 2 -m headwater replay {run}" in result.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = replay(recorded)
    assert result.code == 2
    assert f"use: headwater replay {recorded}" in result.stderr


def test_a_run_without_a_ledger_is_named(replay, recorded):
    run = copy_of(recorded, "empty")
    (run / "ledger.jsonl").unlink()
    result = replay(run)
    assert result.code == 2
    assert "nothing to replay" in result.stderr


def test_settings_that_a_resume_changed_are_named(replay, recorded):
    run = copy_of(recorded, "changed")
    text = (run / "config.yaml").read_text()
    (run / "config-2.yaml").write_text(text.replace("max_grad_norm: 1.0", "max_grad_norm: 2.0"))
    result = replay(run)
    assert result.code == 2
    assert "its settings were changed when it was resumed" in result.stderr
