"""Reward workers: real processes that hang, crash and are killed. Only the offending call fails."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import long_enough
from processes import is_running

from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed, RewardTimedOut
from headwater.core.records import Answer, Score
from headwater.observe.spans import Spans
from headwater.rewards.functions import RemoteFunction
from headwater.rewards.managers.naive import NaiveRewardManager
from headwater.rewards.pool import WorkerPool
from headwater.rewards.worker import Frames, frame

FUNCTIONS = """
import asyncio, ctypes, os, subprocess, sys, time

def act(solution_str, ground_truth):
    what, _, argument = solution_str.partition(" ")
    if what == "hang":
        while True: pass
    if what == "hang_with_child":
        children = [subprocess.Popen(["sleep", "600"], start_new_session=each) for each in (False, True)]
        open(argument, "w").write(" ".join(str(each.pid) for each in children))
        children[0].wait()
    if what == "segfault":
        ctypes.string_at(0)
    if what == "exit":
        os._exit(3)
    if what == "sys_exit":
        sys.exit(1)
    if what == "killed":
        os.kill(os.getpid(), 9)
    if what == "unsendable":
        return {"score": 1.0, "made": lambda: 0}
    if what == "meet":  # three calls end when all of them run
        open(f"{argument}/{os.getpid()}", "w").close()
        while len(os.listdir(argument)) < 3:
            time.sleep(0.01)
    return {"score": 1.0, "pid": os.getpid(), "torch": "torch" in sys.modules, "nice": os.nice(0)}

async def aact(solution_str):
    what, _, argument = solution_str.partition(" ")
    if what == "hang":
        await asyncio.sleep(600)
    if what == "block":
        time.sleep(600)
    if what == "raise":
        raise ValueError("no")
    if what == "exit":
        await asyncio.sleep(0.1)
        os._exit(3)
    if what == "unreadable":
        return {"score": 1.0, "made": Unreadable()}
    await asyncio.sleep(0.2 if what == "long" else 0.05)
    return {"score": 0.5, "pid": os.getpid(), "running": len(asyncio.all_tasks())}

class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))

def takes_column(solution_str, thing):
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("pool") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """How a worker has ended is told only if the system ends it soon, which a busy machine may not do."""
    monkeypatch.setattr("headwater.rewards.worker_process._END_LIMIT_S", 60.0)


def manager_of(functions: Path, name: str = "act", **settings) -> closing[NaiveRewardManager]:
    config = RewardConfig(function=f"{functions}:{name}", **{"workers": 1, "timeout_s": 60.0, **settings})
    return closing(NaiveRewardManager(config, Spans()))


async def outcomes(manager: NaiveRewardManager, texts: list[str], **fields) -> list[Score | BaseException]:
    answers = [Answer(tiny.prompt(uid=f"row{number}", **fields), text) for number, text in enumerate(texts)]
    return await asyncio.gather(*(manager.score(each) for each in answers), return_exceptions=True)


def wait_until(condition, limit_s: float = 120.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "the condition did not become true"
        time.sleep(0.01)


@given(
    batches=st.lists(st.lists(st.tuples(st.text(max_size=5), st.integers(), st.binary(max_size=200)), max_size=4)),
    sizes=st.lists(st.integers(1, 300), min_size=1),
)
@settings(max_examples=50, deadline=None)
def test_messages_survive_any_division_into_packets(batches, sizes):
    sent, frames, received = b"".join(map(frame, batches)), Frames(), []
    for size in itertools.cycle(sizes):
        if not sent:
            break
        packet, sent = sent[:size], sent[size:]
        received += frames.add(packet)
    assert received == list(itertools.chain.from_iterable(batches))


def test_many_short_calls_share_one_light_worker(functions):
    with manager_of(functions) as manager:
        scores = asyncio.run(outcomes(manager, ["ok"] * 300))
    assert {score.value for score in scores} == {1.0}
    assert len({score.info["pid"] for score in scores}) == 1 != os.getpid()
    assert {score.info["torch"] for score in scores} == {False}
    assert scores[0].info["nice"] > min(os.nice(0), 18)  # 19 is the most, also if the tests themselves have it


def test_more_workers_start_only_if_there_is_work_for_them(functions, tmp_path):
    with manager_of(functions, workers=3) as manager:
        asyncio.run(outcomes(manager, ["ok"]))
        assert len(manager._plain_pool.pids) == 1
        asyncio.run(outcomes(manager, [f"meet {tmp_path}"] * 3))
        assert len(manager._plain_pool.pids) == 3


def test_only_the_call_that_ends_its_worker_fails(functions):
    texts = ["ok", "segfault", "ok", "exit", "killed", "sys_exit", "unsendable", "ok"]
    with manager_of(functions) as manager:
        made = asyncio.run(outcomes(manager, texts))
        counts, status = manager.take_counts(), manager.status()
        again = manager.take_counts()
    assert [type(each) for each in made] == [Score, *[RewardFailed] * 1, Score, *[RewardFailed] * 4, Score]
    said = {text: str(each) for text, each in zip(texts, made, strict=True)}
    assert "reward act on row row1 " in said["segfault"]
    assert "ended by SIGSEGV" in said["segfault"]
    assert "exit status 3" in said["exit"]
    assert "SIGKILL; the system may have killed it for lack of memory" in said["killed"]
    assert "raised SystemExit" in said["sys_exit"]
    assert "cannot be sent to another process" in said["unsendable"]
    causes = {"worker_died": 3, "raised": 1, "bad_value": 1}
    assert counts == {
        "reward/failed_calls": 5,
        "reward/retried_calls": 0,
        **{f"reward/failures/{cause}": count for cause, count in causes.items()},
    }
    assert {cause: each["count"] for cause, each in status.items()} == causes
    assert again["reward/failed_calls"] == again["reward/failures/raised"] == 0


def test_the_right_call_is_blamed_in_a_batch_whose_results_travel_together(functions):
    def check(limit_s: float) -> None:
        with manager_of(functions, timeout_s=limit_s) as manager:
            asyncio.run(outcomes(manager, ["ok"] * 100))  # the pool knows that calls are short
            for what, error in (("exit", RewardFailed), ("hang", RewardTimedOut)):
                made = asyncio.run(outcomes(manager, [*["ok"] * 20, what, *["ok"] * 20]))
                assert [type(each) for each in made] == [*[Score] * 20, error, *[Score] * 20]

    long_enough(check, 1.0, 10.0)


def test_a_time_out_kills_the_worker_and_everything_it_started(functions, tmp_path):
    def check(limit_s: float) -> None:
        child_file = tmp_path / f"child {limit_s}"
        texts = [f"hang_with_child {child_file}", "hang", "ok", "ok"]
        with manager_of(functions, timeout_s=limit_s) as manager:
            made = asyncio.run(outcomes(manager, texts))
            children = [int(each) for each in child_file.read_text().split()]
            assert len(children) == 2  # one in the group of the worker, one in a separate group
            wait_until(lambda: not any(map(is_running, children)))
        assert [type(each) for each in made] == [RewardTimedOut, RewardTimedOut, Score, Score]
        assert made[2].info["pid"] == made[3].info["pid"]

    long_enough(check, 0.5, 10.0)


def test_retries_are_counted_and_may_succeed(functions, tmp_path):
    file = tmp_path / "flaky.py"
    file.write_text(
        "import os, pathlib\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    mark = pathlib.Path(ground_truth)\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os._exit(1)\n"
        "    return 1.0\n"
    )
    config = RewardConfig(function=str(file), max_retries=1, workers=1)
    with closing(NaiveRewardManager(config, Spans())) as manager:
        made = asyncio.run(outcomes(manager, ["x"], ground_truth=str(tmp_path / "mark")))
        counts = manager.take_counts()
    assert made == [Score(1.0)]
    assert counts == {"reward/failed_calls": 0, "reward/retried_calls": 1}


def test_async_functions_run_together_in_one_worker(functions):
    def check(limit_s: float) -> None:
        with manager_of(functions, "aact", timeout_s=limit_s, max_concurrent=8) as manager:
            made = asyncio.run(outcomes(manager, ["ok", "hang", "raise", *["ok"] * 20]))
        assert type(made[1]) is RewardTimedOut
        assert "raised ValueError: no" in str(made[2])
        scores = [each for each in made if isinstance(each, Score)]
        assert len(scores) == 21
        assert len({score.info["pid"] for score in scores} - {os.getpid()}) == 1
        assert 2 < max(score.info["running"] for score in scores) <= 9  # and the task that serves

    long_enough(check, 0.6, 10.0)


def test_an_async_function_that_blocks_its_event_loop_is_killed(functions, monkeypatch):
    monkeypatch.setattr("headwater.rewards.pool._CANCEL_LIMIT_S", 0.2)

    def check(limit_s: float) -> None:
        with manager_of(functions, "aact", timeout_s=limit_s) as manager:
            made = asyncio.run(outcomes(manager, ["block"]))
            assert type(made[0]) is RewardTimedOut
            later = asyncio.run(outcomes(manager, ["ok"]))
        assert later[0].value == 0.5

    long_enough(check, 0.3, 10.0)


def test_only_the_async_call_that_ends_its_worker_fails(functions):
    texts = [*["long"] * 6, "exit", *["long"] * 6, "unreadable", "ok", "exit"]
    with manager_of(functions, "aact", max_concurrent=8) as manager:
        made = asyncio.run(outcomes(manager, texts))
        num_left = len(manager._async_pool.pids)
    assert {text: {type(each) for each, asked in zip(made, texts, strict=True) if asked == text} for text in texts} == {
        "long": {Score}, "ok": {Score}, "exit": {RewardFailed}, "unreadable": {RewardFailed}
    }  # fmt: skip
    assert "ended its worker process, which ended with exit status 3" in str(made[6])
    assert made[6].cause == made[-1].cause == "worker_died"
    assert "cannot be read here" in str(made[13])
    assert num_left <= 1  # those that were started to find the calls have ended


def test_a_cancelled_call_frees_its_place(functions):
    async def run(manager: NaiveRewardManager) -> Score | BaseException:
        waiting = asyncio.create_task(manager.score(Answer(tiny.prompt(), "hang")))
        await asyncio.sleep(0.5)
        waiting.cancel()
        (made,) = await outcomes(manager, ["ok"])
        return made

    with manager_of(functions, "aact", max_concurrent=1) as manager:
        assert asyncio.run(run(manager)).value == 0.5


def test_what_cannot_be_sent_is_a_named_failure(functions):
    with manager_of(functions, "takes_column") as manager:
        (made,) = asyncio.run(outcomes(manager, ["x"], columns={"thing": lambda: 0}))
    assert made.cause == "bad_arguments"
    assert "set reward.where=threads" in str(made)


def test_a_function_that_only_this_process_can_load(functions, tmp_path):
    file = tmp_path / "once.py"
    file.write_text("def compute_score(solution_str): return 1.0\n")
    with closing(NaiveRewardManager(RewardConfig(function=str(file), workers=1), Spans())) as manager:
        file.write_text("import nothing_of_this_name\n")
        made = asyncio.run(outcomes(manager, ["x", "y", "z"]))
    assert [each.cause for each in made] == ["not_loaded"] * 3  # no call is blamed for the end of a worker
    assert "nothing_of_this_name" in str(made[0])


def test_every_import_of_a_function_has_its_own_time_limit(functions, tmp_path, monkeypatch):
    fast = RemoteFunction(f"{functions}:act", {}, False)

    def imports_in(seconds: float) -> RemoteFunction:
        file = tmp_path / f"imports_in_{seconds:g}.py"
        file.write_text(f"import time; time.sleep({seconds})\ndef compute_score(solution_str): return 2.0\n")
        return RemoteFunction(f"{file}:compute_score", {}, False)

    async def run(pool: WorkerPool, limit_s: float) -> None:
        async def call(function: RemoteFunction, **more: str):
            return await pool.call(function, {"solution_str": "ok", **more}, None, timeout_s=limit_s)

        (first,) = await call(fast, ground_truth="")  # leaves a timer behind, which must not end the next import
        (second,), again = await asyncio.gather(call(imports_in(1.25 * limit_s)), call(fast, ground_truth=""))
        assert (first.value, second.value, again[0].value) == (1.0, 2.0, 1.0)
        assert pool.num_replaced == 0, "the time of an import is not that of a call"
        with monkeypatch.context() as patch:
            patch.setattr("headwater.rewards.pool._START_LIMIT_S", 0.2)
            failed = await call(imports_in(600))
        assert failed.cause == "not_loaded"
        assert (await call(fast, ground_truth=""))[0].value == 1.0

    def check(limit_s: float) -> None:
        with closing(WorkerPool(1)) as pool:
            asyncio.run(run(pool, limit_s))

    long_enough(check, 2.0, 20.0)


def test_other_places_to_run(functions):
    for where, texts in (("threads", ["ok", "ok"]), ("event_loop", ["ok", "ok"])):
        with manager_of(functions, where=where) as manager:
            assert [each.info["pid"] for each in asyncio.run(outcomes(manager, texts))] == [os.getpid()] * 2, where
    with manager_of(functions, "aact", where="event_loop") as manager:
        assert asyncio.run(outcomes(manager, ["ok"]))[0].info["pid"] == os.getpid()
    given = NaiveRewardManager(RewardConfig(), Spans(), function=lambda solution_str: len(solution_str))
    assert asyncio.run(outcomes(given, ["four"])) == [Score(4.0)]


PARENT = """
import asyncio, sys
from headwater.config.schema import RewardConfig
from headwater.core.records import Prompt
from headwater.core.records import Answer
from headwater.observe.spans import Spans
from headwater.rewards.managers.naive import NaiveRewardManager

async def main():
    manager = NaiveRewardManager(RewardConfig(function=sys.argv[1], workers=2), Spans())
    prompt = Prompt("row", (), "text", (1,), "mine")
    await manager.score(Answer(prompt, "ok"))
    calls = [asyncio.create_task(manager.score(Answer(prompt, "hang"))) for _ in range(2)]
    await asyncio.sleep(0.5)
    print(*manager._plain_pool.pids, flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


def test_workers_end_with_their_parent_even_if_it_is_killed(functions):
    for how in (signal.SIGKILL, signal.SIGTERM):
        command = [sys.executable, "-c", PARENT, f"{functions}:act"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            pids = [int(each) for each in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(is_running, pids))
            parent.send_signal(how)
        wait_until(lambda pids=pids: not any(map(is_running, pids)))
