"""What the router costs per call, 10,000 sessions, and the throughput over 1 and 2 real servers.

    python benchmarks/router.py [--parts overhead sessions servers] [--out results/router.json]

- ``overhead``: calls one after the other to a simulated server that answers at once, directly and through the router;
  and the same with a real ``headwater serve`` of a tiny model and responses of one token. The difference of the medians
  is what a call pays for the router. CPU time includes making the request.
- ``sessions``: 10,000 sessions of four turns each over 8 simulated servers, all sessions at the same time. A turn takes
  20 ms. Stated are turns per second of CPU time, and the share of turns that found the server of their session.
- ``servers``: requests of 64 tokens over 1 and 2 servers on this machine, each with one thread. The second server gains
  little on a machine whose cores are busy.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from options import parser_of
from record import write_record
from simulated_server import SimulatedServer

from headwater.backends.native.engine import NativeEngine, engine_arguments
from headwater.backends.native.places import OwnServer
from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions
from headwater.config.schema import EngineConfig
from headwater.core.protocols import EpisodeEngine
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.observe.spans import Spans

MODEL = "tiny:qwen3"
CONFIG = EngineConfig(kv_cache_gib=0.25)
PARTS = ("overhead", "sessions", "servers")
NUM_SERVERS, NUM_TURNS, TURN_S = 8, 4, 0.02
ANSWER = ModelResponse((5, 6, 7), (8,), (-0.5,), (0,), "length")

Answer = Callable[[ModelRequest], Awaitable[ModelResponse]]


def request(number: int, num_tokens: int, session: str = "") -> ModelRequest:
    sampling = SamplingParams(max_new_tokens=num_tokens, ignore_end=True)
    return ModelRequest(f"r{number}", (5, 6, 7), sampling, number, session=session)


@contextmanager
def routed(*engines: Any, **options: Any) -> Iterator[RouterEngine]:
    servers = [RoutedServer(f"server {place}", engine) for place, engine in enumerate(engines)]
    router = RouterEngine(servers, RouterOptions(**options))
    try:
        yield router
    finally:
        router.close()


def times_us(engine: EpisodeEngine, num_calls: int) -> list[float]:
    """The seconds of calls one after the other, after some that are not measured."""

    async def call_all() -> list[float]:
        times = []
        for number in range(num_calls + num_calls // 10):
            asked = request(number, 1, f"session {number % 100}")
            began = time.perf_counter()
            await engine.agenerate(asked)
            times.append((time.perf_counter() - began) * 1e6)
        return times[num_calls // 10 :]

    return asyncio.run(call_all())


def percentiles(times: list[float], cpu_us: float | None = None) -> dict[str, float]:
    parts = statistics.quantiles(times, n=100)
    row = {"p50_us": parts[49], "p99_us": parts[98]}
    return row if cpu_us is None else {**row, "cpu_us": cpu_us}


def simulated(engine: EpisodeEngine, num_calls: int) -> dict[str, float]:
    """With CPU time per call, which a busy machine changes little."""
    began = time.process_time()
    times = times_us(engine, num_calls)
    return percentiles(times, (time.process_time() - began) / (num_calls * 1.1) * 1e6)


def overhead(num_calls: int) -> dict[str, Any]:
    async def at_once(asked: ModelRequest) -> ModelResponse:
        return ANSWER

    result: dict[str, Any] = {"simulated_direct": simulated(SimulatedServer(at_once), num_calls)}
    with routed(SimulatedServer(at_once), SimulatedServer(at_once)) as router:
        result["simulated_routed"] = simulated(router, num_calls)
    engine = start()
    with routed(engine) as router:  # closes the engine too
        # In turns, so that what else the machine does falls on both alike.
        direct: list[float] = []
        through: list[float] = []
        for _ in range(5):
            direct += times_us(engine, max(2, num_calls // 50))
            through += times_us(router, max(2, num_calls // 50))
        result["server_direct"], result["server_routed"] = percentiles(direct), percentiles(through)
    for name, row in result.items():
        cpu = f"   CPU {row['cpu_us']:.1f} us" if "cpu_us" in row else ""
        print(f"{name:<17} p50 {row['p50_us']:>9,.1f} us   p99 {row['p99_us']:>9,.1f} us{cpu}")
    return result


def sessions(count: int) -> dict[str, Any]:
    async def slowly(asked: ModelRequest) -> ModelResponse:
        await asyncio.sleep(TURN_S)
        return ANSWER

    async def play(router: RouterEngine, number: int) -> None:
        for turn in range(NUM_TURNS):
            await router.agenerate(request(number * NUM_TURNS + turn, 1, f"session {number}"))

    async def play_all(router: RouterEngine) -> None:
        await asyncio.gather(*(play(router, number) for number in range(count)))

    with routed(*(SimulatedServer(slowly) for _ in range(NUM_SERVERS)), max_open_per_server=256) as router:
        began, began_cpu = time.perf_counter(), time.process_time()
        asyncio.run(play_all(router))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        metrics = router.status().metrics
    num_turns = count * NUM_TURNS
    sticky = metrics["router_num_sticky"] / (num_turns - count)
    print(
        f"{count:,} sessions x {NUM_TURNS} turns over {NUM_SERVERS} servers: {wall_s:.1f} s, "
        f"{num_turns / cpu_s:,.0f} turns per second of CPU time, {sticky:.1%} on the server of their session"
    )
    return {
        "sessions": count,
        "turns": NUM_TURNS,
        "servers": NUM_SERVERS,
        "max_open_per_server": 256,
        "wall_s": wall_s,
        "turns_per_cpu_s": num_turns / cpu_s,
        "sticky_share": sticky,
    }


def servers(num_requests: int) -> dict[str, Any]:
    result = {}
    for number in (1, 2):
        with ExitStack() as closing:
            engines = [start() for _ in range(number)]
            router = closing.enter_context(routed(*engines))

            async def answer_all(router: RouterEngine = router) -> int:
                asked = [request(place, 64, f"session {place}") for place in range(num_requests)]
                responses = await asyncio.gather(*(router.agenerate(each) for each in asked))
                return sum(each.output_len for each in responses)

            asyncio.run(answer_all())
            began = time.perf_counter()
            num_tokens = asyncio.run(answer_all())
            result[f"tokens_per_s_{number}"] = rate = num_tokens / (time.perf_counter() - began)
            print(f"{number} server(s): {rate:,.0f} tokens/s")
    return {"num_requests": num_requests, **result, "ratio": result["tokens_per_s_2"] / result["tokens_per_s_1"]}


def start() -> NativeEngine:
    arguments = ["--device", "cpu", "--threads", "1", *engine_arguments(CONFIG, shares_device=True)]
    return NativeEngine(OwnServer(MODEL, arguments, "float32"), transfer="shared_memory", spans=Spans())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--calls", type=int, default=10000, help="calls per side (default 10000)")
    parser.add_argument("--sessions", type=int, default=10000, help="sessions (default 10000)")
    parser.add_argument("--requests", type=int, default=256, help="requests for the throughput (default 256)")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    if "overhead" in options.parts:
        measured["overhead"] = overhead(options.calls)
    if "sessions" in options.parts:
        measured["sessions"] = sessions(options.sessions)
    if "servers" in options.parts:
        measured["servers"] = servers(options.requests)
    write_record(options.out, torch.device("cpu"), **measured)


if __name__ == "__main__":
    main()
