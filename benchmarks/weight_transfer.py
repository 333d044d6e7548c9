"""How fast each transport moves new weights to servers, and how long they stop generating for it.

    python benchmarks/weight_transfer.py --shapes qwen2.5-0.5b --updates 2 --out gpu_weight_transfer_0.5b.json
    python benchmarks/weight_transfer.py --shapes qwen2.5-0.5b --device cpu --updates 2 --sequences 2
    python benchmarks/weight_transfer.py --shapes smollm2 --device cpu --sequences 2 --vllm vllm-env/bin/python

Real servers (``headwater serve``) generate without a break while versions are published to them as a run publishes
them, with checksums on both sides. A learner of one rank holds the weights in float32; the servers have the device's
usual number type. All of them are on one machine, and on one GPU if there is one.

With ``--vllm``, there is one server of vLLM instead.

- ``seconds``: from the start of an update until all servers use the weights. ``GB/s`` is the size of the model in the
  servers' number type over that time, whatever the number of servers.
- ``pause``: for how long an engine did not generate, as it measures itself; the longest of all servers.
- ``gap``: the longest time without a new token in any response around an update, as a client sees it. It also contains
  what follows the pause, such as prompts that are computed again.
- ``token``: the usual time between two tokens of a response.

``memory`` is an engine in this process. ``delta`` sends what has changed: one number in eight, by one bit. Every
value is a median; the first update of a transport, which connects and allocates, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from options import parser_of
from record import write_record
from shapes import SHAPES, build_model, default_device, default_dtype

from headwater.backends import SERVER_KEY, BackendContext
from headwater.backends.native.engine import NativeEngine, engine_arguments
from headwater.backends.native.places import ForeignServer, OwnServer
from headwater.backends.router.engine import RoutedServer, RouterEngine
from headwater.backends.vllm.engine import VllmEngine
from headwater.config.load import load_config
from headwater.config.schema import EngineConfig, WeightTransfer
from headwater.core.errors import HeadwaterError
from headwater.core.parcels import Content, Parcel, SendOrder, SendReport
from headwater.core.protocols import Bucket, InferenceEngine
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.engine.engine import Engine
from headwater.models.builtin.tiny import build_tokenizer
from headwater.models.device import with_dtype
from headwater.models.load import load_tokenizer
from headwater.observe.spans import Spans
from headwater.weights.memory import in_buckets
from headwater.weights.pieces import PieceSender
from headwater.weights.publish import publish

LIMIT_S = 600.0
PROMPT = tuple(range(5, 37))
NUM_TOKENS = 1024


class OneRank:
    """As much of a learner of one rank as publishing needs."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self._model = build_model(shape, device, torch.float32)
        self._tensors = {name: each.detach() for name, each in self._model.named_parameters()}
        self._sender = PieceSender(0)
        self.connected: SendOrder | None = None

    def save(self, folder: str, dtype: torch.dtype) -> None:
        """The model as the servers load it."""
        is_same = dtype == torch.float32
        (self._model if is_same else copy.deepcopy(self._model).to(dtype)).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)

    def change(self) -> None:
        """The next version: one number in eight changes the lowest of its bits that bfloat16 has."""
        for each in self._tensors.values():
            bits = each.view(torch.int32)
            bits ^= (torch.randint_like(bits, 8) == 0).int() << 16

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(each.shape) for name, each in self._tensors.items()}

    def export(self) -> Iterator[Bucket]:
        return in_buckets(self._tensors.items())

    def parcels(self, content: Content = "merged") -> list[Parcel]:
        return [Parcel.whole(name, shape) for name, shape in self.shapes().items()]

    def connect(self, order: SendOrder) -> list[SendReport]:
        return self._kept(order, self._sender.connect(order))

    def broadcast(self, order: SendOrder, content: Content = "merged") -> list[SendReport]:
        return self._kept(order, self._sender.send(order, self.parcels(), iter(self._tensors.values())))

    def _kept(self, order: SendOrder, report: SendReport) -> list[SendReport]:
        self.connected = None if report.failure else order
        return [report]


@dataclass
class Load:
    """Responses that an engine generates all the time, and when their tokens arrive."""

    engine: InferenceEngine
    num_sequences: int
    times: list[list[float]] = field(default_factory=list)
    """Of every sequence."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self.times = [[] for _ in range(self.num_sequences)]
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=[self._generate_all()], daemon=True)
        self._stop = asyncio.Event()
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self._stop.set)
            thread.join(LIMIT_S)

    async def _generate_all(self) -> None:
        tasks = [asyncio.create_task(self._generate(each)) for each in range(self.num_sequences)]
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(self, sequence: int) -> None:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_end=True)
        number = 0
        while True:
            number += self.num_sequences
            request = ModelRequest(f"r{number + sequence}", PROMPT, sampling, number + sequence)
            async for _ in self.engine.astream(request):
                self.times[sequence].append(time.perf_counter())

    def until_tokens(self, count: int = 3) -> None:
        """Wait until every sequence has got some more tokens."""
        before, deadline = [len(each) for each in self.times], time.monotonic() + LIMIT_S
        while any(len(each) < num + count for each, num in zip(self.times, before, strict=True)):
            assert time.monotonic() < deadline, "nothing is generated"
            time.sleep(0.005)

    def gap(self, began: float, ended: float) -> float:
        """The longest time without a token that overlaps this time."""
        longest = 0.0
        for times in self.times:
            for before, after in zip(list(times), times[1:], strict=False):
                if after > began and before < ended:
                    longest = max(longest, after - before)
        return longest

    def token_s(self, began: float) -> float:
        """The usual time between two tokens since then."""
        gaps = [
            after - before
            for times in self.times
            for before, after in zip(list(times), times[1:], strict=False)
            if before > began
        ]
        return statistics.median(gaps) if gaps else 0.0


def measure(learner: OneRank, engine: InferenceEngine, options: argparse.Namespace) -> dict[str, float]:
    rows: list[dict[str, float]] = []
    began_all = time.perf_counter()
    version = engine.get_version()
    version += 1
    publish(learner, engine, version)  # the engine has no weights of this learner before
    load = Load(engine, options.sequences)
    with load.running():
        load.until_tokens()
        for _ in range(options.updates):
            learner.change()
            version += 1
            began = time.perf_counter()
            published = publish(learner, engine, version)
            ended = time.perf_counter()
            load.until_tokens()
            row = {"seconds": published.seconds, "bytes": float(published.num_bytes), "gap_s": load.gap(began, ended)}
            rows.append({**row, "pause_s": published.pause_s or 0.0})
        token_s = load.token_s(began_all)
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | {"token_s": token_s}


class Servers:
    """Servers of one model, which are used with one transport after the other."""

    def __init__(self, folder: str, device: torch.device, dtype: Any, count: int, stack: ExitStack) -> None:
        config = EngineConfig(max_sequences=64, kv_cache_gib=0.5)
        arguments = ["--device", str(device), *engine_arguments(config, shares_device=True)]
        self._places = [OwnServer(folder, arguments, dtype) for _ in range(count)]
        self._owners: list[NativeEngine] = [None] * count  # type: ignore[list-item]
        threads = [threading.Thread(target=self._start, args=[number]) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for owner in self._owners:
            stack.callback(owner.close)

    def _start(self, number: int) -> None:
        self._owners[number] = NativeEngine(self._places[number], transfer="shared_memory", spans=Spans())

    @contextmanager
    def connected(self, transfer: str, encoding: Any, count: int) -> Iterator[InferenceEngine]:
        engines = [
            NativeEngine(
                ForeignServer(owner.url, place.api_key), transfer=transfer, encoding=encoding, spans=Spans(),
                hands_over=count > 1,
            )
            for owner, place in list(zip(self._owners, self._places, strict=True))[:count]
        ]  # fmt: skip
        engine: InferenceEngine = engines[0]
        if count > 1:
            engine = RouterEngine([RoutedServer(each.url, each) for each in engines])
        try:
            yield engine
        finally:
            engine.close()


class VllmServer:
    """A server of vLLM, which is used with one transport after the other."""

    def __init__(self, folder: str, device: torch.device, dtype: str, python: str, stack: ExitStack) -> None:
        self._settings = [
            *("rollout.backend=vllm", f"model.path={folder}", f"model.dtype={dtype}", f"model.device={device}"),
            *(f"data.max_prompt_tokens={2 * len(PROMPT)}", f"rollout.max_new_tokens={NUM_TOKENS}"),
        ]
        launch = ("rollout.placement=disaggregated", f"rollout.launch.python={python}", "engine.kv_cache_gib=0.5")
        self._owner = VllmEngine.launch(self._context(*launch), [str(device)])
        stack.callback(self._owner.close)
        os.environ[SERVER_KEY] = self._owner.api_key

    def _context(self, *settings: str) -> BackendContext:
        config = with_dtype(load_config("quickstart", [*self._settings, *settings]).config)
        return BackendContext(config, config.model.path, load_tokenizer(config.model.path), Spans())

    @contextmanager
    def connected(self, transfer: str, encoding: Any, count: int) -> Iterator[InferenceEngine]:
        url = self._owner.url
        settings = (f"rollout.servers=[{url}]", f"rollout.weight_transfer={transfer}")
        engine = VllmEngine.connect(url, self._context(*settings))
        try:
            yield engine
        finally:
            engine.close()


def measure_shape(
    shape: str, device: torch.device, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """``keep`` is called after every transport, so that a run that is ended early leaves what it has measured."""
    dtype = default_dtype(device)
    name: Any = str(dtype).removeprefix("torch.")
    learner = OneRank(shape, device)
    size = sum(torch.Size(each).numel() for each in learner.shapes().values()) * dtype.itemsize
    rows: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}

    def add(transport: str, engine: InferenceEngine) -> None:
        try:
            row = rows[transport] = measure(learner, engine, options)
        except HeadwaterError as error:  # the others are still worth measuring
            failed[transport] = str(error)
            print(f"{shape} {name} {transport:<20} failed: {error}", flush=True)
            return
        row["gb_per_s"] = size / 1e9 / row["seconds"]
        print(
            f"{shape} {name} {transport:<20} {row['gb_per_s']:6.2f} GB/s  {row['seconds'] * 1e3:9.1f} ms  "
            f"pause {row['pause_s'] * 1e3:8.1f} ms  gap {row['gap_s'] * 1e3:8.1f} ms  token "
            f"{row['token_s'] * 1e3:6.1f} ms  {row['bytes'] / 1e6:8.1f} MB",
            flush=True,
        )
        keep({"dtype": name, "model_bytes": size, "transports": rows, "failed": failed})

    wanted = options.transports
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        learner.save(folder, dtype)
        if "memory" in wanted:
            config = EngineConfig(max_sequences=64, kv_cache_gib=0.5)
            engine = Engine.load(folder, config, dtype=name, device=str(device))
            add("memory", engine)
            engine.close()
            del engine
            gc.collect()
        servers: Servers | VllmServer
        if options.vllm:
            servers = VllmServer(folder, device, name, options.vllm, stack)
        else:
            servers = Servers(folder, device, name, options.servers, stack)
        for transport in [each for each in wanted if each != "memory"]:
            transfer, encoding = ("collective", "delta") if transport == "delta" else (transport, "plain")
            for count in sorted({1, options.servers}):
                with servers.connected(transfer, encoding, count) as connected:
                    add(f"{transport} to {count}", connected)
    keep({"dtype": name, "model_bytes": size, "transports": rows, "failed": failed})


def main() -> None:
    parser = parser_of(__doc__)
    known = ["memory", *(each for each in get_args(WeightTransfer) if each != "auto"), "delta"]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny"], help="shapes of the model")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--updates", type=int, default=3, help="updates that are timed (default 3)")
    parser.add_argument("--sequences", type=int, default=8, help="responses that run all the time, or 0 (default 8)")
    parser.add_argument("--servers", type=int, default=2, help="measured with one server and with so many (default 2)")
    parser.add_argument("--transports", nargs="+", choices=known, help="default: all but delta")
    parser.add_argument("--vllm", metavar="PYTHON", help="use a server of the vLLM of this Python")
    options = parser.parse_args()
    if options.vllm:
        options.servers = 1
        options.transports = options.transports or ["shared_memory", "file", "collective"]
    device = torch.device(options.device) if options.device else default_device()
    if options.transports is None:
        options.transports = [each for each in known[:-1] if each != "cuda_ipc" or device.type == "cuda"]
    shapes: dict[str, Any] = {}

    def keep(shape: str, measured: dict[str, Any]) -> None:
        shapes[shape] = measured
        write_record(options.out, device, sequences=options.sequences, updates=options.updates, shapes=shapes)

    for shape in options.shapes:
        measure_shape(shape, device, options, partial(keep, shape))


if __name__ == "__main__":
    main()
