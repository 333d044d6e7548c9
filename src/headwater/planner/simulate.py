"""A run on a virtual clock: the real executor, dispatcher, admission, buffer and ledger, on simulated machines."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headwater.core.protocols import EpisodeEngine, EpisodeInput
from headwater.core.records import NOT_SAMPLED, Prompt, Trajectory
from headwater.core.requests import ModelRequest, SamplingParams
from headwater.planner.costs import Costs
from headwater.planner.server import SimulatedFleet, SimulatedServer
from headwater.planner.virtual_time import VirtualTasks
from headwater.planner.workload import Workload
from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import PromptDraw, RolloutBatch
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.staleness import Admission
from headwater.workflows import EngineWorkflow, EpisodeRunner, WorkflowContext

EVENTS_PER_EPISODE = 2
"""A request and its answer."""
EVENTS_PER_GROUP = 5
"""Drawn, started, finished, taken, trained on. ``benchmarks/scheduler_overhead.py`` counts the same events."""
_DRAIN_LIMIT_S = 1e9


@dataclass(frozen=True)
class Prediction:
    """The steady state of a simulated run."""

    step_s: float
    """Mean time of a step."""
    tokens_per_s: float
    """Trained tokens per second: responses only, without tokens that were too old."""
    total_tokens_per_s: float
    """All tokens of the batches per second: prompts, responses and tokens that were too old."""
    wait_s: float
    """Per step, how long the learner waited for rollouts."""
    train_s: float
    """Per step, how long the learner computed."""
    publish_s: float
    server_busy: float
    """The share of the time in which a server had at least one sequence."""
    sequences_per_server: float
    """Sequences that ran at the same time on a server, in the mean over the time."""
    mean_lag: float
    """Versions between sampling and training, in the mean over trained tokens."""
    max_lag: int
    masked_share: float
    """The share of sampled tokens that were too old to be trained on."""
    dropped_groups: int
    episodes_per_s: float
    events_per_s: float
    """What the controller has to handle; see ``EVENTS_PER_EPISODE``."""
    num_steps: int
    simulated_s: float
    """The virtual time of all steps."""
    computed_s: float = field(compare=False)
    """The real time that the simulation took."""


def simulate(
    workload: Workload,
    costs: Costs,
    num_servers: int,
    *,
    num_steps: int | None = None,
    warm_up: int | None = None,
    ends: bool = False,
) -> Prediction:
    """Run ``num_steps`` steps after ``warm_up`` steps that do not count. If the run ``ends`` after them, nothing is
    generated for later steps.

    The learner trains while the servers generate, as far as ``workload.max_staleness`` allows; the executor decides.
    """
    began = time.monotonic()
    ahead = min(workload.max_staleness, 8)
    warm_up = 2 + ahead if warm_up is None else warm_up
    num_steps = 4 + 2 * ahead if num_steps is None else num_steps
    with _without_garbage_collection(), VirtualTasks() as tasks:
        run = _Run(workload, costs, num_servers, tasks, warm_up + num_steps if ends else None)
        for _ in range(warm_up):
            run.step()
        run.begin_counting()
        for _ in range(num_steps):
            run.step()
        return run.prediction(computed_s=time.monotonic() - began)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A simulation makes many small objects and no cycles, so looking for garbage would take most of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Run:
    """The training loop with a learner that only takes time."""

    def __init__(
        self, workload: Workload, costs: Costs, num_servers: int, tasks: VirtualTasks, num_batches: int | None
    ) -> None:
        self.workload, self.costs, self.tasks = workload, costs, tasks
        self.servers = [SimulatedServer(tasks.loop, costs.generation) for _ in range(num_servers)]
        self.fleet = SimulatedFleet(self.servers)
        self.executor = make_executor(workload, self.fleet, tasks, num_batches)
        self.version = 0
        self._num_drawn = 0
        self._prompt = (workload.prompt_tokens,)  # one token stands for all; see planner/server.py
        self.begin_counting()

    def begin_counting(self) -> None:
        self._began = self.tasks.loop.time()
        self._busy_before = sum(server.busy_s for server in self.servers)
        self._steps: list[_Step] = []

    def take(self, count: int) -> list[PromptDraw]:
        """The next ``count`` prompts, for the executor."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + count
        return [
            PromptDraw(Prompt(str(number), (), "", self._prompt, "plan"), number, number)
            for number in range(first, first + count)
        ]

    def again(self, index: int, epoch: int) -> PromptDraw:
        raise NotImplementedError("a simulation is never resumed")

    def prepare(self, count: int) -> None:
        """Prompts of a simulation cost nothing."""

    async def read_ahead(self, count: int, at_least: int) -> int:
        return count

    def step(self) -> None:
        """The calls of ``trainer/loop.py``, in its order."""
        clock, learner = self.tasks.loop.time, self.costs.learner
        began = clock()
        batch = self.executor.prepare_batch(self)
        taken = clock()
        num_responded = sum(sum(each.tokens[1:]) for each in batch.trajectories)
        num_tokens = self.workload.num_computed(len(batch.groups), len(batch.trajectories), num_responded)
        self.tasks.sleep(num_tokens * (learner.experience_per_token_s + learner.train_per_token_s))
        trained = clock()
        self._publish()
        published = clock()
        self.executor.trained(self.version, str)
        self.executor.close_books(dict)
        self.executor.set_version(self.version)
        self.tasks.sleep(learner.step_s + num_responded * learner.step_per_token_s)
        self._steps.append(_Step.of(batch, self.version - 1, began, taken, trained, published, clock()))

    def _publish(self) -> None:
        learner, mode = self.costs.learner, self.workload.update_mode
        self.tasks.sleep(max(0.0, learner.publish_s - learner.pause_s))
        if mode == "drain":
            self.tasks.wait(
                None,
                lambda: not self.fleet.num_open,
                lambda: "waiting for running requests",
                kind="weights",
                hard_limit_s=_DRAIN_LIMIT_S,
            )
        self.version += 1
        self.fleet.update(self.version, pause_s=learner.pause_s, recomputes=mode == "interrupt")
        self.tasks.sleep(learner.pause_s)

    def prediction(self, *, computed_s: float) -> Prediction:
        steps = self._steps
        seconds = self.tasks.loop.time() - self._began
        num_groups = sum(each.num_groups for each in steps)
        num_episodes = sum(each.num_episodes for each in steps)
        num_trained = sum(each.num_trained for each in steps)
        num_masked = sum(each.num_masked for each in steps)
        num_all = sum(each.num_tokens for each in steps)
        num_sampled = num_trained + num_masked
        busy_s = sum(server.busy_s for server in self.servers) - self._busy_before
        return Prediction(
            step_s=seconds / len(steps),
            tokens_per_s=num_trained / seconds,
            total_tokens_per_s=num_all / seconds,
            wait_s=statistics.fmean(each.wait_s for each in steps),
            train_s=statistics.fmean(each.train_s for each in steps),
            publish_s=statistics.fmean(each.publish_s for each in steps),
            server_busy=min(1.0, busy_s / seconds / len(self.servers)),
            sequences_per_server=sum(each.generate_s for each in steps) / seconds / len(self.servers),
            mean_lag=sum(each.lag_sum for each in steps) / max(1, num_trained),
            max_lag=max(each.max_lag for each in steps),
            masked_share=num_masked / max(1, num_sampled),
            dropped_groups=sum(each.num_dropped for each in steps),
            episodes_per_s=num_episodes / seconds,
            events_per_s=(EVENTS_PER_EPISODE * num_episodes + EVENTS_PER_GROUP * num_groups) / seconds,
            num_steps=len(steps),
            simulated_s=seconds,
            computed_s=computed_s,
        )


@dataclass(frozen=True)
class _Step:
    """What is counted in one step."""

    wait_s: float
    train_s: float
    publish_s: float
    generate_s: float
    """Of all requests together."""
    num_groups: int
    num_episodes: int
    num_dropped: int
    num_tokens: int
    """Prompts and responses."""
    num_trained: int
    """Tokens of responses in the loss."""
    num_masked: int
    lag_sum: int
    max_lag: int

    @classmethod
    def of(
        cls, batch: RolloutBatch, version: int, began: float, taken: float, trained: float, published: float, end: float
    ) -> _Step:
        """``version`` is the learner's when it took the batch."""
        num_tokens = num_trained = num_masked = lag_sum = max_lag = 0
        for each in batch.trajectories:
            num_tokens += each.tokens[0]
            for count, is_trained, tag in zip(each.tokens[1:], each.loss_mask[1:], each.versions[1:], strict=True):
                num_tokens += count
                if not is_trained:
                    num_masked += count
                    continue
                num_trained += count
                lag_sum += count * (version - tag)
                max_lag = max(max_lag, version - tag)
        return cls(
            wait_s=taken - began,
            train_s=trained - taken,
            publish_s=published - trained,
            generate_s=sum(sum(each.generate_s) for each in batch.times),
            num_groups=len(batch.groups),
            num_episodes=len(batch.trajectories),
            num_dropped=len(batch.dropped),
            num_tokens=num_tokens,
            num_trained=num_trained,
            num_masked=num_masked,
            lag_sum=lag_sum,
            max_lag=max_lag,
        )


def make_executor(
    workload: Workload, fleet: SimulatedFleet, tasks: AsyncTaskRunner, num_batches: int | None = None
) -> WorkflowExecutor:
    """The executor of a run, as ``trainer/rollout_setup.py`` makes it, with episodes that only take time."""
    unused: Any = None  # the workflow needs neither a tokenizer nor a reward
    runner = EpisodeRunner(
        EngineWorkflow(_SimulatedEpisodes(workload)), WorkflowContext(unused, unused, SamplingParams(1)), "simulated"
    )
    engine: Any = fleet  # the executor asks it for responses only
    return WorkflowExecutor(
        engine,
        GroupRunner(runner, num_samples=workload.num_samples, on_failure="drop"),
        tasks,
        Admission(
            batch_size=workload.num_prompts,
            max_staleness=workload.max_staleness,
            max_concurrent=workload.max_concurrent,
            num_batches=num_batches,
            on_stale=workload.on_stale,
            in_waves=workload.max_staleness == 0 and not workload.is_deterministic,
            holds_engine=False,
        ),
        timeout_s=workload.timeout_s,
        episode_timeout_s=workload.episode_timeout_s,
    )


class _SimulatedEpisodes:
    """One request per episode, then the time of its tools and its reward."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sampling: dict[int, SamplingParams] = {}

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeInput) -> Trajectory:
        workload, prompt = self._workload, data.prompt
        length = workload.length_of(int(prompt.uid), data.sample)
        sampling = self._sampling.get(length)
        if sampling is None:
            sampling = self._sampling[length] = SamplingParams(max_new_tokens=length)
        name = f"{prompt.uid}#{data.sample}"
        request = ModelRequest(name, prompt.tokens, sampling, rng_key=data.rng_key, session=name)
        response = await engine.agenerate(request)
        if (wait_s := workload.wait_of(int(prompt.uid), data.sample)) > 0:
            await asyncio.sleep(wait_s)
        return _trajectory(data, response.output_tokens, response.output_versions)


def _trajectory(data: EpisodeInput, counts: Sequence[int], versions: Sequence[int]) -> Trajectory:
    return Trajectory(
        uid=data.prompt.uid,
        sample=data.sample,
        tokens=(*data.prompt.tokens, *counts),
        prompt_length=1,
        loss_mask=(0, *(1 for _ in counts)),
        logprobs=(0.0,) * (1 + len(counts)),
        versions=(NOT_SAMPLED, *versions),
        reward=0.0,
        stop_reason="stop",
    )
