"""Runs workflows: from prompts to complete groups of trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeVar

from headwater.core.errors import HeadwaterError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeInput, InferenceEngine, RolloutWorkflow
from headwater.core.records import Prompt, Trajectory
from headwater.core.waits import named_wait
from headwater.rollout.group import Dropped, Group, RolloutBatch

T = TypeVar("T")
KeyOf = Callable[[Prompt, int], int]
"""Randomness key of the k-th sample of a prompt."""

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
        draw_prompts: Callable[[int], Sequence[Prompt]],
        key_of: KeyOf,
        on_group: Callable[[], None] = lambda: None,
    ) -> RolloutBatch:
        """Draw prompts and run them until ``num_groups`` groups are complete. ``on_group`` is called at each one."""
        # A Runner turns Ctrl-C into a cancellation, so episodes end in order and nothing keeps running behind our back.
        with asyncio.Runner() as runner:
            return runner.run(self._gather(num_groups, draw_prompts, key_of, on_group))

    async def _gather(
        self,
        num_groups: int,
        draw_prompts: Callable[[int], Sequence[Prompt]],
        key_of: KeyOf,
        on_group: Callable[[], None],
    ) -> RolloutBatch:
        groups: list[Group] = []
        dropped: list[Dropped] = []
        while len(groups) < num_groups:
            prompts = draw_prompts(num_groups - len(groups))
            finished = [0]

            def progress(prompts: Sequence[Prompt] = prompts, finished: list[int] = finished) -> str:
                return f"the trainer waits for rollouts: {finished[0]} of {len(prompts)} groups are complete"

            def group_done(finished: list[int] = finished) -> None:
                finished[0] += 1
                on_group()

            running = _all_or_first_error(self._run_group(prompt, key_of, group_done) for prompt in prompts)
            for outcome in await named_wait(running, progress, hard_limit_s=self._timeout_s):
                (groups if isinstance(outcome, Group) else dropped).append(outcome)  # type: ignore[arg-type]
            if not groups and len(dropped) >= _ROUNDS_WITHOUT_ANY_GROUP * num_groups:
                causes = "\n".join(f"  - {each.uid}: {each.reason}" for each in dropped[:3])
                raise RolloutFailed(f"all {len(dropped)} groups of this step were dropped; the first causes:\n{causes}")
        return RolloutBatch(tuple(groups), tuple(dropped))

    async def _run_group(self, prompt: Prompt, key_of: KeyOf, done: Callable[[], None]) -> Group | Dropped:
        episodes = (
            self._workflow.arun_episode(self._engine, EpisodeInput(prompt, sample, key_of(prompt, sample)))
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
        done()
        return self._to_group(prompt, results)

    def _to_group(self, prompt: Prompt, results: Sequence[object]) -> Group | Dropped:
        trajectories: list[Trajectory] = []
        for result in results:
            if result is None:
                return Dropped(prompt.uid, "rejected by the workflow")
            parts = result if isinstance(result, list) else [result]
            wrong = next((part for part in parts if not isinstance(part, Trajectory)), None)
            if wrong is not None:
                raise RolloutFailed(
                    f"workflow {type(self._workflow).__name__} returned a {type(wrong).__name__} for row {prompt.uid}; "
                    "return a Trajectory, a list of them, or None to reject the episode"
                )
            trajectories.extend(parts)
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
