"""The two ends of ``collective``: a rank of the learner sends its pieces of every tensor, an engine puts them together.

    sender = PieceSender(rank=0)                                # in every rank of the learner
    sender.connect(order)
    report = sender.send(order, parcels, pieces)                # pieces: this rank's part of each parcel

    member = GroupMember.join(...)                              # in the engine's process
    receiver = PieceReceiver(member, parcels, torch.bfloat16)
    engine.update_weights(receiver.update(version))             # on the engine's thread

Both ends cut the list of parcels into the same buckets. A sender fills one buffer while the one before is sent, and a
receiver's thread receives one bucket while the engine copies the one before, so neither end holds the whole model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.core.errors import WeightsError
from headwater.core.parcels import Encoding, Parcel, SendOrder, SendReport
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.core.waits import wait_until
from headwater.models.checksum import Checksum
from headwater.models.device import resolve_dtype
from headwater.weights.delta import DeltaReader, DeltaWriter
from headwater.weights.links import Link, Meeting, Pending, files_of, make_room

_NUM_BUFFERS = 2
_NEXT_LIMIT_S = 90.0
"""How long an engine waits for the next bucket. Longer than the limit of the operation, whose error says more."""


def cut(parcels: Iterable[Parcel], itemsize: int, max_bytes: int) -> list[list[Parcel]]:
    """Buckets of at most ``max_bytes``, or one larger tensor alone, in the order of ``parcels``."""
    buckets: list[list[Parcel]] = []
    room = 0
    for parcel in parcels:
        num_bytes = parcel.starts[-1] * itemsize
        if not buckets or num_bytes > room:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(parcel)
        room -= num_bytes
    return buckets


class PieceSender:
    """One rank's end. Its group stays connected from one update to the next."""

    def __init__(self, rank: int, gpu: str = "") -> None:
        """``gpu`` is the one that the rank trains on, for NCCL."""
        self._rank = rank
        self._gpu = gpu
        self._link: Link | None = None
        self._group = ""
        self._delta = DeltaWriter()

    def connect(self, order: SendOrder) -> SendReport:
        """Join the order's group and leave the one before."""
        self.close()
        try:
            self._link = Link.connect(_meeting(order, self._rank), 0, 1 + order.num_receivers, self._gpu)
        except WeightsError as error:
            return SendReport(failure=str(error))
        self._group = order.group
        return SendReport()

    def send(self, order: SendOrder, parcels: Sequence[Parcel], pieces: Iterable[Tensor]) -> SendReport:
        """Send this rank's part of every parcel. ``pieces`` has one for each, in the same order.

        ``pieces`` is read to its end even if sending fails, because making a piece may need the other ranks.
        """
        started = time.perf_counter()
        dtype = resolve_dtype(order.dtype)
        serving, trained = Checksum(dtype), Checksum()
        failure = "" if self._group == order.group else f"rank {self._rank} is not a member of {order.group}"
        remaining = iter(pieces)
        filling = _Filling(dtype, order.backend)
        num_bytes = 0
        sending: list[list[Pending]] = [[] for _ in range(_NUM_BUFFERS)]
        for number, bucket in enumerate(cut(parcels, dtype.itemsize, order.bucket_bytes)):
            slot = number % _NUM_BUFFERS
            failure = failure or _wait_for(sending[slot])
            own = [(parcel, piece) for parcel, piece in zip(bucket, remaining, strict=False)]
            own = [(parcel, piece) for parcel, piece in own if parcel.size(self._rank)]
            for parcel, piece in own:
                start = parcel.starts[self._rank]
                trained.add_part(parcel.name, parcel.shape, start, piece)
                if piece.dtype != dtype:
                    serving.add_part(parcel.name, parcel.shape, start, piece)
            if failure or not own:
                continue
            data = filling.fill(slot, [piece for _, piece in own])
            try:
                sending[slot] = self._post(data, number, order.encoding, dtype.itemsize)
            except WeightsError as error:
                failure = str(error)
                continue
            num_bytes += data.nbytes if order.encoding == "plain" else self._delta.num_bytes
        for _ in remaining:
            pass
        for works in sending:
            failure = failure or _wait_for(works)
        if failure:
            self.close()
        all_trained = trained.sums()
        same = {header: chunks for header, chunks in all_trained.items() if f" {order.dtype} (" in header}
        seconds = time.perf_counter() - started
        return SendReport(num_bytes, seconds, {**same, **serving.sums()}, all_trained, failure)

    def _post(self, data: Tensor, number: int, encoding: Encoding, itemsize: int) -> list[Pending]:
        assert self._link is not None, "a member of a group has a link"
        if encoding == "plain":
            return [self._link.broadcast(data)]
        message = self._delta.encode(number, data, itemsize).to(data.device)  # NCCL sends only from a GPU
        size = torch.tensor([len(message)], device=data.device)
        return [_Held(self._link.broadcast(size), size), _Held(self._link.broadcast(message), message)]

    def close(self) -> None:
        """Leave the group. Closing twice is allowed."""
        link, self._link, self._group = self._link, None, ""
        self._delta = DeltaWriter()
        if link is not None:
            link.close()


def _meeting(order: SendOrder, rank: int) -> Meeting:
    """Where the engines meet a rank."""
    name = f"{order.group}/{rank}"
    return Meeting(order.host, order.port, name, order.backend, order.limit_s, extra_connect_s=order.extra_connect_s)


@dataclass(frozen=True)
class _Held:
    """Keeps a tensor alive until it was sent."""

    pending: Pending
    tensor: Tensor

    def wait(self) -> None:
        self.pending.wait()


def _wait_for(works: list[Pending]) -> str:
    """Wait for the operations of one bucket; why they failed, or an empty text."""
    try:
        for work in works:
            work.wait()
    except WeightsError as error:
        return str(error)
    finally:
        works.clear()
    return ""


class _Filling:
    """The buffers of a sender: in main memory, or on its GPU for NCCL."""

    def __init__(self, dtype: torch.dtype, backend: str) -> None:
        self._dtype = dtype
        self._backend = backend
        self._buffers: list[Tensor | None] = [None] * _NUM_BUFFERS

    @torch.no_grad()
    def fill(self, slot: int, pieces: Sequence[Tensor]) -> Tensor:
        """The pieces one after the other, converted, as bytes."""
        count = sum(each.numel() for each in pieces)
        buffer = self._buffers[slot]
        if buffer is None or len(buffer) < count:
            device = pieces[0].device if self._backend == "nccl" else torch.device("cpu")
            is_pinned = device.type == "cpu" and pieces[0].device.type == "cuda"
            buffer = torch.empty(count, dtype=self._dtype, device=device, pin_memory=is_pinned)
            self._buffers[slot] = buffer
        end = 0
        for piece in pieces:
            # Convert on the device of the piece: a copy to another device would convert on the CPU.
            source = piece.reshape(-1).to(self._dtype) if piece.device.type == "cuda" else piece.reshape(-1)
            buffer[end : end + len(source)].copy_(source, non_blocking=True)
            end += len(source)
        if pieces[0].device.type == "cuda":
            torch.cuda.current_stream(pieces[0].device).synchronize()
        return buffer[:count].view(torch.uint8)


@dataclass
class GroupMember:
    """An engine's links to all ranks of a learner."""

    group: str
    links: list[Link]
    delta: DeltaReader

    @classmethod
    def join(cls, order: SendOrder, number: int, num_senders: int, gpu: str = "") -> GroupMember:
        """Become receiver ``number``, from 1, of every rank of the learner. ``gpu`` is the engine's, for NCCL."""

        make_room(files_of(num_senders, 1 + order.num_receivers), f"an engine that {num_senders} ranks send to")
        deadline = time.monotonic() + order.connect_limit_s

        def connect(rank: int) -> Link:
            return Link.connect(_meeting(order, rank), number, 1 + order.num_receivers, gpu, deadline)

        # At the same time, because every rank waits for this engine with the same limit. But NCCL may wait forever if
        # the members connect several groups in different orders, since some of its calls wait for the whole GPU. The
        # order's ``extra_connect_s`` is for the groups that follow each other.
        at_once = 1 if order.backend == "nccl" else num_senders
        with ThreadPoolExecutor(at_once, thread_name_prefix="headwater-weights-join") as threads:
            joining = [threads.submit(connect, rank) for rank in range(num_senders)]
            wait(joining, return_when=FIRST_EXCEPTION)
            threads.shutdown(cancel_futures=True)
        ended = [each for each in joining if not each.cancelled()]
        if error := next((each.exception() for each in ended if each.exception()), None):
            for each in ended:
                if not each.exception():
                    each.result().close()
            raise error
        return cls(order.group, [each.result() for each in joining], DeltaReader())

    def close(self) -> None:
        for link in self.links:
            link.close()


class PieceReceiver:
    """The engine's end of one update. ``buckets`` runs on the engine's thread."""

    def __init__(self, member: GroupMember, parcels: Sequence[Parcel], order: SendOrder) -> None:
        if any(len(parcel.starts) != 1 + len(member.links) for parcel in parcels):
            raise WeightsError(f"weights: the update is not from the {len(member.links)} ranks of {member.group}")
        self._member = member
        self._parcels = parcels
        self._order = order
        self._dtype = resolve_dtype(order.dtype)
        self._changed = threading.Condition()
        self._arrived: deque[Bucket] = deque()
        self._num_held = 0
        """Buckets that have arrived or are being received, and that the engine has not copied yet."""
        self._is_finished = False
        self._failure: WeightsError | None = None
        self.is_ready: Future[None] = Future()
        """Done when the engine has stopped generating and waits for weights, or when the update has failed before."""

    def update(self, version: int) -> WeightUpdate:
        """What arrives, for an engine."""
        return WeightUpdate(version, {each.name: each.shape for each in self._parcels}, self.buckets())

    def fail(self, reason: str) -> None:
        """The stream ends here: the sender failed, or another update begins. The engine leaves the group."""
        with self._changed:
            if self._is_finished:
                return
            self._failure = self._failure or WeightsError(reason)
            if not self.is_ready.done():  # the engine may only look after minutes, when its responses have ended
                self.is_ready.set_exception(self._failure)
            self._changed.notify_all()
        self._member.close()

    def finish(self) -> None:
        """Everything was sent. The number of buckets is known, so there is nothing to do."""

    def buckets(self) -> Iterator[Bucket]:
        """The weights, bucket by bucket. The first request starts receiving."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self.is_ready.set_result(None)
        # The engine's GPU is the current one of this thread only.
        on_gpu = self._order.backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        receiving = threading.Thread(target=self._receive, args=[device], name="headwater-weights-receive", daemon=True)
        receiving.start()
        buckets = cut(self._parcels, self._dtype.itemsize, self._order.bucket_bytes)
        try:
            for _ in buckets:
                yield self._next()
                if on_gpu:  # the engine copies on a separate stream, and the buffer is received into again
                    torch.cuda.current_stream(device).synchronize()
                with self._changed:
                    self._num_held -= 1
                    self._changed.notify_all()
            self._is_finished = True
        finally:
            self.fail("the update has ended")

    def _next(self) -> Bucket:
        def arrived() -> Bucket | None:
            if self._failure is not None:
                raise self._failure
            return self._arrived.popleft() if self._arrived else None

        what = "the engine waits for the next weights of an update, whose sender may have ended"
        with self._changed:
            bucket = wait_until(self._changed, arrived, lambda: what, kind="weights", hard_limit_s=_NEXT_LIMIT_S)
            assert bucket is not None, "otherwise it waits"
            return bucket

    def _receive(self, device: torch.device) -> None:
        """Receive bucket after bucket, at most one ahead of the engine."""
        assembling = _Assembling(self._member, self._dtype, self._order.encoding, device)
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            for number, parcels in enumerate(cut(self._parcels, self._dtype.itemsize, self._order.bucket_bytes)):
                self._until_free()
                bucket = assembling.receive(number, parcels)
                if device.type == "cuda":  # the engine reads on another stream
                    torch.cuda.current_stream(device).synchronize()
                with self._changed:
                    self._arrived.append(bucket)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  the engine's thread raises it
            self.fail(str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}")

    def _until_free(self) -> None:
        def is_free() -> bool:
            if self._failure is not None:
                raise self._failure
            return self._num_held < _NUM_BUFFERS

        what = "received weights wait until the engine has copied those before"
        with self._changed:
            wait_until(self._changed, is_free, lambda: what, kind="weights", hard_limit_s=_NEXT_LIMIT_S)
            self._num_held += 1


class _Assembling:
    """Receives the messages of all ranks for a bucket, and views or puts together its tensors."""

    def __init__(self, member: GroupMember, dtype: torch.dtype, encoding: Encoding, device: torch.device) -> None:
        """Weights arrive on ``device``: in main memory, or on the engine's GPU for NCCL."""
        self._member = member
        self._device = device
        self._dtype = dtype
        self._encoding = encoding
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def receive(self, number: int, bucket: Sequence[Parcel]) -> Bucket:
        counts = [sum(parcel.size(rank) for parcel in bucket) for rank in range(len(self._member.links))]
        slot = number % _NUM_BUFFERS
        received = [self._buffer(rank, slot, count) for rank, count in enumerate(counts)]
        if self._encoding == "plain":
            works = [
                link.broadcast(each.view(torch.uint8))
                for link, each in zip(self._member.links, received, strict=True)
                if len(each)
            ]
            for work in works:
                work.wait()
        else:
            for rank, each in enumerate(received):
                if len(each):
                    self._receive_delta(number, rank, each)
        return [(parcel.name, tensor) for parcel, tensor in self._tensors(bucket, received)]

    def _receive_delta(self, number: int, rank: int, into: Tensor) -> None:
        link = self._member.links[rank]
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        link.broadcast(size).wait()
        message = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        link.broadcast(message).wait()
        self._member.delta.decode((rank, number), message.cpu(), into.view(torch.uint8), into.itemsize)

    def _tensors(self, bucket: Sequence[Parcel], received: Sequence[Tensor]) -> Iterator[tuple[Parcel, Tensor]]:
        ends = [0] * len(received)
        for parcel in bucket:
            parts = []
            for rank, buffer in enumerate(received):
                if size := parcel.size(rank):
                    parts.append(buffer[ends[rank] : ends[rank] + size])
                    ends[rank] += size
            whole = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else received[0][:0]
            yield parcel, whole.view(parcel.shape)

    def _buffer(self, rank: int, slot: int, count: int) -> Tensor:
        buffer = self._buffers.get((rank, slot))
        if buffer is None or len(buffer) < count:
            buffer = torch.empty(count, dtype=self._dtype, device=self._device)
            self._buffers[rank, slot] = buffer
        return buffer[:count]
