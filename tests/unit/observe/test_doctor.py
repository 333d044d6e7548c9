"""The doctor's findings, from run directories in all kinds of state."""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from pathlib import Path

import pytest

import headwater
from headwater.observe import remedies
from headwater.observe.doctor import examine
from headwater.observe.duration import show_duration
from headwater.observe.evidence import gather
from headwater.observe.findings import alike
from headwater.observe.life import life_of
from headwater.observe.process import process_start
from headwater.observe.run_directory import RunDirectory

BALANCED = {"dispatched": 104, "trained": 96, "dropped": 0, "buffered": 4, "in_flight": 4}


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run")
    run.write_config("trainer: {total_steps: 80, num_prompts_per_step: 4}\nrollout: {max_staleness: 1}\n")
    return run


def add_steps(run, count, *, step_s=2.0, ended_ago=1.0, **metrics):
    begun = len(run.read_metrics())
    for step in range(begun + 1, begun + count + 1):
        record = {"kind": "train", "step": step, "time": time.time() - ended_ago, "reward/mean": 0.25}
        run.append_metrics({**record, "time/step_s": step_s, **metrics})


def write_status(run, **fields):
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_start": process_start(os.getpid()),
        "started": time.time() - 100,
        "time": time.time() - 1,
        "state": "running",
        "error": "",
        "waits": [],
        "log": [],
        "step": 12,
        "total_steps": 80,
        "version": 12,
        "ledger": BALANCED,
        **fields,
    }
    run.status_file.write_text(json.dumps(content))


def a_wait(kind="batch", seconds=1000.0, limit=1800.0):
    return {
        "kind": kind,
        "description": "the learner has waited 1000 s for batch 13: 3 of 4 groups; 1 run",
        "seconds": seconds,
        "hard_limit_s": limit,
        "thread_name": "MainThread",
    }


def write_ledger(run, step=12, counts=BALANCED, dropped=(), trained=8):
    """A line as the trainer writes it at the end of a step."""
    record = {"kind": "step", "step": step, "time": time.time(), "weights": "float32-1", "counts": counts}
    record["trained"] = [{"id": n, "uid": "u", "index": n, "epoch": 0, "requests": []} for n in range(trained)]
    record["dropped"] = [{"id": 1, "uid": "u", "index": 1, "epoch": 0, "reason": each} for each in dropped]
    run.append_ledger(record)


def resume(run, step):
    """As the trainer notes that it goes on from ``step``."""
    record = {"kind": "resume", "step": step, "time": time.time()}
    run.append_metrics(record)
    run.append_ledger(record)


def problems(diagnosis):
    return [each.what for each in diagnosis.findings if each.severity == "problem"]


def hints(diagnosis):
    return [each.what for each in diagnosis.findings if each.severity == "hint"]


def remedy(diagnosis, part):
    return next(each.remedy for each in diagnosis.findings if part in each.what)


# Life


def test_a_run_that_works_is_healthy(run):
    add_steps(run, 12)
    write_status(run, waits=[a_wait(seconds=3.0)])
    write_ledger(run)
    diagnosis = examine(run)
    assert (diagnosis.life.state, diagnosis.is_healthy, diagnosis.findings) == ("running", True, ())
    assert (diagnosis.step, diagnosis.total_steps, diagnosis.version) == (12, 80, 12)
    assert diagnosis.last_metrics.step == 12
    assert diagnosis.step_s == 2.0
    assert diagnosis.ledger.missing == 0
    assert diagnosis.resume == ""
    assert diagnosis.waits[0].seconds == 3.0


def test_a_process_with_the_same_number_is_not_mistaken_for_the_run(run):
    write_status(run, process_start="another boot+1")
    diagnosis = examine(run)
    assert diagnosis.life.state == "killed"
    assert problems(diagnosis) == ["the run did not end by itself: it was killed"]
    assert diagnosis.resume == f"headwater train --resume {run.path}"


def test_a_process_that_is_silent_is_unresponsive(run):
    write_status(run, time=time.time() - 100, waits=[a_wait(seconds=3.0)])
    diagnosis = examine(run)
    assert diagnosis.life.state == "unresponsive"
    assert 102 < diagnosis.waits[0].seconds < 120, "it has gone on since"
    assert "exists, but its last heartbeat 1 min 40 s ago" in problems(diagnosis)[0]
    assert diagnosis.resume == "", "two processes must not train one run"


@pytest.mark.parametrize(("age", "state"), [(3, "running"), (100, "unresponsive")])
def test_on_another_machine_the_heartbeat_decides(run, age, state):
    write_status(run, host="elsewhere", time=time.time() - age)
    assert examine(run).life.state == state


@pytest.mark.parametrize(
    ("state", "told", "healthy", "resumes"),
    [
        ("finished", "finished", True, False),
        ("interrupted", "interrupted", True, True),
        ("failed: no space left on device", "failed", False, True),
    ],
)
def test_how_it_ended_is_told(run, state, told, healthy, resumes):
    write_status(run, state=state, time=time.time() - 7200, error="OSError: no space left on device")
    diagnosis = examine(run)
    assert (diagnosis.life.state, diagnosis.is_healthy, bool(diagnosis.resume)) == (told, healthy, resumes)
    if told == "failed":
        assert "no space left on device" in problems(diagnosis)[0]


def test_a_live_run_in_which_no_step_ends_is_a_problem_even_without_a_wait(run):
    add_steps(run, 12, ended_ago=1000)
    write_status(run)
    assert problems(examine(run)) == ["no step has ended for 16 min 40 s; the last ones took 2.0 s each"]
    assert "py-spy" in remedy(examine(run), "no step")


def test_a_step_that_takes_unusually_long_is_blamed_on_what_is_waited_for(run):
    add_steps(run, 12, ended_ago=60)
    oldest = [{"id": 1, "uid": "row-1", "seconds": 50.0, "doing": "1 waits for a reward or a tool"}]
    write_status(run, waits=[a_wait(seconds=4.0)], oldest=oldest)
    assert hints(examine(run)) == ["no step has ended for 1 min 0 s; the last ones took 2.0 s each"]
    assert "wait for a reward or a tool" in remedy(examine(run), "no step")
    write_status(run, waits=[a_wait("rollouts", seconds=4.0)], oldest=oldest)
    assert examine(run).findings == (), "an evaluation comes between"


def test_a_supervised_start_is_told_and_the_steps_of_training_are_not_a_stage(run):
    write_status(run, step=0, stage={"name": "supervised start", "done": 30, "total": 200})
    stage = examine(run).stage
    assert (stage.name, stage.done, stage.total, examine(run).findings) == ("supervised start", 30, 200, ())
    write_status(run, stage=None)
    assert examine(run).stage is None


# Runs without a status


def test_an_old_run_that_is_done_is_finished(run):
    add_steps(run, 80, ended_ago=10**6)
    diagnosis = examine(run)
    assert (diagnosis.life.state, diagnosis.is_healthy) == ("finished", True)
    assert diagnosis.ledger is None


def test_an_old_run_that_stopped_early_can_be_resumed(run):
    add_steps(run, 20, ended_ago=10**5)
    (run.checkpoints / "step_000020").mkdir(parents=True)
    diagnosis = examine(run)
    assert (diagnosis.life.state, diagnosis.is_healthy) == ("unknown", False)
    assert "no metrics for 1 d 3 h" in problems(diagnosis)[0]
    assert diagnosis.checkpoint_steps == (20,)
    assert diagnosis.resume


def test_an_old_run_that_writes_metrics_runs(run):
    add_steps(run, 20, ended_ago=5)
    assert (examine(run).life.state, examine(run).is_healthy) == ("running", True)


def test_a_run_that_has_only_its_settings(run):
    diagnosis = examine(run)
    assert diagnosis.life.state == "unknown"
    assert diagnosis.last_metrics is None


# Damage


def test_a_damaged_status_is_loud_and_the_rest_is_told(run):
    add_steps(run, 12)
    run.status_file.write_text('{"pid": 12')
    write_ledger(run)
    diagnosis = examine(run)
    assert not diagnosis.is_healthy
    assert "status.json cannot be read" in problems(diagnosis)[0]
    assert (diagnosis.step, diagnosis.life.state) == (12, "running")
    assert diagnosis.ledger.counts == BALANCED


@pytest.mark.parametrize(
    "content",
    [
        "{{{\n",
        '{"step": 1}\n',
        '{"kind": "step", "step": 1}\n',
        '{"kind": "step", "step": 1, "time": 2, "counts": {"dispatched": "x"}}\n',
    ],
)
def test_a_damaged_ledger_is_loud(run, content):
    write_status(run)
    run.ledger_file.write_text(content)
    assert "ledger.jsonl cannot be read" in problems(examine(run))[0]


def test_a_ledger_line_that_is_being_written_is_no_damage(run):
    write_status(run)
    write_ledger(run)
    with run.ledger_file.open("a") as file:
        file.write('{"kind": "step", "step": 13, "cou')
    assert examine(run).is_healthy


# Resumed runs


@pytest.mark.parametrize("kept", [12, 10])
def test_a_run_that_has_just_resumed_stands_where_it_went_back_to(run, kept):
    """Until its first step ends: no damage, and the books are those of the step it goes on from."""
    add_steps(run, 12)
    for step in range(1, 13):
        write_ledger(run, step, counts=BALANCED | {"dropped": step, "dispatched": 104 + step})
    resume(run, kept)
    write_status(run, step=kept, ledger=None)
    diagnosis = examine(run)
    assert diagnosis.findings == ()
    assert diagnosis.ledger.counts["dropped"] == kept
    assert gather(run).ledger.step == kept


@pytest.mark.parametrize("num_before", [3, 200])
def test_a_run_that_begins_anew_has_no_books_yet(run, num_before):
    for step in range(1, num_before + 1):
        write_ledger(run, step, dropped=["rejected by the workflow"])
    resume(run, -1)
    write_status(run, step=0)
    assert gather(run).ledger is None
    assert examine(run).findings == ()


def test_what_a_resume_went_back_behind_is_not_held_against_the_run(run):
    """Neither books that did not balance nor drops of a course that is not taken again."""
    write_ledger(run, 11)
    write_ledger(run, 12, counts=BALANCED | {"trained": 90}, dropped=["rejected by the workflow"] * 50)
    write_status(run)
    assert len(problems(examine(run))) == 2
    resume(run, 11)
    assert examine(run).findings == ()
    write_ledger(run, 12, trained=4)
    assert examine(run).findings == ()
    assert (gather(run).ledger.step, gather(run).ledger.num_trained) == (12, 8 + 4)


def test_settings_of_another_version_do_not_keep_the_rest_from_being_told(run):
    write_status(run)
    run.write_config("trainer: {no_such_key: 1}\n")
    diagnosis = examine(run)
    assert "config-2.yaml cannot be read by this version" in problems(diagnosis)[0]
    assert diagnosis.total_steps == 80


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"trained": 90}, "6 dispatched prompts are neither trained, dropped, buffered nor in flight"),
        ({"in_flight": 5}, "1 dispatched prompts are counted twice"),
    ],
)
@pytest.mark.parametrize("where", ["ledger.jsonl", "status.json"])
def test_a_ledger_that_does_not_balance_is_loud(run, change, told, where):
    counts = BALANCED | change
    write_status(run, ledger=counts if where == "status.json" else BALANCED)
    write_ledger(run, counts=counts if where == "ledger.jsonl" else BALANCED)
    assert problems(examine(run)) == [f"the ledger does not balance in {where}: {told}"]


# Waits


def test_a_wait_becomes_a_problem_by_its_limit_or_by_what_is_usual(run):
    add_steps(run, 12)
    for seconds, limit, expected in ((50, 1800, None), (70, 1800, "hint"), (130, 1800, "problem"), (50, 90, "problem")):
        write_status(run, waits=[a_wait(seconds=seconds, limit=limit)])
        found = [each.severity for each in examine(run).findings]
        assert found == ([expected] if expected else []), (seconds, limit)
    write_status(run, waits=[a_wait(seconds=10**6, limit=None)])
    assert examine(run).is_healthy, "a wait without a limit may last"
    write_status(run, waits=[a_wait("rollouts", seconds=600)])
    assert examine(run).is_healthy, "evaluations are long"


def test_a_wait_for_a_batch_whose_groups_are_all_in_rewards_blames_the_reward(run):
    oldest = [{"id": n, "uid": f"row-{n}", "seconds": 900.0, "doing": "1 waits for a reward or a tool"} for n in (1, 2)]
    write_status(run, waits=[a_wait()], oldest=oldest, capacity=0)
    assert "wait for a reward or a tool, not for the engine" in remedy(examine(run), "batch: MainThread has waited")
    oldest[1]["doing"] = "2 of 8 episodes done, 5 generate, 1 waits for a reward or a tool"
    write_status(run, waits=[a_wait()], oldest=oldest, capacity=0)
    assert "generation is slower than the learner" in remedy(examine(run), "batch")


@pytest.mark.parametrize(("capacity", "told"), [(0, "none may start"), (4, "though there is room")])
def test_a_wait_for_a_batch_while_nothing_runs_is_told_by_the_room(run, capacity, told):
    counts = {"dispatched": 100, "trained": 96, "dropped": 0, "buffered": 4, "in_flight": 0}
    write_status(run, waits=[a_wait()], ledger=counts, capacity=capacity)
    assert told in remedy(examine(run), "batch")


REMEDIES = {
    "batch": "generation is slower than the learner",
    "weights": "update_mode",
    "engine_start": "memory",
    "engine_call": "does not answer",
    "rollout_thread": "to_thread",
    "rollouts": "eval.num_prompts",
}


def kinds_in_use():
    """Of all waits in the source tree that name theirs."""
    waits = {"named_wait", "wait_until", "wait_for_future"}
    files = Path(headwater.__file__).parent.rglob("*.py")
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in waits]
    assert named
    return {each.value.value for call in named for each in call.keywords if each.arg == "kind"}


def test_there_are_remedies_for_the_kinds_in_use_and_for_no_others():
    assert kinds_in_use() == REMEDIES.keys() == remedies._BY_KIND.keys()


@pytest.mark.parametrize(("kind", "told"), REMEDIES.items())
def test_every_kind_of_wait_has_its_remedy(run, kind, told):
    write_status(run, waits=[a_wait(kind)])
    assert told in remedy(examine(run), kind)


def test_a_kind_nobody_knows_is_shown_without_advice(run):
    write_status(run, waits=[a_wait("mine")])
    assert remedy(examine(run), "mine") == ""


# Drops, engine, balance, disk


def test_many_drops_of_one_reason_are_a_problem_with_their_reason(run):
    write_status(run)
    reasons = [
        f"reward f on row r-{n}: no result within 60 s; make it faster or raise reward.timeout_s" for n in range(6)
    ]
    write_ledger(run, dropped=reasons, trained=8)
    diagnosis = examine(run)
    assert problems(diagnosis)[0].startswith("6 groups (43%) were dropped in the last steps: reward f on row r-0")
    assert remedy(diagnosis, "dropped") == "make the reward faster, or raise reward.timeout_s"


def test_few_drops_are_a_hint_and_filtered_ones_are_no_failure(run):
    write_status(run)
    write_ledger(run, dropped=["rejected by the workflow"], trained=20)
    diagnosis = examine(run)
    assert (problems(diagnosis), len(hints(diagnosis))) == ([], 1)
    write_ledger(run, dropped=["all its samples scored the same (algorithm.filter_groups)"] * 60, trained=8)
    assert examine(run).is_healthy
    assert "too easy or too hard" in remedy(examine(run), "filter_groups")


def test_drops_are_read_from_the_status_where_there_is_no_ledger(run):
    write_status(run, drop_reasons={"older than rollout.max_staleness when it was to be trained on": 40})
    diagnosis = examine(run)
    assert "40 groups (29%) were dropped so far" in hints(diagnosis)[0]
    assert "on_stale=mask" in remedy(diagnosis, "dropped")


def test_reasons_that_differ_in_row_and_numbers_alone_are_one():
    counted = alike({"row a-1: took 61 s": 1, "row b: took 7 s": 2, "another": 1})
    assert counted == {"row b: took 7 s": 3, "another": 1}


@pytest.mark.parametrize(("restarts", "severity"), [(1, "hint"), (5, "problem")])
def test_an_engine_that_was_restarted_is_told(run, restarts, severity):
    write_status(run, engine_restarts=restarts)
    (found,) = examine(run).findings
    assert found.severity == severity
    assert "the engine was restarted" in found.what
    for cause in ("a person or a scheduler", "want of memory", "an error of its own", str(run.status_file)):
        assert cause in found.remedy


def test_who_waits_for_whom_is_told(run):
    write_status(run)
    add_steps(run, 12, **{"time/wait_s": 1.5})
    assert hints(examine(run)) == ["the learner waits for rollouts 75% of the time"]
    assert "raise rollout.max_staleness" in remedy(examine(run), "learner waits")


def test_generation_that_is_ahead_is_told(run):
    write_status(run)
    add_steps(run, 12, **{"time/wait_s": 0.01})
    assert hints(examine(run)) == ["generation is ahead: 4 groups wait for the learner"]


def test_steps_that_become_slower_are_told(run):
    write_status(run)
    add_steps(run, 20, step_s=2.0)
    add_steps(run, 10, step_s=5.0)
    assert hints(examine(run)) == ["steps have become slower: 2.0 s before, now 5.0 s"]


def test_a_disk_that_is_full_is_told(run, monkeypatch):
    write_status(run)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100 * 2**20}))
    assert "0.1 GiB are left on the disk" in problems(examine(run))[0]


def test_json_holds_the_same(run):
    write_status(run, waits=[a_wait(limit=None)])
    content = json.loads(json.dumps(examine(run).to_json(), allow_nan=False))
    assert content["life"]["state"] == "running"
    assert content["is_healthy"] is True
    assert content["waits"][0]["hard_limit_s"] is None
    assert content["ledger"] == {"counts": BALANCED, "missing": 0}


def test_waits_of_a_dead_run_stand_still(run):
    write_status(run, process_start="another boot+1", time=time.time() - 5000, waits=[a_wait(seconds=3.0)])
    evidence = gather(run)
    assert life_of(evidence).is_over
    assert examine(run).waits[0].seconds == 3.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.44, "0.4 s"),
        (9.99, "10 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_are_said_as_people_do(seconds, text):
    assert show_duration(seconds) == text
