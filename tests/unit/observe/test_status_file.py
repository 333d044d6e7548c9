"""The status file, while a run lives and when it ends."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time

import pytest

from headwater.core.errors import RunError
from headwater.core.processes import process_start
from headwater.core.records import DropKind
from headwater.core.waits import wait_until
from headwater.observe.status_file import Drops, RecentLog, StatusFile, read_status

READING = {
    "step": 12,
    "total_steps": 80,
    "version": 12,
    "ledger": {"dispatched": 104, "trained": 96, "dropped": 0, "buffered": 4, "in_flight": 4},
    "oldest": [{"id": 100, "uid": "row-7", "seconds": 41.0, "stages": {"working": 1}, "doing": "1 waiting"}],
    "capacity": 0,
    "drops": {"reward_timed_out": {"count": 3, "message": "no result within 60 s"}},
    "engine_restarts": 1,
}


def eventually(read, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (answer := read()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
    return answer


def test_a_running_run_writes_its_identity_and_state(tmp_path):
    path, began = tmp_path / "status.json", time.time()
    with StatusFile(path, lambda: READING, every_s=0.01):
        assert read_status(path) is not None, "it exists immediately"
        status = eventually(lambda: read_status(path) if read_status(path).step == 12 else None)
    assert (status.pid, status.state, status.error) == (os.getpid(), "running", "")
    assert status.process_start == process_start(os.getpid())
    assert began <= status.time <= time.time()
    assert status.counts == READING["ledger"]
    assert status.drops == {DropKind.REWARD_TIMED_OUT: Drops(3, "no result within 60 s")}
    assert (status.oldest_groups[0].uid, status.capacity, status.engine_restarts) == ("row-7", 0, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"], "no temporary file is left"


def test_open_waits_are_in_it_with_and_without_a_limit(tmp_path):
    path, condition, go = tmp_path / "status.json", threading.Condition(), []

    def work(limit):
        with condition:
            wait_until(condition, lambda: go, lambda: f"limit {limit}", kind="status-test", hard_limit_s=limit)

    threads = [threading.Thread(target=work, args=(limit,), name=f"wait {limit}") for limit in (3000.0, math.inf)]
    for thread in threads:
        thread.start()
    with StatusFile(path, lambda: {}, every_s=0.01):
        waits = eventually(
            lambda: (
                found if len(found := [w for w in read_status(path).waits if w.kind == "status-test"]) == 2 else None
            )
        )
        with condition:
            go.append(True)
            condition.notify_all()
        for thread in threads:
            thread.join()
    assert sorted((w.description, w.hard_limit_s, w.thread_name) for w in waits) == [
        ("limit 3000.0", 3000.0, "wait 3000.0"), ("limit inf", math.inf, "wait inf"),
    ]  # fmt: skip
    assert "Infinity" not in path.read_text()


def run_and_raise(path, error):
    with StatusFile(path, lambda: READING):
        raise error


def test_the_final_state_says_how_the_run_ended(tmp_path):
    for error, state in (
        (RunError("the disk is full\nand more"), "failed"),
        (KeyError(), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ):
        with pytest.raises(type(error)):
            run_and_raise(tmp_path / "status.json", error)
        status = read_status(tmp_path / "status.json")
        assert status.state == state, error
        assert status.step == 12, "read once more at the end"
        assert status.error == f"{type(error).__name__}: {error}"


def test_a_run_that_ends_by_itself_is_finished_unless_it_says_otherwise(tmp_path):
    path = tmp_path / "status.json"
    with StatusFile(path, lambda: READING):
        pass
    assert read_status(path).state == "finished"
    with StatusFile(path, lambda: READING) as status:
        status.state = "interrupted"
    assert read_status(path).state == "interrupted"


def test_a_reading_that_fails_keeps_the_last_one_and_the_heartbeat(tmp_path):
    path, fails = tmp_path / "status.json", []

    def read():
        if fails:
            raise RuntimeError("set changed size during iteration")
        return READING

    with StatusFile(path, read, every_s=0.01):
        eventually(lambda: read_status(path).step == 12)
        fails.append(True)
        status = eventually(lambda: read_status(path) if read_status(path).read_error else None)
        before = status.time
        eventually(lambda: read_status(path).time > before)
    assert status.step == 12
    assert status.read_error == "RuntimeError: set changed size during iteration"


def test_warnings_of_the_run_are_in_it(tmp_path):
    path = tmp_path / "status.json"
    logger = logging.getLogger("headwater.engine.supervisor")
    with StatusFile(path, lambda: {}):
        for number in range(30):
            logger.warning("engine %d is restarted", number)
        logger.info("nothing to see")
    lines = read_status(path).log
    assert len(lines) == 20
    assert (lines[-1].level, lines[-1].message) == ("WARNING", "engine 29 is restarted")
    with StatusFile(path, lambda: {}):
        pass
    assert read_status(path).log == (), "of this run alone"


def test_a_message_whose_arguments_do_not_fit_is_kept_as_it_is():
    log = RecentLog()
    log.handle(logging.LogRecord("headwater", logging.ERROR, __file__, 1, "%d engines", ("no",), None))
    assert [line.message for line in log.lines()] == ["%d engines"]


def test_a_missing_folder_does_not_stop_the_run(tmp_path, caplog):
    readings = []
    with StatusFile(tmp_path / "gone" / "status.json", lambda: readings.append(1) or READING, every_s=0.01):
        eventually(lambda: len(readings) >= 3)
    assert caplog.text.count("cannot be written") == 1


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "status.json"
    assert read_status(path) is None
    for content in ("", "{", "[]", "{}", '{"pid": "x"}', "null"):
        path.write_text(content)
        with pytest.raises(RunError, match=r"status\.json cannot be read"):
            read_status(path)


def test_a_process_is_known_by_its_start(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = process_start(child.pid)
        assert began is not None
        assert began == process_start(child.pid)
        assert began != process_start(os.getpid())
        child.kill()
        # Its exit status was not collected, so it is a zombie, which counts as gone.
        eventually(lambda: process_start(child.pid) is None)
    assert process_start(child.pid) is None


def test_what_json_cannot_hold_is_written_as_text(tmp_path):
    path = tmp_path / "status.json"
    with StatusFile(path, lambda: {"path": tmp_path}):
        pass
    assert json.loads(path.read_text())["path"] == str(tmp_path)
