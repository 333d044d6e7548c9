"""A real executor with scripted workflows and numbered prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout.held_engine import HeldEngine

from headwater.core.protocols import EpisodeInput
from headwater.core.records import DropKind, Prompt, Trajectory
from headwater.core.requests import SamplingParams
from headwater.rollout.dispatcher import AsyncTaskRunner
from headwater.rollout.executor import WorkflowExecutor
from headwater.rollout.group import PromptDraw, RolloutBatch, TrajectoryLimits
from headwater.rollout.group_runner import GroupRunner
from headwater.rollout.staleness import Admission
from headwater.workflows import EngineWorkflow, EpisodeRunner, WorkflowContext


class Scripted:
    """A workflow that does what a function says for each episode."""

    def __init__(self, outcome: Callable[[EpisodeInput], object]) -> None:
        self.outcome = outcome
        self.keys: list[int] = []

    async def arun_episode(self, engine, data):
        self.keys.append(data.rng_key)
        await asyncio.sleep(0)
        result = self.outcome(data)
        return await result if asyncio.iscoroutine(result) else result


def runner_of(workflow: object) -> EpisodeRunner:
    context = WorkflowContext(None, None, SamplingParams(max_new_tokens=8))
    return EpisodeRunner(EngineWorkflow(workflow), context, type(workflow).__name__)


def ok(data: EpisodeInput, reward: float = 1.0, version: int = 0) -> Trajectory:
    return Trajectory(data.prompt.uid, data.sample, (7, 8), 1, (0, 1), (0.0, -0.5), (-1, version), reward, "stop")


def number_of(data: EpisodeInput) -> int:
    return int(data.prompt.uid.removeprefix("row"))


def draw_of(number: int) -> PromptDraw:
    prompt = Prompt(f"row{number}", ({"role": "user", "content": "1+1="},), "1+1=", (5, 6, 7), "arithmetic", "2")
    return PromptDraw(prompt, rng_key=number, index=number)


class Rows:
    """``row0``, ``row1``, ...; ``num_rows`` of them, or an endless stream."""

    def __init__(self, num_rows: int | None = None) -> None:
        self.num_rows = num_rows
        self.next = 0

    def take(self, count: int) -> list[PromptDraw]:
        stop = self.next + count if self.num_rows is None else min(self.num_rows, self.next + count)
        draws = [draw_of(number) for number in range(self.next, stop)]
        self.next = stop
        return draws

    def again(self, index: int, epoch: int) -> PromptDraw:
        return draw_of(index)

    def prepare(self, count: int) -> None:
        self.num_prepared = count

    async def read_ahead(self, count: int, at_least: int) -> int:
        return count

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


@contextmanager
def executor_of(
    workflow: object,
    *,
    batch_size: int = 3,
    num_samples: int = 2,
    engine: object = None,
    on_failure: str = "stop",
    timeout_s: float = 120.0,
    episode_timeout_s: float = 120.0,
    greedy: object = None,
    should_accept: Callable[[Any], bool] | None = None,
    max_retries: int = 0,
    allow_partial_groups: bool = False,
    limits: TrajectoryLimits | None = None,
    **admission: Any,
) -> Iterator[WorkflowExecutor]:
    groups = GroupRunner(
        runner_of(workflow),
        num_samples=num_samples,
        on_failure=on_failure,
        max_retries=max_retries,
        allow_partial_groups=allow_partial_groups,
        greedy=None if greedy is None else runner_of(greedy),
        filters={DropKind.FILTERED: should_accept} if should_accept else None,
        limits=limits,
    )
    with AsyncTaskRunner() as tasks:
        yield WorkflowExecutor(
            engine or HeldEngine(),
            groups,
            tasks,
            Admission(batch_size=batch_size, **admission),
            timeout_s=timeout_s,
            episode_timeout_s=episode_timeout_s,
        )


def one_batch(workflow: object, num_prompts: int = 100, **options: Any) -> RolloutBatch:
    """The first batch, and books that balance after it."""
    with executor_of(workflow, **options) as executor:
        batch = executor.prepare_batch(Rows(num_prompts))
        executor.check_ledger()
        return batch


def uids(batch: RolloutBatch) -> list[str]:
    return [group.prompt.uid for group in batch.groups]
