"""Weights for vLLM's workers without a file: the sender and the readers of ``inside/``, without vLLM.

``tests/integration/test_vllm_server.py`` uses real servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.backends.remote import group
from headwater.backends.remote.group import GroupStream
from headwater.backends.remote.link import LinkLost, ServerInfo
from headwater.backends.router.options import RouterOptions
from headwater.backends.vllm import weights
from headwater.backends.vllm.http import INSIDE
from headwater.backends.vllm.inside.headwater_vllm_weights import (
    ArrivalError,
    ReceivedSums,
    SlotReader,
)
from headwater.backends.vllm.weights import Handover, SlotStream, WorkerCalls, check_transfer, make_stream, room_problem
from headwater.config.load import load_config
from headwater.core.errors import ConfigError, RolloutFailed, WaitTimeout, WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.models.checksum import checksum
from headwater.weights import shared_memory
from headwater.weights.memory import in_buckets

sys.path.append(str(INSIDE))  # as in the workers
import headwater_vllm_weights
from headwater_vllm_worker import Worker

LIMIT_S = 60.0
CPU = torch.device("cpu")
INFO = ServerInfo("0.32", "model", "float32", "one", 64, 4, "cpu", labels_tokens=True, can_sleep=False)


class LoadingWorker(Worker):  # type: ignore[misc]
    """The methods of a worker of vLLM, on what stands for vLLM's own."""

    device = CPU
    model_runner = SimpleNamespace(get_model=torch.nn.Module)

    def __init__(self, rank: int, workers: Workers) -> None:
        self.rank = rank
        self._workers = workers

    def reload_weights(self, weights_path: str = "", weights_iterator: Any = ()) -> None:
        received = self._workers.received[self.rank] = {}
        tensors = iter(weights_iterator)
        if self._workers.load is not None:
            self._workers.load(self.rank, tensors)
        for name, tensor in tensors:
            assert name not in received
            received[name] = tensor  # kept while slots are filled again, as vLLM keeps parts of a layer
            time.sleep(self._workers.seconds_per_tensor)

    def _headwater_finish(self, model: Any) -> None:
        """There are no layers of vLLM."""


@dataclass
class Workers(WorkerCalls):
    """The workers of a server in threads, and vLLM's executor, which has a queue of answers for each of them."""

    count: int
    seconds_per_tensor: float = 0.0
    received: list[dict[str, torch.Tensor]] = field(default_factory=list)
    label: str = ""
    url: str = "http://127.0.0.1"
    load: Callable[[int, Iterator[tuple[str, torch.Tensor]]], None] | None = None
    """What a worker of that rank does with a stream before it keeps the rest."""

    def __post_init__(self) -> None:
        self.workers = [LoadingWorker(rank, self) for rank in range(self.count)]
        self.answers: list[deque[Any]] = [deque() for _ in range(self.count)]
        self.received = [{} for _ in range(self.count)]
        self._calls = asyncio.Lock()
        """Workers do one call after the other."""

    async def ask_workers(self, method: str, arguments: Mapping[str, Any], **options: Any) -> Sequence[Any]:
        async with self._calls:
            ranks = range(self.count)
            await asyncio.gather(*(asyncio.to_thread(self._call, rank, method, arguments) for rank in ranks))
            results = []
            for answers in self.answers:
                if isinstance(result := answers.popleft(), Exception):
                    raise RolloutFailed(f"Worker failed with error '{result}'")  # the answers of the others stay
                results.append(result)
            return results

    async def use_loaded(self, label: str) -> None:
        self.label = label

    def _call(self, rank: int, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            self.answers[rank].append(getattr(self.workers[rank], method)(**arguments))
        except Exception as error:  # noqa: BLE001  as vLLM's worker does
            self.answers[rank].append(error)


def info_of(workers: Workers) -> ServerInfo:
    return replace(INFO, num_workers=workers.count)


def update_of(tensors: Mapping[str, torch.Tensor], buckets: Iterator[Bucket] | None = None) -> WeightUpdate:
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    return WeightUpdate(1, shapes, buckets or in_buckets(tensors.items(), max_bytes=2**12))


def sent(stream: Any, workers: Workers, *updates: WeightUpdate) -> None:
    async def send() -> None:
        try:
            for number, update in enumerate(updates):
                await stream.load(workers, info_of(workers), update, str(number), flush=True)
        finally:
            await stream.end()

    asyncio.run(send())


def tensors_of(sizes: Sequence[Sequence[int]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{number}": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


def assert_received(workers: Workers, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    for received in workers.received:
        assert received.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(received[name], tensor.to(dtype)), name


SIZES = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    num_workers=st.integers(1, 4),
    slot_bytes=st.sampled_from([64, 256, 4096, 2**20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_worker_receives_every_tensor_whatever_the_sizes(sizes, num_workers, slot_bytes, dtype):
    tensors = tensors_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_SLOT_BYTES", slot_bytes)
        stream, workers = SlotStream(dtype, limit_s=LIMIT_S), Workers(num_workers)
        sent(stream, workers, update_of(tensors_of(sizes, seed=1)), update_of(tensors))
    assert_received(workers, tensors, dtype)
    assert stream.checksum == checksum(tensors.items(), dtype)
    assert workers.label == "1"


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_checksum_of_the_workers_is_the_learners(sizes, dtype):
    tensors = [(name, tensor.to(dtype)) for name, tensor in tensors_of(sizes).items()]
    sums = ReceivedSums()
    for name, tensor in reversed(tensors):
        sums.add(name, tensor)
    assert sums.text() == checksum(tensors)


def test_the_checksum_of_a_tensor_of_several_chunks_is_the_learners():
    large = torch.randn(5 * 2**20 + 3)
    sums = ReceivedSums()
    sums.add("large", large)
    assert sums.text() == checksum([("large", large)])


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SLOT_BYTES", 256)


def test_slow_workers_are_waited_for(small_slots):
    tensors = tensors_of([[40]] * 12)
    workers = Workers(3, seconds_per_tensor=0.01)
    sent(SlotStream(torch.float32), workers, update_of(tensors))
    assert_received(workers, tensors, torch.float32)


def test_workers_receive_whole_tensors_over_a_group():
    tensors = tensors_of([[40, 3], [], [0], [7]])
    stream, workers = GroupStream("gloo", torch.bfloat16), Workers(2)
    sent(stream, workers, update_of(tensors_of([[40, 3], [], [0], [7]], seed=1)), update_of(tensors))
    assert_received(workers, tensors, torch.bfloat16)
    assert stream.checksum == checksum(tensors.items(), torch.bfloat16)
    assert workers.label == "1"


@pytest.mark.parametrize(
    "make", [lambda: SlotStream(torch.float32, limit_s=4.0), lambda: GroupStream("gloo", torch.float32)]
)
def test_workers_wait_longer_than_a_router_waits_for_another_server(small_slots, monkeypatch, make):
    assert 2 * RouterOptions().update_bucket_limit_s < weights.ARRIVE_LIMIT_S
    for module in (weights, group):
        monkeypatch.setattr(module, "LIMIT_S", 4.0)  # for joining a group
    tensors = tensors_of([[40]] * 8)

    def held_up() -> Iterator[Bucket]:
        yield list(tensors.items())[:4]
        time.sleep(6.0)
        yield list(tensors.items())[4:]

    workers = Workers(2)
    sent(make(), workers, update_of(tensors, held_up()))
    assert_received(workers, tensors, torch.float32)


@pytest.mark.parametrize("make", [lambda: SlotStream(torch.float32), lambda: GroupStream("gloo", torch.float32)])
def test_a_stream_with_a_wrong_tensor_ends_on_both_sides(small_slots, make):
    tensors = tensors_of([[40]] * 8)
    good = list(tensors.items())
    for wrong, message in (
        ([*good[:-1], ("layer.7", torch.full((40,), torch.nan))], "layer.7 holds values that are NaN"),
        ([*good[:-1], ("layer.7", torch.zeros(41))], "layer.7 of shape .* was not announced"),
        ([*good[:-1], ("other", torch.zeros(40))], "other of shape .* was not announced"),
        ([*good[:-1], good[0]], "layer.0 of shape .* came twice"),
        (good[:-1], "1 tensors did not arrive"),
    ):
        workers, began = Workers(2), time.monotonic()
        with pytest.raises(WeightsError, match=message):
            sent(make(), workers, update_of(tensors, iter([[each] for each in wrong])))
        assert workers.label == ""
        assert time.monotonic() - began < LIMIT_S, "no worker waits for its limit"


def test_the_next_update_succeeds_after_one_that_failed(small_slots):
    tensors = tensors_of([[40]] * 8)

    def broken() -> Iterator[Bucket]:
        yield list(tensors.items())[:5]
        raise WeightsError("the learner has failed")

    stream, workers = SlotStream(torch.float32), Workers(2)

    async def send() -> None:
        with pytest.raises(WeightsError, match="the learner has failed"):
            await stream.load(workers, info_of(workers), update_of(tensors, broken()), "1", flush=True)
        await stream.load(workers, info_of(workers), update_of(tensors), "2", flush=True)
        await stream.end()

    asyncio.run(send())
    assert_received(workers, tensors, torch.float32)


def test_a_worker_that_cannot_load_ends_the_update_for_all(small_slots):
    def load(rank: int, tensors: Iterator[Any]) -> None:
        if rank == 1:
            next(tensors)
            raise RuntimeError("vLLM cannot load a layer")

    workers, began = Workers(3, load=load), time.monotonic()
    with pytest.raises(RolloutFailed, match="worker 1: RuntimeError: vLLM cannot load a layer"):
        sent(SlotStream(torch.float32), workers, update_of(tensors_of([[40]] * 12)))
    assert time.monotonic() - began < LIMIT_S


def test_a_worker_without_the_slots_ends_the_update_at_once(small_slots, monkeypatch):
    opened = headwater_vllm_weights.LentMemory

    def open_or_fail(name: str, size: int, *, device: Any = None) -> Any:
        if device is not None and threading.current_thread() is not first.setdefault(
            "thread", threading.current_thread()
        ):
            raise headwater_vllm_weights.ArrivalError("this worker has another /dev/shm")
        return opened(name, size, device=device)

    first: dict[str, Any] = {}
    monkeypatch.setattr(headwater_vllm_weights, "LentMemory", open_or_fail)
    workers, began = Workers(2), time.monotonic()
    with pytest.raises(RolloutFailed, match=r"worker \d: this worker has another /dev/shm"):
        sent(SlotStream(torch.float32, limit_s=LIMIT_S), workers, update_of(tensors_of([[40]] * 12)))
    assert time.monotonic() - began < LIMIT_S / 2


def test_calls_after_one_that_failed_get_their_own_answers():
    """vLLM's executor leaves the answers of later workers unread if one raises, and the next call would get them."""
    failing = [0, 1]

    def load(rank: int, tensors: Iterator[Any]) -> None:
        if rank in failing:
            raise RuntimeError("the disk is full")

    workers = Workers(2, load=load)

    async def call() -> None:
        for method, arguments in (
            ("headwater_reload", {"folder": "x"}),
            ("headwater_join_group", {"address": "127.0.0.1", "port": 1, "name": "g", "size": 3, "limit_s": 0.1}),
            ("headwater_load_adapters", {"folder": "x"}),  # vLLM is not installed here
        ):
            with pytest.raises(RolloutFailed, match=rf"{method}: worker 0: .*; worker 1: .*"):
                await workers.call_workers(method, **arguments)
        failing.remove(0)
        with pytest.raises(RolloutFailed, match="headwater_reload: worker 1: RuntimeError: the disk is full"):
            await workers.call_workers("headwater_reload", folder="x")
        failing.clear()
        await workers.call_workers("headwater_reload", folder="x")

    asyncio.run(call())


def test_an_answer_to_another_call_is_an_error():
    workers = Workers(2)
    workers.answers[1].append({"checksum": "float32-old", "call": "old"})
    with pytest.raises(RolloutFailed, match="worker 1: its answer belongs to another call"):
        asyncio.run(workers.call_workers("headwater_reload", folder="x"))


def test_different_weights_of_two_workers_are_an_error():
    class Damaging(Workers):
        async def ask_workers(self, method: str, arguments: Mapping[str, Any], **options: Any) -> Sequence[Any]:
            first, *others = await super().ask_workers(method, arguments)
            return [{**first, "checksum": "float32-other"}, *others]

    with pytest.raises(RolloutFailed, match="different weights"):
        sent(SlotStream(torch.float32), Damaging(2), update_of(tensors_of([[4]])))


def test_a_worker_that_hangs_is_named_after_the_limit(small_slots):
    release = threading.Event()

    def load(rank: int, tensors: Iterator[Any]) -> None:
        if rank == 1:
            release.wait(LIMIT_S)

    stream = SlotStream(torch.float32, limit_s=0.5)
    workers = Workers(2, load=load)

    async def send() -> None:
        with pytest.raises(WaitTimeout, match="worker 1 of vLLM copies slot 0"):
            await stream.load(workers, info_of(workers), update_of(tensors_of([[40]] * 12)), "1", flush=True)
        release.set()
        await stream.end()

    asyncio.run(send())


def test_a_server_that_ends_during_an_update_is_lost(small_slots):
    class Ending(Workers):
        async def ask_workers(self, method: str, arguments: Mapping[str, Any], **options: Any) -> Sequence[Any]:
            raise LinkLost("the connection broke")

    with pytest.raises(LinkLost, match="the connection broke"):
        sent(SlotStream(torch.float32), Ending(1), update_of(tensors_of([[40]] * 12)))


def test_an_engine_that_is_closed_does_not_wait_for_its_update(small_slots):
    begun = threading.Event()

    def load(rank: int, tensors: Iterator[Any]) -> None:
        begun.set()
        time.sleep(0.2)

    async def close_while_it_sends() -> None:
        stream, workers = SlotStream(torch.float32), Workers(1, seconds_per_tensor=0.05, load=load)
        work = stream.load(workers, info_of(workers), update_of(tensors_of([[40]] * 100)), "1", flush=True)
        sending = asyncio.create_task(work)
        await asyncio.to_thread(begun.wait, LIMIT_S)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await stream.end()

    asyncio.run(close_while_it_sends())


def test_an_update_begins_when_the_sender_of_the_one_before_has_ended(small_slots):
    tensors, begun, released = tensors_of([[40]] * 8), threading.Event(), threading.Event()

    def held_up() -> Iterator[Bucket]:
        yield list(tensors.items())[:4]
        begun.set()
        released.wait(LIMIT_S)
        yield list(tensors.items())[4:]

    async def run() -> None:
        stream, workers = SlotStream(torch.float32, limit_s=0.5), Workers(1)
        first = asyncio.create_task(
            stream.load(workers, info_of(workers), update_of(tensors, held_up()), "1", flush=True)
        )
        await asyncio.to_thread(begun.wait, LIMIT_S)
        first.cancel()
        await asyncio.wait({first})
        with pytest.raises(RolloutFailed, match="the update before has not ended"):
            await stream.load(workers, info_of(workers), update_of(tensors), "2", flush=True)
        released.set()
        await stream.load(workers, info_of(workers), update_of(tensors), "3", flush=True)
        assert workers.label == "3"
        await stream.end()

    asyncio.run(run())


def readers(handover: Handover, slots: shared_memory.SlotSender, limit_s: float) -> SlotReader:
    names = ["a", "b", "c"]
    return SlotReader(
        0, CPU, names=names, shapes=[[4]] * 3, dtype="float32", handover=handover.name, slots=slots.name,
        slot_bytes=slots.slot_bytes, num_workers=1, limit_s=limit_s,
    )  # fmt: skip


def test_a_reader_says_why_no_more_weights_come():
    slots = shared_memory.SlotSender(dict.fromkeys("abc", (4,)), torch.float32)
    for end, message in (
        (Handover.abandon, "given up"),
        (Handover.end, "3 of 3 tensors did not arrive"),
        (lambda _: None, "no weights came within 0.2 s"),
    ):
        handover = Handover(["a", "b", "c"], 1, LIMIT_S)
        reader = readers(handover, slots, 0.2)
        end(handover)
        assert list(reader.tensors()) == []
        assert message in reader.failure
        handover.close()
    slots.close()
    gone = {"names": ["a"], "shapes": [[4]], "dtype": "float32", "handover": "nowhere", "slots": "nowhere"}
    with pytest.raises(ArrivalError, match=r"cannot be opened.*rollout\.weight_transfer=file or collective"):
        SlotReader(0, CPU, **gone, slot_bytes=64, num_workers=1, limit_s=1.0)


SENDER = """
import sys, time
import torch
from headwater.backends.vllm.weights import Handover
from headwater.weights.shared_memory import SlotSender

slots = SlotSender({name: (4,) for name in "abc"}, torch.float32)
handover = Handover(["a", "b", "c"], 1, 60.0)
[(slot, entries)] = slots.fill([[("a", torch.ones(4))]], lambda slot: None)
handover.put(slot, entries)
print(handover.name, slots.name, slots.slot_bytes, flush=True)
time.sleep(600)
"""


def test_a_sender_that_is_killed_is_noticed_at_once():
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    handover, slots, slot_bytes = sender.stdout.readline().split()
    reader = SlotReader(
        0, CPU, names=["a", "b", "c"], shapes=[[4]] * 3, dtype="float32", handover=handover, slots=slots,
        slot_bytes=int(slot_bytes), num_workers=1, limit_s=600.0,
    )  # fmt: skip
    arriving = reader.tensors()
    assert next(arriving)[0] == "a"
    os.kill(sender.pid, signal.SIGKILL)
    sender.wait(LIMIT_S)
    assert list(arriving) == []
    assert reader.failure == "the process that sends the weights has ended"


def test_nothing_is_left_in_shared_memory(small_slots):
    before = set(Path("/dev/shm").iterdir())
    sent(SlotStream(torch.float32), Workers(2), update_of(tensors_of([[40]] * 12)))
    assert set(Path("/dev/shm").iterdir()) <= before | {Path("/dev/shm/sem.mp")}


def test_workers_do_not_keep_the_slots_of_a_run_that_has_ended(small_slots):
    """Memory that has no name any more still takes space in /dev/shm while a process has it mapped."""
    workers = Workers(2)
    sent(SlotStream(torch.float32), workers, update_of(tensors_of([[40]] * 12)))
    assert workers.received[0]
    assert [worker._headwater_memory for worker in workers.workers] == [None, None]


# What a server can do


def config_of(*more: str) -> Any:
    return load_config("quickstart", ["rollout.backend=vllm", *more]).config


NEAR, FAR = "rollout.servers=[http://127.0.0.1:8000]", "rollout.servers=[http://10.9.8.7:8000]"
STREAMS = ServerInfo(**{**vars(INFO), "receives_weights": True, "has_own_worker": True})


def kind_of(*more: str, info: ServerInfo) -> str:
    stream = make_stream(config_of(*more), info, torch.float32)
    return type(stream).__name__ if stream is not None else "file"


def test_slots_that_do_not_fit_into_shared_memory_are_noticed_before_the_run(monkeypatch):
    shapes, found = {"embedding": (2**20, 16)}, SimpleNamespace(f_bavail=2**15, f_blocks=2**15, f_frsize=2**12)
    monkeypatch.setattr(weights.os, "statvfs", lambda _: found)  # 128 MiB: two slots of one tensor of 64 MiB
    assert room_problem(shapes, torch.float32, 1) == ""
    assert "128 MiB of /dev/shm for each of 2 servers" in room_problem(shapes, torch.float32, 2)
    assert room_problem(shapes, torch.bfloat16, 1) == ""
    found.f_bavail = 2**14
    assert "64 of 128 MiB are free" in room_problem(shapes, torch.float32, 1)
    assert make_stream(config_of(NEAR), STREAMS, torch.float32, has_room=False) is None
    asked = config_of(NEAR, "rollout.weight_transfer=shared_memory")
    assert isinstance(make_stream(asked, STREAMS, torch.float32, has_room=False), SlotStream)


def test_auto_takes_what_the_server_can_do():
    for more, own, plain in (
        ((NEAR,), "SlotStream", "file"),
        ((), "SlotStream", "file"),
        (("rollout.weight_transfer=file",), "file", "file"),
        ((FAR, "rollout.weight_folder=/nfs"), "file", "file"),
        ((NEAR, "rollout.weight_transfer=collective"), "GroupStream", None),
        ((FAR,), "GroupStream", None),
        ((NEAR, "rollout.weight_transfer=shared_memory"), "SlotStream", None),
    ):
        assert kind_of(*more, info=STREAMS) == own, more
        check_transfer(config_of(*more), STREAMS, "the server", "options")
        if plain is not None:
            assert kind_of(*more, info=INFO) == plain, more
            check_transfer(config_of(*more), INFO, "the server", "options")
            continue
        with pytest.raises(ConfigError, match=r"weight_transfer = \w+: the server was started without options"):
            check_transfer(config_of(*more), INFO, "the server", "options")
