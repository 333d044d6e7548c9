"""Processes that die, do not start or fail: others take their place, and if that is in vain everybody is told why.

The processes are real; what runs in them is ``stub_server.py``, which starts in a moment and fails on demand.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from log import own_records
from processes import is_running

from headwater.backends.launch import keeper
from headwater.backends.launch.child import ChildServer, Command
from headwater.backends.launch.keeper import ChildKeeper
from headwater.backends.native import places, server
from headwater.backends.native.engine import NativeEngine
from headwater.backends.native.places import OwnServer
from headwater.config.schema import WeightTransfer
from headwater.core.errors import MemoryRefused, RolloutFailed, TransferLost, WeightsError, WeightsIncomplete
from headwater.core.protocols import WeightUpdate
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.observe.spans import Spans

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 120.0
FEW = 2
STUB = Path(__file__).with_name("stub_server.py")


def fails(path: str, code: str = "engine_unavailable") -> dict[str, str]:
    return {"path": path, "code": code}


class Scene:
    """An engine whose processes behave in turn as planned, the last of the plan for all that follow."""

    def __init__(self, folder: Path, *plan: object, transfer: WeightTransfer) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        self.engine = NativeEngine(OwnServer(str(folder), dtype="float32"), transfer=transfer, spans=Spans())

    @property
    def restarts(self) -> int:
        return self.engine.status().num_restarts

    def children(self) -> list[int]:
        return self._read("children.jsonl")

    def children_asked(self, path: str) -> list[int]:
        """The processes that were called so, in order."""
        return [pid for pid, called in self._read("calls.jsonl") if called == path]

    def _read(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self._folder / name).read_text().splitlines()]

    def generate(self, count: int = 1) -> list[ModelResponse | BaseException]:
        """Answers or errors of so many requests at a time; never a wait without end."""
        requests = [ModelRequest(f"r{n}", (5, 6), SamplingParams(max_new_tokens=9), n) for n in range(count)]

        async def run() -> list[ModelResponse | BaseException]:
            answers = asyncio.gather(*(self.engine.agenerate(each) for each in requests), return_exceptions=True)
            return await asyncio.wait_for(answers, LIMIT_S)

        return asyncio.run(run())

    def kill(self) -> None:
        """Kill the process, and wait for the next one."""
        pid = self.engine.pid
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while len(self.children()) == self.children().index(pid) + 1 or not self.engine._server.keeper.is_settled:
            assert time.monotonic() < deadline, "no other takes its place"
            time.sleep(0.01)


@pytest.fixture
def scene_of(tmp_path, monkeypatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.setattr(places, "SERVE", (sys.executable, str(STUB)))
    monkeypatch.setattr(keeper, "_DEATH_S", LIMIT_S)  # on a busy machine, it takes a while until they have ended
    scenes = []

    def make(*plan: object, transfer: WeightTransfer = "file") -> Scene:
        scenes.append(Scene(tmp_path / f"scene{len(scenes)}", *plan, transfer=transfer))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.engine.close()


@pytest.fixture
def few_restarts(monkeypatch) -> None:
    """A process of which every restart fails is given up sooner, which saves starting processes."""
    monkeypatch.setattr(keeper, "MAX_RESTARTS", FEW)


def assert_all_failed(outcomes: list[Any], *parts: str) -> None:
    assert outcomes
    for each in outcomes:
        assert isinstance(each, RolloutFailed), each
        assert all(part in str(each) for part in parts), str(each)


# A process that dies


def test_a_process_that_died_is_counted_once(scene_of):
    scene = scene_of("half", "serve")
    [response] = scene.generate()
    assert response.output_tokens == (0, 1), "the second one goes on after the first one's token"
    assert (scene.restarts, len(scene.children())) == (1, 2)


def test_after_too_many_deaths_every_open_request_fails_with_the_cause(few_restarts, scene_of, caplog):
    scene = scene_of("die")
    cause = (f"died {FEW + 1} times in a row", "killed by SIGKILL; its output:\nserving ", "headwater serve")
    assert_all_failed(scene.generate(3), *cause)
    assert len(scene.children()) == 1 + FEW
    assert scene.restarts == FEW, "the first of them was no restart"
    said = [each.message.partition("; its last output: serving ")[1] != "" for each in own_records(caplog)]
    assert said == [True] * FEW
    assert_all_failed(scene.generate(), *cause)
    assert not scene.engine.status().is_alive
    for call in (scene.engine.pause, scene.engine.weights_checksum):
        with pytest.raises(RolloutFailed, match="killed by SIGKILL"):
            call()


def test_deaths_with_a_finished_request_in_between_are_not_in_a_row(few_restarts, scene_of):
    scene = scene_of("serve")
    for _ in range(FEW + 1):
        scene.kill()
        assert isinstance(scene.generate()[0], ModelResponse)
    assert scene.restarts == FEW + 1


# A process that does not come up


def test_a_restart_that_fails_is_tried_again(scene_of):
    scene = scene_of("die", "exit", fails("/control/version", "internal_error"), "serve")
    scene.engine.set_version(4)
    assert isinstance(scene.generate()[0], ModelResponse)
    assert scene.restarts == 3
    assert scene.children_asked("/control/version")[-1] == scene.engine.pid, "it was told what the first one knew"


@pytest.mark.parametrize(
    ("then", "causes"),
    [
        ("exit", ("could not take over: RolloutFailed: ", "exit status 1 before it served", "there is no memory left")),
        (fails("/control/update_weights", "weights_refused"), ("WeightsError: /control/update_weights is out of",)),
        (fails("/control/update_weights"), ("EngineFailed: /control/update_weights is out of order",)),
    ],
)
def test_restarts_that_all_fail_end_in_an_error_that_says_why(few_restarts, scene_of, then, causes):
    scene = scene_of("die", then)
    scene.engine.update_weights(WeightUpdate.of(1, [("w", torch.zeros(2))])).result(LIMIT_S)
    assert_all_failed(scene.generate(2), f"died {FEW + 1} times", *causes)
    assert scene.restarts == FEW
    with pytest.raises(RolloutFailed, match="could not take over"):
        scene.engine.pause()


def test_a_system_that_gives_no_process_ends_in_an_error_that_says_so(few_restarts, scene_of, monkeypatch):
    scene = scene_of("die")
    monkeypatch.setattr(places, "SERVE", ("/no/such/program",))
    assert_all_failed(scene.generate(2), "could not take over: FileNotFoundError", "/no/such/program")


def test_a_watch_that_fails_itself_is_told_too(scene_of):
    async def fail(keeper: ChildKeeper) -> None:
        raise RuntimeError("no such session")

    scene = scene_of("die")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildKeeper, "_end_child", fail)
        assert_all_failed(scene.generate(2), "supervising the engine's process failed: RuntimeError: no such session")


WORDS = "no space left on /dev/shm"


@pytest.mark.parametrize("path", ["/control/version", "/headwater/connect"])
def test_a_process_that_ends_before_it_takes_over_has_its_last_words(few_restarts, scene_of, path, caplog):
    scene = scene_of("die", {"path": path, "last_words": WORDS})
    scene.engine.set_version(4)
    assert_all_failed(scene.generate(), "take over: ConnectionLost: ", "ended with exit status 7; its output:\n", WORDS)
    warnings = [each.getMessage() for each in caplog.records if "could not take over" in each.getMessage()]
    assert warnings
    assert all(f"; its last output: {WORDS};" in each for each in warnings)


def test_a_first_process_that_ends_before_it_is_connected_has_its_last_words(scene_of):
    with pytest.raises(RolloutFailed, match=rf"ended with exit status 7; its output:\n(.|\n)*{WORDS}"):
        scene_of({"path": "/headwater/connect", "last_words": WORDS})


def test_the_first_error_is_shown_even_if_much_is_printed_after_it():
    """As vLLM does: the cause in one process, then long tracebacks of another one that waited for it."""
    code = (
        "print('like `OSError: [Errno 24]`'); print('(EngineCore pid=7) ERROR [core.py:1] ImportError: no x')\n"
        "print('waits\\n' * 3000 + 'RuntimeError: see above'); raise SystemExit(1)"
    )
    command = Command([sys.executable, "-c", code], "a model", re.compile(r"at (\S+)"))
    with pytest.raises(RolloutFailed) as caught:
        asyncio.run(ChildServer.start(command))
    first = "its output:\nthe first error: (EngineCore pid=7) ERROR [core.py:1] ImportError: no x\n...\n"
    assert first in str(caught.value)
    assert str(caught.value).endswith("waits\nRuntimeError: see above")


def test_a_server_whose_end_is_interrupted_leaves_no_process():
    """As with Ctrl-C while it loads its model: who ends it is cancelled as well."""
    code = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('worker', worker.pid, flush=True); time.sleep(600)"
    )
    command = Command([sys.executable, "-c", code], "a model", re.compile(r"never (x)"))
    printed = []

    async def run() -> None:
        starting = asyncio.create_task(ChildServer.start(command, echo=printed.append))
        deadline = time.monotonic() + LIMIT_S
        while not (named := re.search(r"worker (\d+)\n", "".join(printed))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.sleep(0.1)  # now it waits for the end of the process
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        while is_running(int(named[1])):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # asyncio notices the end of the other process

    asyncio.run(run())


# A process that lives and whose engine does not


CONTROL: dict[str, Callable[[NativeEngine], object]] = {
    "/control/pause": NativeEngine.pause,
    "/control/checksum": NativeEngine.weights_checksum,
    "/control/sleep": NativeEngine.sleep,
    "/control/update_weights": lambda engine: engine.update_weights(
        WeightUpdate.of(3, [("w", torch.zeros(2))])
    ).result(LIMIT_S),
}  # fmt: skip


@pytest.mark.parametrize("path", CONTROL)
def test_a_call_that_meets_a_failed_engine_is_made_again_in_a_new_process(scene_of, path):
    scene = scene_of(fails(path), "serve")
    CONTROL[path](scene.engine)
    first, second = scene.children()
    called = scene.children_asked(path)
    assert (called[0], called[-1]) == (first, second)
    assert scene.restarts == 1
    assert isinstance(scene.generate()[0], ModelResponse)


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/control/update_weights", "killed by SIGKILL, because its engine had failed (/control/update_weights: "),
        ("/control/pause", "new process could not take over: EngineFailed: "),  # it is to be paused from the start
    ],
)
def test_a_call_that_every_engine_fails_at_raises_in_the_caller(few_restarts, scene_of, path, cause):
    scene = scene_of(fails(path))
    with pytest.raises(RolloutFailed, match=f"died {FEW + 1} times in a row") as caught:
        CONTROL[path](scene.engine)
    assert f"{cause}{path} is out of order" in str(caught.value)
    assert scene.restarts == FEW
    assert scene.engine.get_version() == 0, "weights that none has taken do not count"
    assert_all_failed(scene.generate(), cause)


def test_a_request_that_meets_a_failed_engine_goes_on_in_a_new_process(scene_of):
    scene = scene_of(fails("requests"), "serve")
    assert isinstance(scene.generate()[0], ModelResponse)
    assert scene.restarts == 1


# A process that refuses and is none the worse


def test_a_refused_wake_is_told_and_a_later_one_works_in_the_same_process(scene_of):
    scene = scene_of({**fails("/control/wake", "memory_refused"), "times": 1})
    scene.engine.sleep()
    with pytest.raises(MemoryRefused, match="/control/wake is out of order"):
        scene.engine.wake()
    assert scene.engine._server.state.asleep, "one that takes its place must sleep too"
    scene.engine.wake()
    assert not scene.engine._server.state.asleep
    assert (scene.restarts, len(scene.children())) == (0, 1)
    assert isinstance(scene.generate()[0], ModelResponse)


# A process that is well and cannot be reached or understood


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Standard input, output and errors stay open. Another file that is closed meanwhile leaves no number below 3 free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_call_that_cannot_be_made_is_given_up_while_the_process_lives(scene_of, monkeypatch):
    monkeypatch.setattr(server, "_REACH_S", 0.5)
    scene = scene_of("serve")
    with no_file_can_be_opened(), pytest.raises(RolloutFailed) as caught:
        scene.engine.pause()
    assert f"process {scene.engine.pid} is alive but cannot be reached: POST /control/pause: " in str(caught.value)
    assert "Too many open files" in str(caught.value)
    scene.engine.pause()
    assert scene.restarts == 0


def test_a_reply_that_is_no_json_object_is_told_at_once(scene_of):
    for text in ("<html>Bad gateway</html>", "[1, 2]", ""):
        scene = scene_of({"path": "/control/checksum", "text": text})
        message = r"GET /control/checksum: the reply of status 200 is not a JSON object: "
        with pytest.raises(RolloutFailed, match=message) as caught:
            scene.engine.weights_checksum()
        assert repr(text) in str(caught.value)
        assert len(scene.children_asked("/control/checksum")) == 1
        assert scene.restarts == 0


@pytest.mark.parametrize("text", ['[{"id": 0, "tok', '[{"tokens": [3]}]', "7"])
def test_a_message_that_cannot_be_read_is_what_the_process_ended_for(scene_of, text, caplog, monkeypatch):
    monkeypatch.setattr(keeper, "_DEATH_S", 2 * LIMIT_S)  # it would not end, so it is not waited for
    scene = scene_of({"path": "requests", "text": text}, "serve")
    assert isinstance(scene.generate()[0], ModelResponse)
    [warning] = [each.getMessage() for each in caplog.records if "it is restarted" in each.getMessage()]
    assert "killed by SIGKILL, after it had sent an unreadable message (UnreadableMessage: " in warning
    assert f"the message: {text})" in warning


# Weights


def weights(version: int, *, breaks: bool = False) -> WeightUpdate:
    """Two buckets; with ``breaks`` the learner fails between them."""

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [("v", torch.zeros(2))]
        if breaks:
            raise OSError("the disk is gone")
        yield [("w", torch.zeros(3))]

    return WeightUpdate(version, {"v": (2,), "w": (3,)}, buckets())


def test_weights_that_cannot_be_read_are_an_update_that_failed(scene_of):
    for transfer in ("file", "shared_memory"):
        scene = scene_of("serve", transfer=transfer)
        with pytest.raises(OSError, match="the disk is gone"):
            scene.engine.update_weights(weights(1, breaks=True)).result(LIMIT_S)
        assert (scene.restarts, scene.engine.get_version()) == (0, 0)


def test_a_new_process_is_sent_streamed_weights_again_before_it_is_asked_for_anything(scene_of):
    scene = scene_of("serve", transfer="shared_memory")
    scene.engine.update_weights(weights(5)).result(LIMIT_S)
    assert not scene.engine.status().needs_weights
    scene.kill()
    status = scene.engine.status()
    assert (status.needs_weights, status.version, status.num_restarts) == (True, 5, 1)
    with pytest.raises(TransferLost, match="needs the weights again"):
        scene.engine.weights_checksum()

    def publish_again() -> None:
        deadline = time.monotonic() + LIMIT_S
        while not scene.engine.status().num_waiting:
            assert time.monotonic() < deadline, "the request has not come"
            time.sleep(0.01)
        time.sleep(0.2)
        assert scene.engine.status().num_waiting == 1, "it waits for the weights"
        scene.engine.update_weights(weights(5)).result(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publish_again)
        [response] = scene.generate()
        publishing.result(LIMIT_S)
    assert isinstance(response, ModelResponse)
    assert not scene.engine.status().needs_weights


@pytest.mark.parametrize("path", ["start_weight_update", "update_weight_slot", "finish_weight_update"])
def test_a_process_that_dies_during_a_transfer_is_told_and_the_next_one_takes_it(scene_of, path):
    dies = {"path": f"/control/{path}", "last_words": "out of memory"}
    scene = scene_of(dies, "serve", transfer="shared_memory")
    with pytest.raises(TransferLost, match="ended during a weight update"):
        scene.engine.update_weights(weights(1)).result(LIMIT_S)
    scene.engine.update_weights(weights(1)).result(LIMIT_S)
    assert (scene.engine.get_version(), scene.restarts) == (1, 1)
    assert isinstance(scene.generate()[0], ModelResponse)


def test_a_refused_transfer_costs_no_process(scene_of):
    for path in ("start_weight_update", "update_weight_slot", "finish_weight_update"):
        scene = scene_of({**fails(f"/control/{path}", "weights_refused"), "times": 1}, transfer="shared_memory")
        with pytest.raises(WeightsError, match=f"{path} is out of order"):
            scene.engine.update_weights(weights(1)).result(LIMIT_S)
        scene.engine.update_weights(weights(2)).result(LIMIT_S)
        assert (scene.engine.get_version(), scene.restarts) == (2, 0)


def test_a_learner_that_is_slower_than_a_restart_is_told_to_send_again(scene_of):
    scene = scene_of("serve", transfer="shared_memory")

    def buckets() -> Iterator[list[tuple[str, torch.Tensor]]]:
        scene.kill()  # and the next process serves before the first bucket is there
        yield [("w", torch.zeros(3))]

    with pytest.raises(TransferLost, match="was replaced"):
        scene.engine.update_weights(WeightUpdate(1, {"w": (3,)}, buckets())).result(LIMIT_S)
    assert scene.engine.status().needs_weights, "it may have died after it had told that it uses the weights"
    scene.engine.update_weights(weights(1)).result(LIMIT_S)
    assert (scene.engine.get_version(), scene.engine.status().needs_weights) == (1, False)


def test_a_process_that_dies_at_its_checksum_is_sent_the_weights_again(scene_of):
    dies = {"path": "/control/checksum", "last_words": "out of memory"}
    scene = scene_of(dies, "serve", transfer="shared_memory")
    scene.engine.update_weights(weights(1)).result(LIMIT_S)
    with pytest.raises(TransferLost, match="ended during a weight update"):
        scene.engine.weights_checksum()
    with pytest.raises(TransferLost, match="needs the weights again"):
        scene.engine.weights_checksum()
    scene.engine.update_weights(weights(1)).result(LIMIT_S)
    assert scene.engine.weights_checksum() == "float32-7"
    from_file = scene_of(dies, "serve")
    from_file.engine.update_weights(weights(1)).result(LIMIT_S)
    assert from_file.engine.weights_checksum() == "float32-7", "a new process has read the file"
    assert from_file.children_asked("/control/update_weights") == from_file.children()


def test_an_old_process_says_nothing_about_a_new_one(scene_of):
    scene = scene_of("serve", transfer="shared_memory")
    server, engine = scene.engine._server, scene.engine
    old = engine._thread.do(server.client(), "the client")
    engine.update_weights(weights(1)).result(LIMIT_S)
    scene.kill()
    engine.update_weights(weights(1)).result(LIMIT_S)
    server.weights_incomplete(old)
    assert not engine.status().needs_weights
    with pytest.raises(TransferLost, match="ended after a weight update"):
        server.weights_arrived(old, 2, None)
    assert engine.get_version() == 1
    server.weights_incomplete(engine._thread.do(server.client(), "the client"))
    with pytest.raises(WeightsIncomplete, match="parts of two versions"):
        engine.weights_checksum()
