"""For any order of events: nothing too old is trained on, nothing is lost, nothing is counted twice.

The real executor runs in simulated time. Its event loop and the learner share one thread: the loop advances by one turn
whenever the learner waits or works, and an episode takes a random number of turns. A run of hundreds of groups takes
milliseconds, and the same numbers give the same run.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.executor_parts import Rows, runner_of

import headwater.rollout.executor as executor_module
from headwater.core.capabilities import Capabilities
from headwater.core.errors import RewardFailed
from headwater.core.protocols import EpisodeInput
from headwater.core.records import Score, Trajectory
from headwater.core.requests import ModelRequest, ModelResponse, SamplingParams
from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.flight import Dispatch, Flight
from headwater.rollout.group import Group, RolloutBatch
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.ledger import LedgerCounts
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.rollout.staleness import Admission

STALE = "stale"


class SimulatedTasks(AsyncTaskRunner):
    """The event loop without a separate thread: it runs when ``turn`` is called."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.current_thread()
        self.while_waiting = None

    def post(self, function) -> None:
        self.loop.call_soon(function)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.turn(20)
        self.loop.close()


class TurningCondition:
    """The dispatcher's condition: waiting on it advances the event loop."""

    def __init__(self, tasks: SimulatedTasks) -> None:
        self._tasks = tasks

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def notify_all(self) -> None: ...
    def wait(self, timeout: float) -> None:
        self._tasks.turn()


class Engine:
    """Generates a token every few turns, tagged with the current version."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.version = 0
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        rng = random.Random(request.rng_key)
        versions = []
        for _ in range(rng.randint(1, request.sampling.max_new_tokens)):
            turns = rng.choice((1, 1, 1, 2, 5))
            while turns or self.is_paused:
                await asyncio.sleep(0)
                turns = max(0, turns - 1)
            versions.append(self.version)
        count = len(versions)
        return ModelResponse(request.input_tokens, (9,) * count, (-0.1,) * count, tuple(versions), "stop")


@dataclass(frozen=True)
class World:
    """The parameters of one run."""

    seed: int
    batch_size: int = 3
    max_staleness: int = 0
    on_stale: str = "mask"
    max_concurrent: int = 0
    num_steps: int = 8
    max_tokens: int = 8
    fails: float = 0.0
    """The share of prompts that are rejected or fail, half of them each."""
    stragglers: float = 0.0
    """The share of episodes that wait for long after their last token, or before their first."""
    learner_turns: int = 10
    """Turns that an update takes at most."""
    in_waves: bool = False

    def fate(self, uid: str) -> str:
        rng = random.Random(f"{self.seed} fate {uid}")
        if rng.random() >= self.fails:
            return "succeeds"
        return rng.choice(("is rejected", "fails"))


class Episodes:
    """A workflow of up to two turns, some of whose episodes fail, are rejected or take long."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def arun_episode(self, engine, data: EpisodeInput):
        rng = random.Random(f"{self._world.seed} episode {data.rng_key}")
        sampling = SamplingParams(max_new_tokens=self._world.max_tokens)
        is_late, takes_turns = rng.random() < self._world.stragglers, rng.random() < 0.3
        if is_late and rng.random() < 0.5:
            await turns(rng.randint(20, 120))
        tokens, mask, versions = (5, 6), (0, 0), (-1, -1)
        for _ in range(1 + takes_turns):
            response = await engine.agenerate(ModelRequest("r", tokens, sampling, rng.getrandbits(60)))
            tokens += (*response.output_tokens, 4)
            mask += (1,) * len(response.output_tokens) + (0,)
            versions += (*response.output_versions, -1)
        if is_late:
            await turns(rng.randint(20, 120))
        fate = self._world.fate(data.prompt.uid)
        if fate == "fails" and data.sample == 0:
            raise RewardFailed("no reward")
        if fate == "is rejected" and data.sample == 1:
            return None
        score = Score(rng.random())
        logprobs = tuple(-0.1 * each for each in mask)
        return Trajectory(data.prompt.uid, data.sample, tokens, 2, mask, logprobs, versions, score.value, "stop")


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Course:
    """A run in progress: executor, engine, prompts, and the outcome of every dispatch so far."""

    world: World
    tasks: SimulatedTasks
    executor: WorkflowExecutor
    engine: Engine
    rows: Rows
    rng: random.Random
    version: int = 0
    batches: list[RolloutBatch] = field(default_factory=list)
    trained: list[dict] = field(default_factory=list)
    dropped: list[dict] = field(default_factory=list)

    def pass_time(self) -> None:
        self.tasks.turn(self.rng.randint(0, self.world.learner_turns))

    def take(self) -> RolloutBatch:
        batch = self.executor.prepare_batch(self.rows)
        self.batches.append(batch)
        self.check_books()
        return batch

    def update(self) -> None:
        """As in the trainer: the engine gets the weights, then the ledger is updated, then more groups may start."""
        self.pass_time()
        self.version += 1
        self.engine.version = self.version
        self.pass_time()
        self.executor.trained(self.version, str)
        self.executor.set_version(self.version)
        self.check_books()
        self.pass_time()
        self.check_books()

    def check_books(self) -> LedgerCounts:
        counts = self.executor.check_ledger()
        record = self.executor.ledger.take_record()
        self.trained += record["trained"]
        self.dropped += record["dropped"]
        assert (counts.trained, counts.dropped) == (len(self.trained), len(self.dropped))
        return counts

    def run(self) -> None:
        while self.version < self.world.num_steps:
            self.take()
            self.update()


@contextmanager
def course(world: World) -> Iterator[Course]:
    engine = Engine()
    tasks = SimulatedTasks()
    executor = WorkflowExecutor(
        engine,
        GroupRunner(runner_of(Episodes(world)), num_samples=2, on_failure="drop"),
        tasks,
        Admission(
            batch_size=world.batch_size,
            max_staleness=world.max_staleness,
            max_concurrent=world.max_concurrent,
            num_batches=world.num_steps,
            on_stale=world.on_stale,
            in_waves=world.in_waves,
        ),
        timeout_s=60,
        episode_timeout_s=60,
    )
    executor._dispatcher._changed = TurningCondition(tasks)
    check_every_start(executor, world)
    # That a run stops when too many groups fail in a row is tested elsewhere; here any number may.
    with patch.object(executor_module, "_MAX_BARREN_BATCHES", 1000):
        try:
            yield Course(world, tasks, executor, engine, Rows(), random.Random(world.seed))
        finally:
            tasks.close()


def check_every_start(executor: WorkflowExecutor, world: World) -> None:
    start = executor.staleness.start
    max_concurrent = world.max_concurrent or (world.max_staleness + 1) * world.batch_size

    def checked() -> None:
        start()
        counts, version = executor.staleness.counts, executor.status()["version"]
        assert counts.running <= max_concurrent
        assert counts.accepted + counts.running <= (world.max_staleness + version + 1) * world.batch_size

    executor.staleness.start = checked


def worlds(**fixed) -> st.SearchStrategy[World]:
    choices = {
        "seed": st.integers(0, 2**32),
        "batch_size": st.integers(1, 6),
        "max_staleness": st.integers(0, 4),
        "on_stale": st.sampled_from(["mask", "drop", "wait"]),
        "max_concurrent": st.sampled_from([0, 0, 1, 2, 5, 100]),
        "num_steps": st.integers(1, 15),
        "max_tokens": st.sampled_from([1, 4, 12, 40]),
        "fails": st.sampled_from([0.0, 0.1, 0.3]),
        "stragglers": st.sampled_from([0.0, 0.05, 0.3]),
        "learner_turns": st.sampled_from([0, 3, 30, 150]),
    }
    return st.builds(World, **{name: st.just(fixed[name]) if name in fixed else each for name, each in choices.items()})


def oldest_trained(batch: RolloutBatch) -> int | None:
    return min(
        (
            version
            for each in batch.trajectories
            for version, is_trained in zip(each.versions, each.loss_mask, strict=True)
            if is_trained
        ),
        default=None,
    )


@settings(max_examples=20)
@given(worlds())
def test_no_trained_token_is_older_than_the_bound_and_every_dispatch_ends_exactly_once(world):
    with course(world) as run:
        run.run()
        for version, batch in enumerate(run.batches):
            assert len(batch.groups) == world.batch_size
            oldest = oldest_trained(batch)
            assert oldest is not None
            assert version - world.max_staleness <= oldest <= version
        ends = [each["id"] for each in run.trained + run.dropped]
        counts = run.check_books()
        # At the end all that was dispatched is trained or dropped: nothing ran for a batch that never came.
        assert sorted(ends) == list(range(counts.dispatched))
        assert (counts.buffered, counts.in_flight) == (0, 0)
        assert counts.trained == world.num_steps * world.batch_size
        draws = Counter(each["index"] for each in run.trained)
        assert max(draws.values()) == 1


@settings(max_examples=10)
@given(worlds(on_stale="wait"))
def test_an_update_that_waits_for_stragglers_leaves_nothing_to_mask_or_drop(world):
    with course(world) as run:
        run.run()
        assert sum(batch.num_masked_tokens for batch in run.batches) == 0
        assert not any(each.kind == STALE for batch in run.batches for each in batch.dropped)
        assert STALE not in {each["kind"] for each in run.dropped}


@settings(max_examples=10)
@given(worlds(on_stale="drop"))
def test_a_prompt_whose_group_was_too_old_comes_back_once_and_no_token_is_masked(world):
    with course(world) as run:
        run.run()
        dispatches = Counter(each["index"] for each in run.trained + run.dropped)
        stale = Counter(each["index"] for each in run.dropped if each["kind"] == STALE)
        assert set(dispatches) == set(range(run.rows.next))
        for index, count in dispatches.items():
            assert count == (2 if stale[index] else 1)
        assert sum(batch.num_masked_tokens for batch in run.batches) == 0


STRAGGLING = World(
    seed=0, batch_size=4, max_staleness=1, num_steps=25, max_tokens=40, stragglers=0.3, learner_turns=30
)  # fmt: skip
"""Here groups do become too old, so the properties above are not vacuous."""


def test_the_simulation_does_make_groups_too_old():
    with course(replace(STRAGGLING, on_stale="mask")) as run:
        run.run()
        assert sum(batch.num_masked_tokens for batch in run.batches) > 0
        mixed = [each for batch in run.batches for each in batch.trajectories if len(set(each.versions) - {-1}) > 1]
        assert mixed
    with course(replace(STRAGGLING, on_stale="drop")) as run:
        run.run()
        assert sum(each["kind"] == STALE for each in run.dropped) > 0
    with course(replace(STRAGGLING, on_stale="wait")) as run:
        run.run()
        assert any(1 in ages(batch, version) for version, batch in enumerate(run.batches))


def ages(batch: RolloutBatch, version: int) -> set[int]:
    return {version - each for row in batch.trajectories for each in row.versions if each >= 0}


# Checkpoints


@settings(max_examples=15)
@given(worlds(), st.integers(0, 15), st.sampled_from(["taken", "updating", "updated"]), st.integers(0, 60))
def test_a_run_that_resumes_from_a_snapshot_loses_and_repeats_no_draw(world, num_steps, phase, num_turns):
    with course(world) as first:
        while first.version < min(num_steps, world.num_steps - 1):
            first.take()
            first.update()
        if phase != "updated":
            first.take()
        if phase == "updating":  # the engine has the new weights, the books have not
            first.engine.version += 1
        first.tasks.turn(num_turns)
        first.check_books()
        text = first.executor.snapshot(first.rows.state_dict).to_json()
    with course(world) as second:
        restore(second, text, first)
        second.check_books()
        second.run()
        for version, batch in enumerate(second.batches, start=first.version):
            assert len(batch.groups) == world.batch_size
            assert version - world.max_staleness <= oldest_trained(batch) <= version
            assert world.on_stale != "wait" or batch.num_masked_tokens == 0
        counts = second.check_books()
        assert (counts.buffered, counts.in_flight) == (0, 0)
        assert counts.trained == world.num_steps * world.batch_size
        everything = second.trained + second.dropped
        assert sorted(each["id"] for each in everything) == list(range(counts.dispatched))
        # One that was too old is drawn again, once; each draw but for that has one end.
        stale = Counter(each["index"] for each in second.dropped if each["kind"] == STALE)
        ends = Counter(each["index"] for each in everything)
        assert set(ends) == set(range(second.rows.next))
        assert all(count == (2 if stale[index] else 1) for index, count in ends.items())


def restore(second: Course, text: str, first: Course) -> None:
    """Restore what a new process has: the file, the step, and the records of the run directory."""
    snapshot = RolloutSnapshot.from_json(text, second.rows.again)
    second.rows.load_state_dict(snapshot.cursor)
    second.version = second.engine.version = first.version
    second.executor.restore(snapshot, first.version)
    second.trained, second.dropped = list(first.trained), list(first.dropped)


# Staleness zero is synchronous training


@settings(max_examples=15)
@given(world=worlds(max_staleness=0), in_waves=st.booleans())
def test_at_staleness_zero_the_batches_are_those_of_a_plain_loop(world, in_waves):
    with course(replace(world, in_waves=in_waves)) as run:
        run.run()
        for version, (batch, expected) in enumerate(zip(run.batches, plain_loop(world), strict=True)):
            assert batch.groups == expected
            assert ages(batch, version) == {0}
            assert batch.num_masked_tokens == 0


def plain_loop(world: World) -> list[tuple[Group, ...]]:
    """One prompt after the other until the batch is full, without dispatcher, admission and ledger."""
    engine, rows, groups = Engine(), Rows(), GroupRunner(runner_of(Episodes(world)), num_samples=2, on_failure="drop")

    async def next_batch() -> tuple[Group, ...]:
        batch: list[Group] = []
        while len(batch) < world.batch_size:
            flight = Flight(Dispatch(0, rows.take(1)[0]), engine.version, num_episodes=2)
            outcome = await groups.run(flight, lambda _: engine)
            batch += [outcome] if isinstance(outcome, Group) else []
        return tuple(batch)

    batches = []
    with asyncio.Runner() as runner:
        for engine.version in range(world.num_steps):
            batches.append(runner.run(next_batch()))
    return batches
