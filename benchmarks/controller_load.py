"""What the controller costs with 1, 8, 64 and 512 servers, and how much of it a cluster of 1,000 GPUs needs.

    python benchmarks/controller_load.py [--servers 1 8 64 512] [--out benchmarks/results/controller_load.json]

(1) The real executor over the real router over servers that answer without computing, as in ``scheduler_overhead.py``:
the processor time per episode, health checks included. (2) ``headwater plan``'s simulation of a 7B model on H200s:
episodes, events and tokens per second that the controller has to handle, with a batch that grows with the cluster. Two
threads can be the limit. The event loop handles events and receives tokens. The main thread assembles batches and writes
rollout files, while the learner's GPUs wait.
"""

from __future__ import annotations

import atexit
import gc
import os
import statistics
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch
from options import parser_of
from record import write_record
from scheduler_overhead import EVENTS_PER_EPISODE, EVENTS_PER_GROUP, HoldingEngine, Learner, Schedule

from headwater.backends.router.engine import RoutedServer, RouterEngine, RouterOptions
from headwater.core.protocols import Capabilities, EngineLimits, EngineStatus, WeightUpdate
from headwater.core.records import ModelRequest, ModelResponse
from headwater.planner.hardware import GPUS, SHAPES, Training
from headwater.planner.plan import Roofline, Split, predict
from headwater.planner.workload import Lengths, Workload
from headwater.rollout.task_runner import AsyncTaskRunner

SAMPLES = 8
IN_FLIGHT_PER_SERVER = 16
LEAST_IN_FLIGHT = 128


class AnsweringServer:
    """One of many servers. All of them answer through one ``HoldingEngine``, which decides when."""

    capabilities = Capabilities()
    limits = EngineLimits(vocab_size=1000, max_model_tokens=4096, max_request_tokens=4096, max_queue=65536)

    def __init__(self, holding: HoldingEngine) -> None:
        self._holding = holding

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._holding.agenerate(request)

    def status(self) -> EngineStatus:
        return EngineStatus(self._holding.version)

    def get_version(self) -> int:
        return self._holding.version

    def check(self, request: ModelRequest) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...

    def update_weights(self, update: WeightUpdate, mode: object = None) -> Future[None]:
        raise NotImplementedError("nothing is published here")


def cpu_us(num_servers: int, num_episodes: int) -> float:
    """Microseconds of processor time per episode, once the first batches are through."""
    in_flight = max(LEAST_IN_FLIGHT, IN_FLIGHT_PER_SERVER * num_servers)
    schedule = Schedule(in_flight, SAMPLES, max_staleness=1)
    per_step = schedule.batch_size * SAMPLES
    num_steps = max(3, num_episodes // per_step)
    routers: list[RouterEngine] = []

    def between(holding: HoldingEngine) -> RouterEngine:
        members: Any = [RoutedServer(f"server-{index}", AnsweringServer(holding)) for index in range(num_servers)]  # type: ignore[arg-type]
        routers.append(RouterEngine(members, RouterOptions()))
        return routers[0]

    gc.collect()
    with AsyncTaskRunner() as tasks:
        learner = Learner(schedule, tasks, between)
        try:
            for _ in range(2):
                learner.step()
            began = time.process_time()
            for _ in range(num_steps):
                learner.step()
            return (time.process_time() - began) / (num_steps * per_step) * 1e6
        finally:
            routers[0].close()


def needed(num_gpus: int, mean_tokens: int) -> dict[str, Any]:
    """A 7B model, three servers for each GPU of the learner, 4 versions of staleness, 8 prompts of 16 per server."""
    num_learner = max(1, num_gpus // 4)
    split = Split(num_learner, num_gpus - num_learner)
    lengths = Lengths.long_tailed(16, 8 * mean_tokens, mean=mean_tokens)
    workload = Workload(
        num_prompts=max(8, split.num_servers), num_samples=16, prompt_tokens=256, lengths=lengths, max_staleness=4
    )
    model = Roofline(SHAPES["qwen2.5-7b"], GPUS["h200"], Training(is_checkpointed=True), context=mean_tokens / 2)
    row = predict(workload, model, split, 4)
    assert row.prediction is not None, row.problem
    main = model.costs(split).learner.step_per_token_s * row.prediction.total_tokens_per_s
    return {
        "gpus": num_gpus, "mean_tokens": mean_tokens, "prompts_per_step": workload.num_prompts,
        "event_loop_share": row.controller_load, "main_thread_share": main, **asdict(row.prediction),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64, 512], help="numbers of servers")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1000], help="simulated clusters")
    parser.add_argument("--mean-tokens", type=int, nargs="+", default=[500, 2000], help="mean lengths of responses")
    parser.add_argument("--episodes", type=int, default=20000, help="episodes per run (default 20000)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs; the median is reported (default 3)")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    load = os.getloadavg()[0]
    events = EVENTS_PER_EPISODE + EVENTS_PER_GROUP / SAMPLES
    rows = []
    print(f"{'servers':>8}  {'in flight':>9}  {'us/episode':>10}  {'events/s':>9}")
    for count in options.servers:
        runs = [cpu_us(count, options.episodes) for _ in range(options.runs)]
        cost = statistics.median(runs)
        in_flight = max(LEAST_IN_FLIGHT, IN_FLIGHT_PER_SERVER * count)
        rows.append({"servers": count, "in_flight": in_flight, "cpu_us_per_episode": cost,
                     "events_per_cpu_s": events / cost * 1e6, "runs": runs})  # fmt: skip
        print(f"{count:>8}  {in_flight:>9,}  {cost:>10.1f}  {events / cost * 1e6:>9,.0f}", flush=True)
    clusters = []
    print(f"\n{'GPUs':>5}  {'mean length':>11}  {'tokens/s':>10}  {'episodes/s':>10}  {'events/s':>8}  "
          f"{'event loop':>10}  {'main thread':>11}")  # fmt: skip
    for mean_tokens in options.mean_tokens:
        for num_gpus in options.gpus:
            each = needed(num_gpus, mean_tokens)
            clusters.append(each)
            print(f"{num_gpus:>5}  {mean_tokens:>11,}  {each['total_tokens_per_s']:>10,.0f}  "
                  f"{each['episodes_per_s']:>10,.1f}  {each['events_per_s']:>8,.0f}  "
                  f"{each['event_loop_share']:>10.1%}  {each['main_thread_share']:>11.1%}", flush=True)  # fmt: skip
    write_record(options.out, torch.device("cpu"), load_before=load, rows=rows, clusters=clusters)


if __name__ == "__main__":
    main()
