"""Weights from several ranks to several engines, over real process groups between threads."""

from __future__ import annotations

import os
import resource
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import long_enough
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from headwater.core.errors import WeightsError
from headwater.core.parcels import Parcel, SendOrder
from headwater.models.checksum import Checksum, checksum
from headwater.weights import links, pieces
from headwater.weights.collective import extra_connect_s
from headwater.weights.delta import DeltaReader, DeltaWriter
from headwater.weights.links import Link, Meeting, files_of, host_store, make_room, own_address
from headwater.weights.memory import Receiver
from headwater.weights.pieces import GroupMember, PieceReceiver, PieceSender, cut

LIMIT_S = 240.0


def unique(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex}"


def order(name: str, **settings: Any) -> SendOrder:
    """The group has a unique name, so that a second attempt of a test does not meet members of the first."""
    port = host_store("127.0.0.1").port
    values = {"num_receivers": 2, "dtype": "float32", "bucket_bytes": 2**14, "limit_s": 120.0, **settings}
    return SendOrder(unique(name), "127.0.0.1", port, **values)


def halves(model: Any) -> list[Parcel]:
    """Every tensor split between two ranks, as far as parts may begin there."""
    split = {name: each.numel() // 2 // 4 * 4 for name, each in model.named_parameters()}
    return [Parcel(name, tuple(each.shape), (0, split[name], each.numel())) for name, each in model.named_parameters()]


def own_parts(model: Any, parcels: list[Parcel], rank: int) -> list[torch.Tensor]:
    flat = [each.detach().reshape(-1) for each in model.parameters()]
    return [each[parcel.starts[rank] : parcel.starts[rank + 1]] for each, parcel in zip(flat, parcels, strict=True)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result(LIMIT_S) for each in [threads.submit(call) for call in calls]]


def joined(using: SendOrder) -> tuple[list[PieceSender], list[GroupMember]]:
    senders = [PieceSender(rank) for rank in range(2)]
    results = together(
        *(lambda each=each: each.connect(using) for each in senders),
        *(lambda number=number: GroupMember.join(using, number, 2) for number in (1, 2)),
    )
    assert [each.failure for each in results[:2]] == ["", ""]
    return senders, results[2:]


def take(member: GroupMember, model: Any, parcels: list[Parcel], using: SendOrder) -> None:
    update = PieceReceiver(member, parcels, using).update(1)
    Receiver(model, update.shapes).take_all(update)


def close(*ends: PieceSender | GroupMember) -> None:
    for each in ends:
        each.close()


PLAIN_BFLOAT16 = pytest.param("bfloat16", "plain", marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "encoding"), [("float32", "plain"), PLAIN_BFLOAT16, ("bfloat16", "delta")])
def test_every_bit_arrives_at_every_engine_and_the_sums_of_the_ranks_are_the_checksums(dtype, encoding):
    using = order(f"bits-{dtype}-{encoding}", dtype=dtype, encoding=encoding)
    (senders, members), sizes = joined(using), []
    for seed in (1, 2, 2):  # the group is used again
        learner, served = tiny.model(seed), [tiny.model(5).to(getattr(torch, dtype)) for _ in members]
        parcels = halves(learner)
        reports = together(
            *(partial(each.send, using, parcels, own_parts(learner, parcels, each._rank)) for each in senders),
            *(partial(take, member, model, parcels, using) for member, model in zip(members, served, strict=True)),
        )[:2]
        wanted = checksum(learner.named_parameters(), getattr(torch, dtype))
        assert [checksum(each.named_parameters()) for each in served] == [wanted] * 2
        assert Checksum.merged(each.serving for each in reports).text() == wanted
        assert Checksum.merged(each.trained for each in reports).text() == checksum(learner.named_parameters())
        assert not any(each.failure for each in reports)
        sizes.append(sum(each.num_bytes for each in reports))
    whole = sum(each.numel() for each in learner.parameters()) * getattr(torch, dtype).itemsize
    assert len(cut(parcels, getattr(torch, dtype).itemsize, using.bucket_bytes)) > 10
    if encoding == "plain":
        assert sizes == [whole] * 3
    else:
        assert sizes[2] < whole / 500, "nothing has changed"
    close(*senders, *members)


def test_a_receiver_that_leaves_in_the_middle_does_not_hold_up_the_ranks_or_the_other_engines():
    def check(limit_s: float) -> None:
        # All members must have joined by then, and every bucket must have arrived.
        using = order(f"leaves-{limit_s:g}", limit_s=limit_s)
        senders, members = joined(using)
        learner, served = tiny.model(1), [tiny.model(5) for _ in members]
        parcels = halves(learner)
        num_read, outcomes = [0], {}

        def leaving() -> None:
            receiver = PieceReceiver(members[0], parcels, using)
            for _ in receiver.buckets():
                num_read[0] += 1
                if num_read[0] == 3:
                    receiver.fail("the engine ends")
                    return

        def staying() -> None:
            with pytest.raises(WeightsError) as caught:
                take(members[1], served[1], parcels, using)
            outcomes["engine"] = str(caught.value)

        read = [0, 0]

        def send(sender: PieceSender) -> Any:
            def counted() -> Any:
                for piece in own_parts(learner, parcels, sender._rank):
                    read[sender._rank] += 1
                    yield piece

            return sender.send(using, parcels, counted())

        reports = together(*(lambda each=each: send(each) for each in senders), leaving, staying)[:2]
        assert any("has ended or does not answer" in each.failure for each in reports)
        assert read == [len(parcels)] * 2, "a rank makes every piece, because the others may wait for it"
        assert "version 1 failed after" in outcomes["engine"] or "does not answer" in outcomes["engine"]
        again = senders[0].send(using, parcels, own_parts(learner, parcels, 0))
        assert "not a member" in again.failure
        assert not again.num_bytes
        close(*senders, *members)

    long_enough(check, 5.0, 60.0)


def test_threads_that_ask_for_a_store_at_the_same_time_get_one():
    """Members that meet in different stores would wait for each other."""
    begin = threading.Barrier(4)

    def ask() -> TCPStore:
        begin.wait(LIMIT_S)
        return host_store("localhost")  # which no other test asks for

    assert len({id(each) for each in together(*[ask] * 4)}) == 1


def test_members_that_do_not_come_are_named_within_the_limit():
    using = order("alone", limit_s=0.5)
    assert "member 0 of 3 could not join alone-" in PieceSender(0).connect(using).failure
    with pytest.raises(WeightsError, match=r"member 1 of 3 could not join alone-.* within 0\.5 s"):
        GroupMember.join(using, 1, 2)


def test_an_operation_that_the_group_refuses_does_not_mean_that_a_member_has_ended():
    link = Link.connect(Meeting("127.0.0.1", host_store("127.0.0.1").port, "refused", limit_s=LIMIT_S), 0, 1)
    with pytest.raises(WeightsError, match=r"cannot be sent or received over the group \(.*unsupported device"):
        link.broadcast(torch.empty(3, device="meta"))
    link.close()


def test_the_line_of_nccl_that_says_what_is_wrong_is_kept():
    place = "NCCL error in: NCCLUtils.cpp:94, {} (run with NCCL_DEBUG=WARN)\nnccl{}: text\nLast error:\n{}\n"
    twice = RuntimeError(place.format("invalid usage", "InvalidUsage", "Duplicate GPU detected : rank 1 and rank 0"))
    assert str(links._failure(twice)) == (
        "weights: the tensor cannot be sent or received over the group (Duplicate GPU detected : rank 1 and rank 0)"
    )
    gone = RuntimeError(
        place.format("remote process exited or there was a network error", "RemoteError", "socket closed")
    )
    assert str(links._failure(gone)) == "weights: a member of the group has ended or does not answer (socket closed)"


def test_an_engine_whose_sender_is_gone_stops_waiting(monkeypatch):
    monkeypatch.setattr(pieces, "_NEXT_LIMIT_S", LIMIT_S)

    def check(limit_s: float) -> None:
        # The member that is closed waits as long as this. All members must have joined by then.
        using = order(f"silent-{limit_s:g}", num_receivers=2, limit_s=limit_s)
        senders, members = joined(using)
        receiver = PieceReceiver(members[0], halves(tiny.model(1)), using)
        failing = threading.Timer(0.2, receiver.fail, ("another weight update began",))
        failing.start()
        with pytest.raises(WeightsError, match="another weight update began"):
            next(receiver.buckets())
        close(*senders, *members)

    long_enough(check, 2.0, 30.0)


def test_an_update_that_fails_before_the_engine_begins_is_told_to_those_that_wait_for_it():
    """With ``drain``, the engine may begin minutes later: the caller that waits for it, and later the engine, fail."""
    using = order("early", num_receivers=2, limit_s=LIMIT_S)
    senders, members = joined(using)
    receiver = PieceReceiver(members[0], halves(tiny.model(1)), using)
    assert not receiver.is_ready.done()
    receiver.fail("another weight update began")
    receiver.fail("the second reason does not count")
    for read in (lambda: receiver.is_ready.result(0), lambda: next(receiver.buckets())):
        with pytest.raises(WeightsError, match="another weight update began"):
            read()
    close(*senders, *members)


def test_a_group_of_torchs_own_kind_can_be_the_other_end():
    """As trainers for SGLang make it: ``PrefixStore`` of the group's name inside a group of that name."""
    port = host_store("127.0.0.1").port
    sent, received, name = torch.arange(6.0), torch.zeros(6), unique("w")
    meeting = Meeting("127.0.0.1", port, name, limit_s=LIMIT_S)

    def other_end() -> None:
        store: Any = TCPStore("127.0.0.1", port, is_master=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LIMIT_S)
        ProcessGroupGloo(store, 0, 2, options).broadcast([sent]).wait()

    def this_end() -> None:
        Link.connect(replace(meeting, connects_first=False), 1, 2).broadcast(received).wait()

    together(other_end, this_end)
    assert torch.equal(sent, received)


@given(st.lists(st.binary(min_size=8, max_size=64), min_size=1, max_size=4), st.sampled_from([2, 4]))
def test_a_difference_decodes_to_every_bit(versions, itemsize):
    writer, reader = DeltaWriter(), DeltaReader()
    for number, data in enumerate(versions):
        new = torch.frombuffer(bytearray(data[: len(data) // 4 * 4]), dtype=torch.uint8)
        into = torch.empty_like(new)
        reader.decode("k", writer.encode("k", new, itemsize), into, itemsize)
        assert torch.equal(into, new), number
    with pytest.raises(WeightsError, match="cannot be decoded"):
        reader.decode("k", torch.zeros(40, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8), itemsize)


@cache
def summed(size: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, str]:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return tensor, checksum([("w", tensor)], dtype)


@given(st.data())
def test_a_checksum_of_parts_is_the_checksum_of_the_whole(data):
    dtype = data.draw(st.sampled_from([None, torch.bfloat16]))
    size = data.draw(st.sampled_from([1, 40, 2**21 + 40]))
    tensor, wanted = summed(size, dtype)
    places = sorted({0, size, *(4 * each for each in data.draw(st.lists(st.integers(0, size // 4), max_size=3)))})
    parts = []
    for start, end in pairwise(places):
        part = Checksum(dtype)
        part.add_part("w", (size,), start, tensor[start:end])
        parts.append(part.sums())
    assert Checksum.merged(parts).text() == wanted


def test_parcels_that_do_not_cover_a_tensor_are_refused():
    for starts in ((0,), (0, 5), (1, 6), (0, 7, 3, 6)):
        with pytest.raises(ValueError, match=r"do not cover it|overlap"):
            Parcel("w", (2, 3), starts)
    member = GroupMember("g", [cast(Link, None)], DeltaReader())
    with pytest.raises(WeightsError, match="not from the 1 ranks"):
        PieceReceiver(member, [Parcel("w", (2,), (0, 1, 2))], order("x"))
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(WeightsError, match="no route"):
        own_address("no-such-host.invalid")


def test_variables_of_nccl_are_changed_only_while_a_group_is_made(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    with links._failures_are_errors():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_members_connect_together_or_say_within_the_limit_who_is_missing():
    port, met, one = host_store("127.0.0.1").port, unique("met"), unique("one")

    def connect(rank: int) -> str:
        link = Link.connect(Meeting("127.0.0.1", port, met, limit_s=LIMIT_S), rank, 2)
        tensor = torch.full((3,), float(rank))
        link.broadcast(tensor).wait()
        link.close()
        return str(tensor.tolist())

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(connect, range(2))) == [str([0.0] * 3)] * 2
    alone = Link.connect(Meeting("127.0.0.1", port, one, limit_s=LIMIT_S), 0, 1)
    store = PrefixStore(one, TCPStore("127.0.0.1", port, is_master=False))
    with pytest.raises(RuntimeError, match="here/1"):
        alone._connect_all(store, 0, 2, time.monotonic() + 0.2)
    with pytest.raises(WeightsError, match="has left the group"):
        alone.broadcast(torch.zeros(1))


def num_connections() -> int:
    """Established TCP connections of this process."""
    own = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{each}"))
    tables = [Path(f"/proc/self/net/{each}").read_text() for each in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows)


def test_members_connect_only_along_the_tree_of_a_broadcast():
    """In a full mesh, the connections of one process would grow with the square of the members."""
    size, meeting = 12, Meeting("127.0.0.1", host_store("127.0.0.1").port, unique("tree"), limit_s=LIMIT_S)
    before = num_connections()
    members = together(*(partial(Link.connect, meeting, rank, size) for rank in range(size)))
    tree, to_store = 2 * (size - 1), 2 * size  # both ends of a connection are in this process
    assert num_connections() - before <= tree + to_store < size * (size - 1)
    tensors = [torch.full((3,), float(rank)) for rank in range(size)]
    for work in [link.broadcast(each) for link, each in zip(members, tensors, strict=True)]:
        work.wait()
    assert num_connections() - before <= tree + to_store
    assert all(torch.equal(each, tensors[0]) for each in tensors)
    for link in members:
        link.close()


def test_a_member_that_leaves_before_it_has_connected_does_not_hold_up_the_others():
    meeting = Meeting("127.0.0.1", host_store("127.0.0.1").port, unique("half"), limit_s=3.0)
    store: Any = TCPStore("127.0.0.1", meeting.port, is_master=False)
    for prefix in (meeting.name, f"{meeting.name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    store.set("here/2", "")  # has met the others, and ends then
    started = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(Link.connect, meeting, rank, 3) for rank in range(2)]
        assert "member 0 of 3 could not join half-" in str(joining[0].exception(LIMIT_S))
        if joining[1].exception(LIMIT_S) is None:
            joining[1].result().close()  # the tree leads past it
    assert time.monotonic() - started < 30


def test_members_of_several_groups_have_more_time_only_if_they_connect_one_after_another():
    assert [extra_connect_s("gloo", each) for each in (1, 64)] == [0, 0]
    extra = [extra_connect_s("nccl", each) for each in (1, 2, 32, 64)]
    assert extra == [0, 5, 155, 315]
    using = order("many", limit_s=60.0, extra_connect_s=extra[2])
    assert using.connect_limit_s == pieces._meeting(using, 0).connect_limit_s == 215
    assert pieces._meeting(using, 0).limit_s == 60, "of one operation"


def test_an_engine_joins_all_groups_within_one_limit(monkeypatch):
    """Every group has its own limit otherwise, and the trainer would give the engine up."""
    deadlines = []

    def connect(meeting: Meeting, number: int, size: int, gpu: str, deadline: float) -> Link:
        deadlines.append(deadline)
        return cast(Link, None)

    monkeypatch.setattr(Link, "connect", connect)
    now = time.monotonic()
    GroupMember.join(order("nccl", backend="nccl", limit_s=60.0, extra_connect_s=10.0), 1, 3)
    assert len(set(deadlines)) == 1
    assert len(deadlines) == 3
    assert 70 <= deadlines[0] - now < 90


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(monkeypatch):
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, to: limits.update(now=to))
    make_room(100, "it")
    assert limits["now"] == (1024, 4096), "enough"
    make_room(2000, "it")
    assert limits["now"] == (4096, 4096)
    with pytest.raises(WeightsError, match=r"the store needs 5,\d\d\d open files, and the system allows 4,096; raise"):
        make_room(5000, "the store")
    limits["now"] = (1024, resource.RLIM_INFINITY)
    make_room(4000, "it")
    assert 4000 < limits["now"][0] < 6000
    assert files_of(32, 97) == 32 * 12
