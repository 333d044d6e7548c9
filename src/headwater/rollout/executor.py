"""Runs workflows: from prompts to complete groups of trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeVar

from headwater.core.errors import HeadwaterError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput, InferenceEngine, RolloutWorkflow
from headwater.core.randomness import derive_key
from headwater.core.records import Prompt, Trajectory
from headwater.core.waits import named_wait
from headwater.rollout.group import Dropped, Group, PromptDraw, RolloutBatch

T = TypeVar("T")
DrawPrompts = Callable[[int], Sequence[PromptDraw]]
"""Gives the next so many prompts; fewer when there are no more."""

_ROUNDS_WITHOUT_ANY_GROUP = 2
"""Whole batches of prompts that may fail in a row before the run stops instead of looping."""


class WorkflowExecutor:
    """Runs ``num_samples`` episodes per prompt and gathers them into groups.

    A rejected episode (``None``) or, under ``on_failure="drop"``, a failed one drops its whole group: counted, with its
    reason, and replaced by another prompt.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        *,
        num_samples: int,
        timeout_s: float,
        on_failure: Literal["stop", "drop"],
    ) -> None:
        self._engine = engine
        self._workflow = workflow
        self._num_samples = num_samples
        self._timeout_s = timeout_s
        self._on_failure = on_failure

    def rollout_batch(
        self,
        num_groups: int,
        draw_prompts: DrawPrompts,
    ) -> RolloutBatch:
        """Draw prompts and run them until ``num_groups`` groups are complete, or until there are no more prompts."""
        # A Runner turns Ctrl-C into a cancellation, so episodes end in order and nothing keeps running behind our back.
        with asyncio.Runner() as runner:
            return runner.run(self._gather(num_groups, draw_prompts))

    async def _gather(
        self,
        num_groups: int,
        draw_prompts: DrawPrompts,
    ) -> RolloutBatch:
        groups: list[Group] = []
        dropped: list[Dropped] = []
        while len(groups) < num_groups and (draws := draw_prompts(num_groups - len(groups))):
            tasks = [asyncio.ensure_future(self._run_group(draw)) for draw in draws]

            def progress(tasks: list[asyncio.Task[Group | Dropped]] = tasks) -> str:
                return f"the trainer waits for rollouts: {sum(task.done() for task in tasks)} of {len(tasks)} are done"

            for outcome in await named_wait(_all_or_first_error(tasks), progress, hard_limit_s=self._timeout_s):
                if isinstance(outcome, Group):
                    groups.append(outcome)
                else:
                    dropped.append(outcome)
            if not groups and len(dropped) >= _ROUNDS_WITHOUT_ANY_GROUP * num_groups:
                break
        if not groups:
            causes = "\n".join(f"  - {each.uid}: {each.reason}" for each in dropped[:3])
            raise RolloutFailed(f"all {len(dropped)} groups of this step were dropped; the first causes:\n{causes}")
        return RolloutBatch(tuple(groups), tuple(dropped))

    async def _run_group(self, draw: PromptDraw) -> Group | Dropped:
        prompt = draw.prompt
        episodes = (
            self._workflow.arun_episode(self._engine, EpisodeInput(prompt, sample, derive_key(draw.rng_key, sample)))
            for sample in range(self._num_samples)
        )
        try:
            results = await _all_or_first_error(episodes)
        except (RewardFailed, RolloutFailed) as error:
            if self._on_failure == "stop":
                raise
            return Dropped(prompt.uid, str(error))
        except HeadwaterError:
            raise
        except Exception as error:
            name = type(self._workflow).__name__
            message = f"workflow {name} on row {prompt.uid} raised {type(error).__name__}: {error}"
            if self._on_failure == "stop":
                raise RolloutFailed(message) from error
            return Dropped(prompt.uid, message)
        return self._to_group(prompt, results)

    def _to_group(self, prompt: Prompt, results: Sequence[object]) -> Group | Dropped:
        trajectories: list[Trajectory] = []
        for result in results:
            if result is None:
                return Dropped(prompt.uid, "rejected by the workflow")
            parts = result if isinstance(result, list) else [result]
            for part in parts:
                if not isinstance(part, Trajectory):
                    name = type(self._workflow).__name__
                    raise RolloutFailed(
                        f"workflow {name} returned a {type(part).__name__} for row {prompt.uid}; "
                        "return a Trajectory, a list of them, or None to reject the episode"
                    )
                trajectories.append(part)
        return Group(prompt, tuple(trajectories))


async def _all_or_first_error(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order. At the first error the others are cancelled and waited for, so that none outlives the call."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
