"""CPU time and memory per episode in flight, without any model computation.

    python benchmarks/scheduler_overhead.py [--in-flight 100 1000 10000]

The executor, dispatcher, ledger and staleness bound are those of the trainer, and each step makes the trainer's calls.
The engine does not compute. It delays its answers until the requested number of episodes is in flight, and then answers
the batch that has waited longest. The number in flight is therefore constant, and every batch is as old as
``max_staleness`` allows. CPU time is the time of all threads of the process, so a busy machine changes it little.

Events are requests, answers, and the events of a group: drawn, started, finished, taken, trained on. Memory is measured
in a separate run. It is what Python allocates for episodes in flight, without the prompts and responses.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from options import parser_of
from record import write_record

from headwater.core.capabilities import Capabilities
from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.records import NOT_SAMPLED, Prompt, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import PromptDraw
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.staleness import Admission
from headwater.workflows import EngineWorkflow, EpisodeRunner, WorkflowContext

NUM_PROMPT_TOKENS = 16
NUM_NEW_TOKENS = 16
EVENTS_PER_EPISODE = 2
EVENTS_PER_GROUP = 5

PROMPT = Prompt("row", ({"role": "user", "content": "?"},), "?", tuple(range(1, NUM_PROMPT_TOKENS + 1)), "none")


class HoldingEngine:
    """Answers the ``num_answered`` requests that came first whenever ``num_held`` are there."""

    capabilities = Capabilities()

    def __init__(self, num_held: int, num_answered: int) -> None:
        self.version = 0
        self._num_held = num_held
        self._num_answered = num_answered
        self._held: deque[tuple[asyncio.Future[int], int]] = deque()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._held.append((answer, self.version))
        if len(self._held) == self._num_held:
            asyncio.get_running_loop().call_soon(self._answer)
        return _response(await answer)

    def _answer(self) -> None:
        for _ in range(self._num_answered):
            answer, version = self._held.popleft()
            if not answer.done():
                answer.set_result(version)


Wrap = Callable[[HoldingEngine], EpisodeEngine]


@dataclass
class OneRequest:
    """The least a workflow can do. Its trajectories are made once: making them is no part of the scheduling."""

    made: dict[tuple[int, int], Trajectory] = field(default_factory=dict)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        response = await engine.agenerate(_REQUEST)
        key = response.output_versions[0], data.sample
        if key not in self.made:
            self.made[key] = _trajectory(data, response)
        return self.made[key]


def _trajectory(data: EpisodeInput, response: ModelResponse) -> Trajectory:
    num_prompt, num_output = len(response.input_tokens), len(response.output_tokens)
    return Trajectory(
        uid=data.prompt.uid,
        sample=data.sample,
        tokens=response.input_tokens + response.output_tokens,
        prompt_length=num_prompt,
        loss_mask=(0,) * num_prompt + (1,) * num_output,
        logprobs=(0.0,) * num_prompt + response.output_logprobs,
        versions=(NOT_SAMPLED,) * num_prompt + response.output_versions,
        reward=1.0,
        stop_reason=response.stop_reason,
    )


_SAMPLING = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
_REQUEST = ModelRequest("row", PROMPT.tokens, _SAMPLING, rng_key=0)
_RESPONSES: dict[int, ModelResponse] = {}


def _response(version: int) -> ModelResponse:
    if version not in _RESPONSES:
        count = NUM_NEW_TOKENS
        _RESPONSES[version] = ModelResponse(PROMPT.tokens, (7,) * count, (-0.5,) * count, (version,) * count, "length")
    return _RESPONSES[version]


def _runner() -> EpisodeRunner:
    unused: Any = None  # the workflow needs neither a tokenizer nor a reward
    return EpisodeRunner(EngineWorkflow(OneRequest()), WorkflowContext(unused, unused, _SAMPLING), "OneRequest")


@dataclass(frozen=True)
class Schedule:
    num_in_flight: int
    """Episodes."""
    num_samples: int
    max_staleness: int

    @property
    def batch_size(self) -> int:
        """Groups per batch: ``max_staleness + 1`` batches are in flight."""
        per_group = self.num_samples * (self.max_staleness + 1)
        if self.num_in_flight % per_group:
            raise SystemExit(f"--in-flight {self.num_in_flight}: must be a multiple of {per_group} (samples * batches)")
        return self.num_in_flight // per_group


class Learner:
    """Takes batches as the trainer does, and trains on nothing."""

    def __init__(self, schedule: Schedule, tasks: AsyncTaskRunner, wrap: Wrap | None = None) -> None:
        """``wrap`` puts something in front of the engine, for example a router."""
        self.engine = HoldingEngine(schedule.num_in_flight, schedule.batch_size * schedule.num_samples)
        self.executor = WorkflowExecutor(
            wrap(self.engine) if wrap else self.engine,  # type: ignore[arg-type]  only asked for responses
            GroupRunner(_runner(), num_samples=schedule.num_samples, on_failure="stop"),
            tasks,
            Admission(batch_size=schedule.batch_size, max_staleness=schedule.max_staleness, in_waves=False),
            timeout_s=60.0,
            episode_timeout_s=60.0,
        )
        self._num_drawn = 0
        self._version = 0

    def step(self) -> None:
        batch = self.executor.prepare_batch(self)
        assert len(batch.groups) == self.executor.admission.batch_size
        self._version += 1
        self.engine.version = self._version
        self.executor.trained(self._version, str)
        self.executor.snapshot(dict)
        self.executor.set_version(self._version)
        self.executor.check_ledger()
        self.executor.ledger.take_record()

    async def read_ahead(self, count: int, at_least: int) -> int:
        return count  # there is nothing to read

    def take(self, count: int) -> list[PromptDraw]:
        """The next ``count`` prompts."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + count
        return [PromptDraw(PROMPT, number, number) for number in range(first, first + count)]


@contextmanager
def learner_of(schedule: Schedule, wrap: Wrap | None = None) -> Iterator[Learner]:
    with AsyncTaskRunner() as tasks:
        yield Learner(schedule, tasks, wrap)


def cpu_per_episode_us(schedule: Schedule, num_episodes: int, wrap: Wrap | None = None) -> float:
    """Microseconds of CPU time, once the first batches are through."""
    per_step = schedule.batch_size * schedule.num_samples
    num_steps = max(2, num_episodes // per_step)
    gc.collect()
    with learner_of(schedule, wrap) as learner:
        for _ in range(schedule.max_staleness + 1):
            learner.step()
        began = time.process_time()
        for _ in range(num_steps):
            learner.step()
        return (time.process_time() - began) / (num_steps * per_step) * 1e6


def bytes_per_episode(schedule: Schedule) -> float:
    """The most that Python has allocated at any time, per episode in flight."""
    gc.collect()
    tracemalloc.start()
    try:
        with learner_of(schedule) as learner:
            for _ in range(schedule.max_staleness + 2):
                learner.step()
            return tracemalloc.get_traced_memory()[1] / schedule.num_in_flight
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[100, 1000, 10000], help="numbers of episodes in flight"
    )
    parser.add_argument("--samples", type=int, default=5, help="episodes per group (default 5)")
    parser.add_argument("--max-staleness", type=int, default=1, help="at least 1 (default 1)")
    parser.add_argument("--episodes", type=int, default=40000, help="episodes per run (default 40000)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs; the median is reported (default 5)")
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the engine does for a run: what torch leaves behind is not looked through again and again
    atexit.register(gc.unfreeze)
    load = os.getloadavg()[0]
    events = EVENTS_PER_EPISODE + EVENTS_PER_GROUP / options.samples
    schedules = [Schedule(number, options.samples, options.max_staleness) for number in options.in_flight]
    # Round after round, so that what else the machine does falls on all sizes alike.
    rounds = [[cpu_per_episode_us(each, options.episodes) for each in schedules] for _ in range(options.runs)]
    rows = []
    print(f"{'in flight':>9}  {'us/episode':>10}  {'events/s':>9}  {'KiB/episode':>11}")
    for schedule, runs in zip(schedules, zip(*rounds, strict=True), strict=True):
        cost = statistics.median(runs)
        memory = bytes_per_episode(schedule)
        rows.append(
            {
                "in_flight": schedule.num_in_flight,
                "cpu_us_per_episode": cost,
                "events_per_cpu_s": events / cost * 1e6,
                "bytes_per_episode": memory,
                "runs": runs,
            }
        )
        print(f"{schedule.num_in_flight:>9,}  {cost:>10.1f}  {events / cost * 1e6:>9,.0f}  {memory / 1024:>11.1f}")
    ratio = rows[-1]["cpu_us_per_episode"] / rows[0]["cpu_us_per_episode"]
    print(
        f"{options.in_flight[-1]:,} against {options.in_flight[0]:,} in flight: {ratio:.2f} times the cost per episode"
    )
    write_record(
        options.out,
        torch.device("cpu"),
        samples=options.samples,
        max_staleness=options.max_staleness,
        load_before=load,
        rows=rows,
        ratio=ratio,
    )


if __name__ == "__main__":
    main()
