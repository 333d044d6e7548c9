"""The doctor's findings, from run directories in all kinds of state."""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import headwater
from headwater.cli.doctor import _sections
from headwater.core.processes import process_start
from headwater.core.records import DropKind
from headwater.observe import evidence
from headwater.observe.doctor import examine
from headwater.observe.evidence import gather, life_of, show_duration
from headwater.observe.findings import DROP_REMEDIES, REWARD_REMEDIES
from headwater.observe.manifest import seal
from headwater.observe.run_directory import RunDirectory
from headwater.observe.wait_findings import WAIT_REMEDIES

NOW = time.time()
BALANCED = {"dispatched": 104, "trained": 96, "dropped": 0, "buffered": 4, "in_flight": 4}


@pytest.fixture
def run(tmp_path, monkeypatch):
    # However long the machine takes to write and examine it.
    monkeypatch.setattr(evidence, "time", SimpleNamespace(time=lambda: NOW))
    run = RunDirectory.create(tmp_path, "run")
    run.write_config("trainer: {total_steps: 80, num_prompts_per_step: 4}\nrollout: {max_staleness: 1}\n")
    return run


def add_steps(run, count, *, step_s=2.0, ended_ago=1.0, **metrics):
    begun = len(run.read_metrics())
    for step in range(begun + 1, begun + count + 1):
        record = {"kind": "train", "step": step, "time": NOW - ended_ago, "reward/mean": 0.25}
        run.append_metrics({**record, "time/step_s": step_s, **metrics})


def write_status(run, **fields):
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_start": process_start(os.getpid()),
        "started": NOW - 100,
        "time": NOW - 1,
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
    """Append a line as the trainer does at the end of a step."""
    record = {"kind": "step", "step": step, "time": NOW, "weights": "float32-1", "counts": counts}
    record["trained"] = [{"id": n, "uid": "u", "index": n, "epoch": 0, "requests": []} for n in range(trained)]
    record["dropped"] = [
        {"id": 1, "uid": "u", "index": 1, "epoch": 0, "kind": each, "message": f"message {number}"}
        for number, each in enumerate(dropped)
    ]
    run.append_ledger(record)


def resume(run, step):
    """Write the record of a resume from ``step``, as the trainer does."""
    record = {"kind": "resume", "step": step, "time": NOW}
    run.append_metrics(record)
    run.append_ledger(record)


def add_checkpoint(run, step):
    folder = run.checkpoint(step)
    (folder / "model").mkdir(parents=True)
    for name in ("state.json", "model/model.safetensors"):
        (folder / name).write_bytes(os.urandom(1000))
    seal(folder)
    return folder


def problems(diagnosis):
    return [each.what for each in diagnosis.findings if each.severity == "problem"]


def hints(diagnosis):
    return [each.what for each in diagnosis.findings if each.severity == "hint"]


def kinds(diagnosis):
    return [each.kind for each in diagnosis.findings]


def remedy(diagnosis, kind):
    return next(each.remedy for each in diagnosis.findings if each.kind == kind)


def a_group(number=1, **stages):
    counts = {"stages": {"done": 1, **(stages or {"working": 1})}, "doing": "in words"}
    return {"id": number, "uid": f"row-{number}", "seconds": 900.0, **counts}


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
    assert kinds(diagnosis) == ["killed"]
    assert diagnosis.resume == f"headwater train --resume {run.path}"


def test_a_process_that_is_silent_is_unresponsive(run):
    write_status(run, time=NOW - 100, waits=[a_wait(seconds=3.0)])
    diagnosis = examine(run)
    assert diagnosis.life.state == "unresponsive"
    assert diagnosis.waits[0].seconds == pytest.approx(103), "it has gone on since"
    assert "exists, but its last heartbeat 1 min 40 s ago" in problems(diagnosis)[0]
    assert diagnosis.resume == "", "two processes must not train one run"


def test_on_another_machine_the_heartbeat_decides(run):
    for age, state in ((3, "running"), (100, "unresponsive")):
        write_status(run, host="elsewhere", time=NOW - age)
        assert examine(run).life.state == state


def test_the_way_a_run_ended_is_reported(run):
    for state, healthy, resumes in (("finished", True, False), ("interrupted", True, True), ("failed", False, True)):
        write_status(run, state=state, time=NOW - 7200, error="OSError: no space left on device\nand more")
        diagnosis = examine(run)
        assert (diagnosis.life.state, diagnosis.is_healthy, bool(diagnosis.resume)) == (state, healthy, resumes)
    assert problems(diagnosis) == ["the run failed: 2 h 0 min ago: OSError: no space left on device"]


def test_a_live_run_in_which_no_step_ends_is_a_problem_even_without_a_wait(run):
    add_steps(run, 12, ended_ago=1000)
    write_status(run)
    assert problems(examine(run)) == ["no step has ended for 16 min 40 s; the last ones took 2.0 s each"]
    assert "py-spy" in remedy(examine(run), "long_step")


def test_a_step_that_takes_unusually_long_is_blamed_on_what_is_waited_for(run):
    add_steps(run, 12, ended_ago=60)
    oldest = [a_group()]
    write_status(run, waits=[a_wait(seconds=4.0)], oldest=oldest)
    assert hints(examine(run)) == ["no step has ended for 1 min 0 s; the last ones took 2.0 s each"]
    assert "wait for a reward or a tool" in remedy(examine(run), "long_step")
    write_status(run, waits=[a_wait("rollouts", seconds=4.0)], oldest=oldest)
    assert examine(run).findings == (), "an evaluation comes between"


def test_the_progress_of_a_warm_start_is_reported_as_a_stage(run):
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
    add_checkpoint(run, 20)
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


def test_a_damaged_status_is_a_problem_and_the_other_files_are_used(run):
    add_steps(run, 12)
    run.status_file.write_text('{"pid": 12')
    write_ledger(run)
    diagnosis = examine(run)
    assert not diagnosis.is_healthy
    assert "status.json cannot be read" in problems(diagnosis)[0]
    assert (diagnosis.step, diagnosis.life.state) == (12, "running")
    assert diagnosis.ledger.counts == BALANCED


def test_a_damaged_ledger_is_a_problem(run):
    write_status(run)
    for content in (
        "{{{\n",
        '{"step": 1}\n',
        '{"kind": "step", "step": 1}\n',
        '{"kind": "step", "step": 1, "time": 2, "counts": {"dispatched": "x"}}\n',
        '{"kind": "step", "step": 1, "dropped": [{"kind": "no such kind", "message": ""}]}\n',
    ):
        run.ledger_file.write_text(content)
        assert kinds(examine(run)) == ["damaged_file"], content
        assert "ledger.jsonl cannot be read" in problems(examine(run))[0], content


def test_a_ledger_line_that_is_being_written_is_no_damage(run):
    write_status(run)
    write_ledger(run)
    with run.ledger_file.open("a") as file:
        file.write('{"kind": "step", "step": 13, "cou')
    assert examine(run).is_healthy


# Resumed runs


def test_a_run_that_has_just_resumed_is_at_the_step_of_the_resume(run):
    """Until its first step ends: no damage, and the books are those of the step from which it resumed."""
    add_steps(run, 12)
    for step in range(1, 13):
        write_ledger(run, step, counts=BALANCED | {"dropped": step, "dispatched": 104 + step})
    for kept in (12, 10):
        resume(run, kept)
        write_status(run, step=kept, ledger=None)
        diagnosis = examine(run)
        assert diagnosis.findings == (), kept
        assert diagnosis.ledger.counts["dropped"] == kept
        assert gather(run).ledger.step == kept


def test_a_run_that_starts_again_has_no_books_yet(run):
    for step in range(1, 31):
        write_ledger(run, step, dropped=["rejected"])
        if step in (3, 30):
            resume(run, -1)
            write_status(run, step=0)
            assert gather(run).ledger is None, step
            assert examine(run).findings == (), step


def test_records_that_a_resume_made_invalid_are_ignored(run):
    """Neither an unbalanced ledger nor drops after the step of the resume count."""
    write_ledger(run, 11)
    write_ledger(run, 12, counts=BALANCED | {"trained": 90}, dropped=["rejected"] * 50)
    write_status(run)
    assert len(problems(examine(run))) == 2
    resume(run, 11)
    assert examine(run).findings == ()
    write_ledger(run, 12, trained=4)
    assert examine(run).findings == ()
    assert (gather(run).ledger.step, gather(run).ledger.num_trained) == (12, 8 + 4)


def test_unreadable_settings_do_not_hide_the_rest(run):
    write_status(run)
    run.write_config("trainer: {no_such_key: 1}\n")
    diagnosis = examine(run)
    assert "config-2.yaml cannot be read by this version" in problems(diagnosis)[0]
    assert diagnosis.total_steps == 80


def test_a_ledger_that_does_not_balance_is_a_problem(run):
    for change, told in (
        ({"trained": 90}, "6 dispatched prompts are neither trained, dropped, buffered nor in flight"),
        ({"in_flight": 5}, "1 dispatched prompts are counted twice"),
    ):
        for where in ("ledger.jsonl", "status.json"):
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
    write_status(run, waits=[a_wait()], oldest=[a_group(1), a_group(2)], capacity=0)
    assert hints(examine(run)) + problems(examine(run)) == ["batch: MainThread has waited 16 min 40 s"]
    assert "wait for a reward or a tool, not for the engine" in remedy(examine(run), "long_wait")
    blamed_for = {
        "scoring": "wait for a reward, not",
        "calling_tools": "raise tools.max_concurrent",
        "reading_media": "make the files smaller",
    }
    for stage, blamed in blamed_for.items():
        write_status(run, waits=[a_wait()], oldest=[a_group(1, **{stage: 2})], capacity=0)
        assert blamed in remedy(examine(run), "long_wait")
    write_status(run, waits=[a_wait()], oldest=[a_group(1), a_group(2, working=1, generating=5)], capacity=0)
    assert "generation is slower than the learner" in remedy(examine(run), "long_wait")


def test_a_wait_for_a_batch_while_nothing_runs_is_explained_by_the_capacity(run):
    counts = {"dispatched": 100, "trained": 96, "dropped": 0, "buffered": 4, "in_flight": 0}
    for capacity, told in ((0, "none may start"), (4, "although there is capacity")):
        write_status(run, waits=[a_wait()], ledger=counts, capacity=capacity)
        assert told in remedy(examine(run), "long_wait"), capacity


REMEDIES = {
    "batch": "generation is slower than the learner",
    "generation": "fewer prompts",
    "weights": "update_mode",
    "server_reached": "rollout.servers",
    "router": "unreachable",
    "newer_weights": "versions in the list of servers",
    "engine_start": "memory",
    "engine_call": "does not answer",
    "ranks": "rank_timeout_s",
    "ray": "ray status",
    "checkpoint": "checkpoint_every_steps",
    "records": "save_rollouts_every_steps",
    "reward": "reward.timeout_s",
    "run_lock": "another machine",
    "first_requests": "first request",
    "data_future": "DataProtoFuture",
    "agent_start": "imported",
    "agent_finish": "wait_for_finish",
    "rollout_thread": "to_thread",
    "rollouts": "eval.num_prompts",
    "tools": "MCP server",
    "sandbox": "sandbox.max_concurrent",
}


def wait_kinds_in_use():
    """Of all waits in the source tree that name theirs."""
    waits = {"named_wait", "wait_until", "wait_for_future", "wait", "poll"}
    files = Path(headwater.__file__).parent.rglob("*.py")
    sources = [text for file in files if 'kind="' in (text := file.read_text())]
    calls = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) in waits]
    assert named
    kinds = [each.value for call in named for each in call.keywords if each.arg == "kind"]
    return {kind.value for kind in kinds if isinstance(kind, ast.Constant)}


def test_every_kind_of_wait_in_use_has_its_remedy_and_no_other(run):
    assert wait_kinds_in_use() == REMEDIES.keys() == WAIT_REMEDIES.keys()
    for kind, told in REMEDIES.items():
        write_status(run, waits=[a_wait(kind)])
        assert told in remedy(examine(run), "long_wait"), kind
    write_status(run, waits=[a_wait("mine")])
    assert remedy(examine(run), "long_wait") == "", "an unknown kind is shown without advice"


# Drops, engine, balance, disk


def test_every_kind_of_drop_has_its_remedy(run):
    assert DROP_REMEDIES.keys() == set(DropKind)
    for kind in DropKind:
        write_status(run)
        write_ledger(run, dropped=[kind.value] * 6, trained=8)
        (found,) = examine(run).findings
        assert (found.kind, found.severity) == ("drops", "problem" if kind.is_failure else "hint"), kind
        assert found.what == (
            f"6 groups (43%) were dropped in the last steps ({kind.value}), for example: message 5"
        ), kind
        assert found.remedy == DROP_REMEDIES[kind]


def test_few_drops_are_a_hint_and_very_few_are_not_mentioned(run):
    write_status(run)
    write_ledger(run, dropped=["rejected"], trained=20)
    assert (problems(examine(run)), len(hints(examine(run)))) == ([], 1)
    write_ledger(run, dropped=["rejected"], trained=200)
    assert examine(run).findings == ()


def test_failed_scoring_calls_are_named_by_cause(run):
    failures = {cause: {"count": 3, "message": "on row 7"} for cause in REWARD_REMEDIES}
    for cause, failure in failures.items():
        write_status(run, reward_failures={cause: failure})
        assert remedy(examine(run), "reward_failures") == REWARD_REMEDIES[cause]
    (found,) = (each for each in examine(run).findings if each.kind == "reward_failures")
    assert found.what == f"3 scoring calls failed so far ({cause}), for example: on row 7"


def test_drops_are_read_from_the_status_if_there_is_no_ledger(run):
    write_status(run, drops={"stale": {"count": 40, "message": "too old"}})
    diagnosis = examine(run)
    assert "40 groups (29%) were dropped so far (stale)" in hints(diagnosis)[0]
    assert "on_stale=mask" in remedy(diagnosis, "drops")
    assert diagnosis.drops == {"stale": 40}


def test_what_has_no_effect_is_a_hint(run):
    write_status(run, notices=["engine.overlap = false: has no effect on a CPU"])
    diagnosis = examine(run)
    assert [(each.kind, each.severity, each.what) for each in diagnosis.findings] == [
        ("no_effect", "hint", "engine.overlap = false: has no effect on a CPU")
    ]


def test_restarts_of_the_engine_are_reported(run):
    for restarts, severity in ((1, "hint"), (5, "problem")):
        write_status(run, engine_restarts=restarts)
        (found,) = examine(run).findings
        assert (found.kind, found.severity) == ("engine_restarts", severity)
        for cause in ("a person, a scheduler", "lack of memory", "an error in the engine", str(run.status_file)):
            assert cause in found.remedy


def test_servers_are_shown_and_a_lost_one_is_a_problem(run):
    serving = {"name": "http://a:1", "url": "http://a:1", "version": 12, "num_running": 3, "num_waiting": 1}
    serving |= {"is_alive": True, "num_restarts": 0, "state": "serving"}
    lost = serving | {"name": "server 1", "is_alive": False, "num_restarts": 2, "state": "unreachable: timeout"}
    write_status(run, servers=[serving, lost], learner={"num_ranks": 4, "failure": "rank 2 has ended"})
    diagnosis = examine(run)
    (found,) = diagnosis.findings
    assert (found.kind, found.severity) == ("server_lost", "problem")
    assert "server 1 generates nothing: unreachable: timeout" in found.what
    assert [each.name for each in diagnosis.servers] == ["http://a:1", "server 1"]
    lines = [line for _, part in _sections(diagnosis) for line in part]
    assert "http://a:1: version 12, 3 running, 1 waiting; serving" in lines
    assert any("4 ranks; the learner has failed: rank 2 has ended" in line for line in lines)


def test_ranks_are_shown_unless_the_run_is_the_only_one(run):
    own = {"rank": 0, "host": socket.gethostname(), "pid": os.getpid(), "device": "cuda:0"}
    own |= {"peak_memory_bytes": 3 * 2**30, "state": "idle", "last_call": "update, 3.1 s", "is_alive": True}
    write_status(run, learner={"num_ranks": 1, "ranks": [own]})
    assert examine(run).ranks == ()
    other = own | {"rank": 1, "pid": 7, "host": "b", "state": "ended: killed", "is_alive": False, "last_call": ""}
    write_status(run, learner={"num_ranks": 2, "failure": "rank 1: killed", "ranks": [own, other]})
    diagnosis = examine(run)
    assert [each.is_alive for each in diagnosis.ranks] == [True, False]
    lines = dict(_sections(diagnosis))["ranks"]
    first = f"0: cuda:0 of {socket.gethostname()}, process {os.getpid()}, peak 3.0 GiB, last call update, 3.1 s; idle"
    assert lines == [first, "1: cuda:0 of b, process 7, peak 3.0 GiB; ended: killed"]
    assert json.loads(json.dumps(diagnosis.to_json()))["ranks"][1]["host"] == "b"
    ended = {"state": "failed", "error": "RankFailed: rank 1: killed", "time": NOW - 1}
    write_status(run, learner={"num_ranks": 2, "ranks": [own, other | {"alive_at": NOW - 4.5}]}, **ended)
    assert examine(run).ranks[1].state == "ended: killed; the run ended at most 3.5 s later"


def test_a_learner_that_waits_is_reported(run):
    write_status(run)
    add_steps(run, 12, **{"time/wait_s": 1.5})
    assert hints(examine(run)) == ["the learner waits for rollouts 75% of the time"]
    assert "raise rollout.max_staleness" in remedy(examine(run), "learner_waits")


def test_generation_that_is_ahead_is_reported(run):
    write_status(run)
    add_steps(run, 12, **{"time/wait_s": 0.01})
    assert hints(examine(run)) == ["generation is ahead: 4 groups wait for the learner"]


def test_slower_steps_are_reported(run):
    write_status(run)
    add_steps(run, 20, step_s=2.0)
    add_steps(run, 10, step_s=5.0)
    assert hints(examine(run)) == ["steps have become slower: 2.0 s before, 5.0 s now"]


def test_a_full_disk_is_reported(run, monkeypatch):
    write_status(run)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100 * 2**20}))
    assert "100 MiB are left on the disk" in problems(examine(run))[0]


def test_json_holds_the_same(run):
    write_status(run, waits=[a_wait(limit=None)])
    content = json.loads(json.dumps(examine(run).to_json(), allow_nan=False))
    assert content["life"]["state"] == "running"
    assert content["is_healthy"] is True
    assert content["waits"][0]["hard_limit_s"] is None
    assert content["ledger"] == {"counts": BALANCED, "missing": 0}


def test_waits_of_a_dead_run_do_not_grow(run):
    write_status(run, process_start="another boot+1", time=NOW - 5000, waits=[a_wait(seconds=3.0)])
    evidence = gather(run)
    assert life_of(evidence).is_over
    assert examine(run).waits[0].seconds == 3.0


def test_durations_are_shown_in_two_units():
    for seconds, text in (
        (0.44, "0.4 s"),
        (9.99, "10 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ):
        assert show_duration(seconds) == text


# Checkpoints and foreign files


def test_damaged_checkpoints_are_named_and_the_newest_whole_one_is_recommended(run):
    write_status(run, state="failed", error="RunError: x")
    folders = {step: add_checkpoint(run, step) for step in (4, 8, 12)}
    assert examine(run).resume == f"headwater train --resume {run.path}"
    weights = folders[12] / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    diagnosis = examine(run)
    assert f"the checkpoint of step 12: {weights} has 500 bytes, not 1000" in problems(diagnosis)
    assert "the newest intact checkpoint is that of step 8" in remedy(diagnosis, "damaged_checkpoint")
    assert (diagnosis.damaged_steps, diagnosis.is_verified) == ((12,), True)
    assert diagnosis.resume == f"headwater train --resume {run.path} --step 8"
    for step in (4, 8):
        (folders[step] / "state.json").unlink()
    assert examine(run).resume == "", "none of them can be resumed"


def test_the_contents_of_large_checkpoints_are_compared_on_request(run, monkeypatch):
    monkeypatch.setattr("headwater.observe.evidence._QUICK_BYTES", 1000)
    write_status(run)
    state = add_checkpoint(run, 4) / "state.json"
    state.write_bytes(os.urandom(1000))
    assert (examine(run).is_healthy, examine(run).is_verified) == (True, False)
    assert f"{state} has another checksum" in problems(examine(run, verify=True))[0]


def test_a_run_that_is_done_is_not_to_be_resumed(run):
    add_checkpoint(run, 80)
    gone = {"step": 80, "pid": 1, "process_start": "another boot+1"}
    write_status(run, **gone)
    assert (examine(run).life.state, bool(examine(run).resume)) == ("killed", True), "its last evaluation is missing"
    run.append_metrics({"kind": "eval", "step": 80, "time": NOW, "reward/mean": 0.5})
    for fields in ({"state": "failed", "error": "OSError: no picture"}, gone, gone | {"state": "interrupted"}):
        write_status(run, **fields)
        assert examine(run).resume == ""
    write_status(run, **gone)
    assert (examine(run).life.state, examine(run).is_healthy) == ("finished", True)
    run.status_file.unlink()
    add_steps(run, 12, ended_ago=10**5)
    assert examine(run).resume == ""


def test_a_damaged_reference_is_reported(run):
    write_status(run)
    add_checkpoint(run, 4)
    run.reference.mkdir()
    (run.reference / "config.json").write_text("{}")
    assert "the reference model: " in problems(examine(run))[0]
    seal(run.reference)
    assert examine(run).is_healthy


def test_foreign_folders_and_lines_are_skipped_and_said(run):
    add_steps(run, 3)
    write_status(run)
    write_ledger(run)
    for name in ("step_old", "step_000003 (copy)"):
        (run.checkpoints / name).mkdir(parents=True)
    for file in (run.metrics_file, run.ledger_file):
        with file.open("ab") as lines:
            lines.write(b"\xff\xfe\n[]\n")
    run.append_metrics({"kind": "train", "step": 4, "time": "now", "time/step_s": "x", "reward/mean": []})
    diagnosis = examine(run)
    assert diagnosis.is_healthy
    assert kinds(diagnosis) == ["skipped"] * 4
    assert f"{run.metrics_file}: 2 of its last lines are no records of a run and were skipped" in hints(diagnosis)
    assert f"{run.checkpoints / 'step_old'} is not a checkpoint and was skipped" in hints(diagnosis)
    json.dumps(diagnosis.to_json())


def test_a_status_file_with_anything_in_it_is_reported_as_damaged(run):
    write_status(run)
    good = json.loads(run.status_file.read_text())
    for key, value in (("step", "many"), ("log", [7]), ("waits", [{}]), ("oldest", [{"id": 1}]), ("drops", [1])):
        run.status_file.write_text(json.dumps(good | {key: value}))
        assert kinds(examine(run))[0] == "damaged_file", key
    for content in (b"\xff\xfe\x00", b"[]", b"7", b"[" * 10**5):
        run.status_file.write_bytes(content)
        assert kinds(examine(run))[0] == "damaged_file", content[:9]


def test_a_full_disk_comes_before_a_guess_about_memory(run, monkeypatch):
    write_status(run, process_start="another boot+1")
    assert "lack of memory" in remedy(examine(run), "killed")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**20, "total": 2**30}))
    diagnosis = examine(run)
    assert kinds(diagnosis)[:2] == ["low_disk", "killed"]
    assert "memory" not in remedy(diagnosis, "killed")
    assert "free disk space" in remedy(diagnosis, "killed")
    write_status(run, state="failed", error="DiskFull: the disk is full", failure="disk_full")
    assert remedy(examine(run), "failed") == "free disk space, then resume"
