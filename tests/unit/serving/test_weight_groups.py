"""Weights over process groups: Headwater's calls, and those of trainers for SGLang, against a real engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import tiny
import torch
from aiohttp.test_utils import TestClient, TestServer
from serving.parts import assert_refused
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from headwater.config.schema import EngineConfig
from headwater.core.errors import WeightsError
from headwater.core.parcels import Parcel, SendOrder
from headwater.engine.engine import Engine
from headwater.models.checksum import checksum
from headwater.serving.app import build_app
from headwater.serving.options import ServerOptions
from headwater.serving.sglang.distributed import GROUPS, InitGroup, UpdateFromGroup, _receive
from headwater.serving.weight_group import BroadcastCall, JoinCall
from headwater.weights.links import Link, Meeting, host_store

ORDER = {"group": "g", "host": "127.0.0.1", "port": 5, "num_receivers": 2, "dtype": "bfloat16"}
TENSOR = {"name": "w", "shape": [2, 3], "starts": [0, 4, 6]}
GROUP = {"master_address": "127.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}


def test_bodies():
    order = SendOrder("g", "127.0.0.1", 5, 2, "bfloat16")
    assert JoinCall.read({**ORDER, "number": 2, "num_senders": 4}) == JoinCall(order, 2, 4)
    call = BroadcastCall.read({"version": 3, "mode": "drain", "tensors": [TENSOR], "order": ORDER, "limit_s": 7})
    assert call == BroadcastCall(3, "drain", (Parcel("w", (2, 3), (0, 4, 6)),), order, 7)
    joined = InitGroup.read({**GROUP, "backend": "gloo"})
    assert (joined.meeting.name, joined.rank, joined.world_size) == ("weight_update_group", 1, 2)
    update = UpdateFromGroup.read({**TENSORS, "weight_version": "9", "flush_cache": False})
    assert (update.tensors, update.mode) == ((("w", torch.float32, (2, 3)),), "in_flight")
    assert update.wanted_version == 9
    for read, body, part in (
        (JoinCall.read, {**ORDER, "number": 3}, "number = 3: must be <= 2"),
        (JoinCall.read, {**ORDER}, "number: give"),
        (JoinCall.read, {"group": "g", "number": 1}, "give all of them"),
        (BroadcastCall.read, {"version": 1, "order": ORDER, "tensors": []}, "give all of them"),
        (BroadcastCall.read, {"version": 1, "order": ORDER, "tensors": [7]}, "tensors[0] = 7: must be an object"),
        (BroadcastCall.read, {"version": 1, "order": ORDER, "tensors": [{**TENSOR, "starts": [0, 9]}]}, "do not cover"),
        (InitGroup.read, {**GROUP, "rank_offset": 2}, "must be less than world_size = 2"),
        (InitGroup.read, {"master_port": 5}, "give all of them"),
        (UpdateFromGroup.read, {**TENSORS, "names": ["w", "v"]}, "lists of the same length"),
        (UpdateFromGroup.read, {**TENSORS, "dtypes": ["int8"]}, "dtypes[0]"),
        (UpdateFromGroup.read, {**TENSORS, "load_format": "flattened_bucket"}, "one tensor after the other"),
    ):
        assert_refused(read, [(body, part)])


def trainer(name: str, tensors: list[torch.Tensor]) -> None:
    """Member 0 of a group, as ``init_custom_process_group`` of a trainer makes it; sends one tensor after the other."""
    store: Any = TCPStore("127.0.0.1", host_store("127.0.0.1").port, is_master=False)
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    group = ProcessGroupGloo(store, 0, 2, options)
    for tensor in tensors:
        group.broadcast([tensor]).wait()


@pytest.fixture
def engine():
    made = Engine(tiny.model(0), tiny.tokenizer(), EngineConfig(kv_cache_gib=0.01))
    yield made
    made.close()


Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


def replies_beside_trainer(
    engine: Engine, named: list[tuple[str, torch.Tensor]], run: Callable[[Post, dict[str, Any]], Awaitable[list[Any]]]
) -> list[Any]:
    """What the server answers to the calls of ``run``, which is told how to join the group of a trainer that sends."""
    group = f"group-{uuid.uuid4().hex}"  # a test that is run again must not meet the members of the first time
    joins = {**GROUP, "master_port": host_store("127.0.0.1").port, "backend": "gloo", "group_name": group}

    async def served() -> list[Any]:
        app = build_app(engine, tiny.tokenizer(), ServerOptions("tiny"))
        async with TestClient(TestServer(app)) as client:

            async def post(path: str, values: dict[str, Any]) -> dict[str, Any]:
                async with client.post(path, json=values) as answer:
                    return await answer.json()

            replies = await asyncio.wait_for(run(post, joins), 120)
            joined = [*app[GROUPS].values()]
        for each in joined:
            with pytest.raises(WeightsError, match="has left the group"):
                each.broadcast(torch.zeros(1))
        return replies

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(trainer, group, [each for _, each in named])
        try:
            return asyncio.run(served())
        finally:
            sending.result(120)  # its error says why the server waited


def body(part: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    shapes = [list(each.shape) for _, each in part]
    return {"names": [name for name, _ in part], "dtypes": ["float32"] * len(part), "shapes": shapes}


def test_a_trainer_for_sglang_sends_weights_over_its_own_group(engine):
    learner = tiny.model(1)
    named = [(name, each.detach()) for name, each in learner.named_parameters()]

    async def run(post: Post, joins: dict[str, Any]) -> list[Any]:
        group = {"group_name": joins["group_name"]}
        update = {**body(named), **group}
        await post("/begin_weight_update", {})  # of a trainer that died then
        replies = [await post("/update_weights_from_distributed", update)]
        replies.append(await post("/init_weights_update_group", joins))
        replies.append(await post("/update_weights_from_distributed", {**update, "names": ["w", *update["names"][1:]]}))
        replies.append(await post("/update_weights_from_distributed", {**update, "weight_version": "7"}))
        replies.append(await post("/destroy_weights_update_group", group))
        return [*replies, await post("/destroy_weights_update_group", group)]

    replies = replies_beside_trainer(engine, named, run)
    assert [each["success"] for each in replies] == [False, True, False, True, True, False]
    assert "call /init_weights_update_group first" in replies[0]["message"]
    assert "unknown w" in replies[2]["message"]
    assert engine.weights_checksum() == checksum(learner.named_parameters())
    assert engine.get_version() == 7


def test_a_trainer_for_newer_versions_sends_the_weights_of_an_update_in_several_calls(engine):
    learner, before = tiny.model(1), engine.weights_checksum()
    named = [(name, each.detach()) for name, each in learner.named_parameters()]
    checksums = []

    async def run(post: Post, joins: dict[str, Any]) -> list[Any]:
        replies = [await post("/end_weight_update", {}), await post("/init_weights_update_group", joins)]
        replies += [await post("/begin_weight_update", {}), await post("/begin_weight_update", {"selector": "all"})]
        for part, last in ((named[:2], {}), (named[2:], {"weight_version": "7"})):
            call = {**body(part), "group_name": joins["group_name"], **last}
            replies.append(await post("/update_weights_from_distributed", call))
            checksums.append(engine.weights_checksum())
        return [*replies, await post("/end_weight_update", {})]

    replies = replies_beside_trainer(engine, named, run)
    assert [each["success"] for each in replies] == [False, True, True, False, True, True, True]
    assert checksums == [before, before], "requests never see a part of an update"
    assert (engine.weights_checksum(), engine.get_version()) == (checksum(learner.named_parameters()), 7)


class Received:
    """A group, and the operation that it starts, which is complete."""

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Received:
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


def test_weights_over_nccl_arrive_on_the_gpu_of_the_engine(engine, monkeypatch):
    """A machine without GPUs has no such group, so nothing is sent here."""
    made: list[Link] = []

    def connect(meeting: Meeting, rank: int, size: int, gpu: str) -> Link:
        made.append(Link(None, meeting, gpu))
        return made[-1]

    monkeypatch.setattr(Link, "connect", connect)

    async def join(device: str, backend: str) -> None:
        app = build_app(engine, tiny.tokenizer(), ServerOptions("tiny", device=device))
        body = {**GROUP, "backend": backend}
        async with (
            TestClient(TestServer(app)) as client,
            client.post("/init_weights_update_group", json=body) as answer,
        ):
            assert (await answer.json())["success"]

    for device, backend, expected in (
        ("cuda:1", "nccl", torch.device("cuda:1")),
        ("cpu", "nccl", torch.device("cuda")),
        ("", "nccl", torch.device("cuda")),
        ("cuda:1", "gloo", torch.device("cpu")),
    ):
        asyncio.run(join(device, backend))
        assert made[-1].device == expected
    link = Link(Received(), Meeting("127.0.0.1", 5, "g", "nccl"), "meta")
    assert _receive(UpdateFromGroup.read(TENSORS), link)["w"].device == torch.device("meta")
