"""How many events per second the controller handles in front of 1, 8, 64 and 512 simulated servers.

    python benchmarks/controller_load.py [--servers 1 8 64 512] [--per-server 32]

The controller is the process that runs the training loop: the scheduler of ``scheduler_overhead.py`` (executor,
dispatcher, ledger, staleness bound) and in front of the servers the router, with its health checks. The servers compute
nothing and answer in this process, so CPU time is that of the controller alone. ``per-server`` episodes are in flight
on every server, each with a session. ``alone`` is the same load without a router. Events are those of
``scheduler_overhead.py``, so that the numbers can be compared: what the router does for a request is part of its cost.

``needed_per_s`` is what the servers would ask for if each episode took ``--episode-s`` seconds: the controller is the
bottleneck where it exceeds ``episodes_per_cpu_s``.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from options import parser_of
from record import write_record
from scheduler_overhead import EVENTS_PER_EPISODE, EVENTS_PER_GROUP, HoldingEngine, Schedule, cpu_per_episode_us
from simulated_server import SimulatedServer

from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions
from headwater.core.capabilities import Capabilities
from headwater.core.protocols import EpisodeEngine
from headwater.core.requests import ModelRequest, ModelResponse

SAMPLES, MAX_STALENESS = 4, 1


class WithSessions:
    """Gives every request a session of its own, as an episode does."""

    capabilities = Capabilities()

    def __init__(self, engine: EpisodeEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._engine.agenerate(replace(request, session=f"row#{next(self._numbers)}"))


class Routers:
    """Makes a router for every run, and closes it."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._made: list[RouterEngine] = []

    def wrap(self, held: HoldingEngine) -> EpisodeEngine:
        servers = [
            RoutedServer(f"server {place}", SimulatedServer(held.agenerate)) for place in range(self._num_servers)
        ]
        self._made.append(RouterEngine(servers, RouterOptions(max_open_per_server=1 << 20)))
        return WithSessions(self._made[-1])

    def close(self) -> None:
        for router in self._made:
            router.close()


@contextmanager
def routers_of(num_servers: int) -> Iterator[Routers]:
    routers = Routers(num_servers)
    try:
        yield routers
    finally:
        routers.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64, 512], help="numbers of servers")
    parser.add_argument("--per-server", type=int, default=32, help="episodes in flight on each (default 32)")
    parser.add_argument("--episodes", type=int, default=20000, help="episodes per run (default 20000)")
    parser.add_argument("--episode-s", type=float, default=30.0, help="length of an episode (default 30)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs; the median is reported (default 3)")
    options = parser.parse_args()
    events = EVENTS_PER_EPISODE + EVENTS_PER_GROUP / SAMPLES
    rows = []
    print(f"{'servers':>7}  {'in flight':>9}  {'us/episode':>10}  {'alone':>8}  {'events/s':>9}  {'needed/s':>9}")
    for number in options.servers:
        schedule = Schedule(number * options.per_server, SAMPLES, MAX_STALENESS)
        alone, routed = [], []
        for _ in range(options.runs):
            gc.collect()
            alone.append(cpu_per_episode_us(schedule, options.episodes, WithSessions))
            with routers_of(number) as routers:
                routed.append(cpu_per_episode_us(schedule, options.episodes, routers.wrap))
        cost, plain = statistics.median(routed), statistics.median(alone)
        needed = schedule.num_in_flight / options.episode_s * events
        rows.append(
            {
                "servers": number,
                "in_flight": schedule.num_in_flight,
                "cpu_us_per_episode": cost,
                "cpu_us_per_episode_alone": plain,
                "episodes_per_cpu_s": 1e6 / cost,
                "events_per_cpu_s": events / cost * 1e6,
                "needed_events_per_s": needed,
                "runs": routed,
                "runs_alone": alone,
            }
        )
        print(
            f"{number:>7,}  {schedule.num_in_flight:>9,}  {cost:>10.1f}  {plain:>8.1f}  "
            f"{events / cost * 1e6:>9,.0f}  {needed:>9,.0f}"
        )
    write_record(
        options.out, torch.device("cpu"), per_server=options.per_server, episode_s=options.episode_s, rows=rows
    )


if __name__ == "__main__":
    main()
