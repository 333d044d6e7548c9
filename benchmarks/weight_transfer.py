"""How fast each transport moves the weights of a model to engines in other processes, and how long an engine pauses.

    python benchmarks/weight_transfer.py --shape qwen2.5-0.5b
    python benchmarks/weight_transfer.py --shape qwen2.5-1.5b --dtype bfloat16 --out results/weight_transfer_1.5b.json

Each receiver is a process that holds only the parameters of a model and copies what arrives into them, as an engine
does. ``seconds`` is one update as the sender sees it. ``pause`` is the time in which a receiver takes its weights, when
an engine would not generate; the longest of all receivers. ``GB/s`` is the size of the model over ``seconds``, whatever
the number of receivers. ``memory`` is one process. ``delta`` moves weights of which one in eight has changed its lowest
bit. ``collective`` and ``delta`` include the sender's checksums. The first update, which connects and allocates, is not
counted; every value is a median. On a GPU machine, senders and receivers are on one GPU, and gloo moves the weights
through main memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from options import add_shape, parser_of
from record import write_record
from shapes import build_model, default_device
from torch import nn

from headwater.core.parcels import Parcel, SendOrder
from headwater.core.protocols import WeightUpdate
from headwater.models.checksum import checksum
from headwater.weights.file import FileWeights, file_update
from headwater.weights.links import host_store
from headwater.weights.memory import Receiver, in_buckets
from headwater.weights.pieces import GroupMember, PieceReceiver, PieceSender
from headwater.weights.shared_memory import SlotEntry, SlotReceiver, SlotSender

Shapes = Mapping[str, tuple[int, ...]]


class Parameters(nn.Module):
    """The parameters of a model and nothing else, under their names."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._named = {
            name: nn.Parameter(torch.full(shape, 0.01, dtype=dtype, device=device), requires_grad=False)
            for name, shape in shapes.items()
        }

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())

    @torch.no_grad()
    def change(self) -> None:
        """The next version: one in eight numbers changes its lowest bit."""
        for each in self._named.values():
            bits = each.data.view(torch.int16 if each.dtype.itemsize == 2 else torch.int32).view(-1)
            bits[::8] ^= 1


def parcels_of(shapes: Shapes, num_ranks: int) -> list[Parcel]:
    """Rows split over the ranks, as FSDP does."""
    parcels = []
    for name, shape in shapes.items():
        rows, width = -(-shape[0] // num_ranks), torch.Size(shape[1:]).numel()
        starts = [min(rank * rows, shape[0]) * width for rank in range(num_ranks)]
        parcels.append(Parcel(name, shape, (*starts, shape[0] * width)))
    return parcels


class Engine:
    """A receiver's process: takes weights and tells how long that took."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._model = Parameters(shapes, dtype, device)
        self._dtype = dtype
        self._shapes = shapes
        self._slots: SlotReceiver | None = None
        self._member: GroupMember | None = None
        self._checksum = ""

    def join(self, order: SendOrder, number: int, num_senders: int) -> None:
        self._member = GroupMember.join(order, number, num_senders)

    def take_pieces(self, parcels: Sequence[Parcel], order: SendOrder) -> float:
        assert self._member is not None
        return self._take(PieceReceiver(self._member, parcels, order).update(1))

    def take_file(self, path: str) -> float:
        with file_update(path, 1, self._dtype, is_checked=True) as update:
            return self._take(update)

    def take_slots(self, name: str, slot_bytes: int, pipe: Connection) -> float:
        slots = self._slots = SlotReceiver(name, slot_bytes, self._dtype, previous=self._slots)

        def buckets() -> Iterator[Any]:
            stream = slots.buckets()
            while (filled := pipe.recv()) is not None:
                copied = slots.put(filled[0], [SlotEntry(**each) for each in filled[1]])
                yield next(stream)
                copied.add_done_callback(lambda _: None)
                pipe.send("copied")

        return self._take(WeightUpdate(1, self._shapes, buckets()))

    def checksum(self) -> str:
        return checksum(self._model.named_parameters())

    def _take(self, update: WeightUpdate) -> float:
        started = time.perf_counter()
        Receiver(self._model, self._shapes).take_all(update)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started


class Rank:
    """A sender's process: a rank with its part of every tensor."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device, rank: int, num_ranks: int) -> None:
        self._parcels = parcels_of(shapes, num_ranks)
        self._rank = rank
        parts = {each.name: (each.size(rank),) for each in self._parcels}
        self._model = Parameters(parts, dtype, device)
        self._sender = PieceSender(rank)

    def connect(self, order: SendOrder) -> str:
        return self._sender.connect(order).failure

    def send(self, order: SendOrder) -> tuple[str, int]:
        self._model.change()
        pieces = (each.detach() for _, each in self._model.named_parameters())
        report = self._sender.send(order, self._parcels, pieces)
        return report.failure, report.num_bytes


def serve(pipe: Connection, kind: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    made = kind(*arguments)
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        name, values = call
        more = (pipe,) if name == "take_slots" else ()
        pipe.send(getattr(made, name)(*values, *more))


class Remote:
    """An object in another process."""

    def __init__(self, kind: Callable[..., Any], *arguments: Any) -> None:
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, kind, arguments), daemon=True)
        self._process.start()

    def start(self, name: str, *values: Any) -> None:
        self.pipe.send((name, values))

    def result(self) -> Any:
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self._process.join(30)


@contextmanager
def remote(count: int, kind: Callable[..., Any], *arguments: Any, numbered: bool = False) -> Iterator[list[Remote]]:
    made = [Remote(kind, *arguments, *((number, count) if numbered else ())) for number in range(count)]
    for each in made:
        each.result()
    try:
        yield made
    finally:
        for each in made:
            each.close()


def timed(num_updates: int, update: Callable[[], tuple[float, int]]) -> dict[str, float]:
    """Medians of an update that returns its pause and its bytes, without the first."""
    seconds, pauses, sizes = [], [], []
    for _ in range(num_updates + 1):
        started = time.perf_counter()
        pause, num_bytes = update()
        seconds.append(time.perf_counter() - started)
        pauses.append(pause)
        sizes.append(num_bytes)
    return {
        "seconds": statistics.median(seconds[1:]),
        "pause_s": statistics.median(pauses[1:]),
        "bytes": sizes[-1],
    }


def in_memory(options: Any, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    engine, source = Engine(shapes, dtype, device), Parameters(shapes, dtype, device)
    size = sum(each.nbytes for _, each in source.named_parameters())

    def update() -> tuple[float, int]:
        return engine._take(WeightUpdate(1, shapes, in_buckets(source.named_parameters()))), size

    return timed(options.updates, update)


def shared_memory(options: Any, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    source = Parameters(shapes, dtype, device)
    size = sum(each.nbytes for _, each in source.named_parameters())
    slots = SlotSender(shapes, dtype)
    with remote(1, Engine, shapes, dtype, device) as (engine,):

        def update() -> tuple[float, int]:
            engine.start("take_slots", slots.name, slots.slot_bytes)
            num_open = 0

            def until_free(_: int) -> None:
                nonlocal num_open
                if num_open == 2:
                    engine.result()
                    num_open -= 1

            for filled in slots.fill(in_buckets(source.named_parameters()), until_free):
                engine.pipe.send(filled)
                num_open += 1
            for _ in range(num_open):
                engine.result()
            engine.pipe.send(None)
            return engine.result(), size

        result = timed(options.updates, update)
    slots.close()
    return result


def file(options: Any, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    source = Parameters(shapes, dtype, device)
    size = sum(each.nbytes for _, each in source.named_parameters())
    with remote(1, Engine, shapes, dtype, device) as (engine,):

        def update() -> tuple[float, int]:
            written = FileWeights(shapes, dtype)
            written.write(in_buckets(source.named_parameters()))
            engine.start("take_file", str(written.path))
            pause = engine.result()
            written.discard()
            return pause, size

        return timed(options.updates, update)


def collective(
    options: Any, shapes: Shapes, dtype: torch.dtype, device: torch.device, *, ranks: int, engines: int, encoding: Any
) -> dict[str, float]:
    port = host_store("127.0.0.1").port
    name = str(dtype).removeprefix("torch.")
    order = SendOrder(f"bench-{ranks}-{engines}-{encoding}", "127.0.0.1", port, engines, name, encoding=encoding)
    parcels = parcels_of(shapes, ranks)
    with (
        remote(ranks, Rank, shapes, dtype, device, numbered=True) as senders,
        remote(engines, Engine, shapes, dtype, device) as receivers,
    ):
        for rank in senders:
            rank.start("connect", order)
        for number, engine in enumerate(receivers, 1):
            engine.start("join", order, number, ranks)
        problems = [rank.result() for rank in senders] + [engine.result() for engine in receivers]
        assert not any(problems), problems

        def update() -> tuple[float, int]:
            for engine in receivers:
                engine.start("take_pieces", parcels, order)
            for rank in senders:
                rank.start("send", order)
            sent = [rank.result() for rank in senders]
            pauses = [engine.result() for engine in receivers]
            assert not any(failure for failure, _ in sent), sent
            return max(pauses), sum(num_bytes for _, num_bytes in sent)

        result = timed(options.updates, update)
        for engine in receivers:
            engine.start("checksum")
        assert len({engine.result() for engine in receivers}) == 1, "all engines have the same weights"
    return result


def main() -> None:
    parser = parser_of(__doc__)
    add_shape(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both ends")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--updates", type=int, default=5, help="updates that are timed (default 5)")
    parser.add_argument("--only", nargs="*", help="names of transports, for example memory 'collective 2 to 2'")
    options = parser.parse_args()
    device = torch.device(options.device) if options.device else default_device()
    dtype = getattr(torch, options.dtype)
    model = build_model(options.shape, torch.device("meta"), dtype)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    given = (options, shapes, dtype, device)
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "memory": lambda: in_memory(*given),
        "shared_memory": lambda: shared_memory(*given),
        "file": lambda: file(*given),
        **{
            f"collective {ranks} to {engines}": lambda ranks=ranks, engines=engines: collective(
                *given, ranks=ranks, engines=engines, encoding="plain"
            )
            for ranks, engines in ((1, 1), (2, 1), (1, 2), (2, 2))
        },
        "delta 1 to 1": lambda: collective(*given, ranks=1, engines=1, encoding="delta"),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, measure in measures.items():
        if options.only and name not in options.only:
            continue
        row = rows[name] = measure()
        row["gb_per_s"] = size / 1e9 / row["seconds"]
        print(
            f"{options.shape} {options.dtype} {name:<18} {row['gb_per_s']:6.2f} GB/s, {row['seconds'] * 1e3:8.1f} ms, "
            f"pause {row['pause_s'] * 1e3:8.1f} ms, {row['bytes'] / 1e6:8.1f} MB",
            flush=True,
        )
        gc.collect()
    write_record(options.out, device, shape=options.shape, dtype=options.dtype, model_bytes=size, transports=rows)


if __name__ == "__main__":
    main()
