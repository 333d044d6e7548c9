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

GREEDY = -1
"""The sample number of an episode that only its reward is wanted of."""

_TURNS_TO_FIRST_REQUEST = 8
"""Turns of the event loop in which a workflow that asks the engine first thing has asked: through group and episode."""

_MAX_BARREN_ROUNDS = 2
"""Rounds of prompts in a row that may yield no group at all before the run stops instead of looping."""


class WorkflowExecutor:
    """Runs ``num_samples`` episodes per prompt and gathers them into groups.

    A rejected episode (``None``) or, under ``on_failure="drop"``, a failed one drops its whole group: counted, with its
    reason, and replaced by another prompt. So does a group that ``should_accept`` refuses; after ``max_rounds`` rounds
    of prompts a batch goes on with the groups it has. ``greedy`` runs one more episode per prompt, for its reward.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        loop: asyncio.Runner,
        *,
        num_samples: int,
        timeout_s: float,
        on_failure: Literal["stop", "drop"],
        greedy: RolloutWorkflow | None = None,
        should_accept: Callable[[Group], bool] | None = None,
        max_rounds: int | None = None,
    ) -> None:
        self._engine = engine
        self._workflow = workflow
        self._loop = loop
        self._num_samples = num_samples
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._greedy = greedy
        self._should_accept = should_accept
        self._max_rounds = max_rounds

    def rollout_batch(self, num_groups: int, draw_prompts: DrawPrompts) -> RolloutBatch:
        """Draw prompts and run them until ``num_groups`` groups are complete, or until there are no more prompts."""
        groups: list[Group] = []
        dropped: list[Dropped] = []

        def progress() -> str:
            lost = f", {len(dropped)} were dropped" if dropped else ""
            return f"the trainer waits for rollouts: {len(groups)} of {num_groups} groups are complete{lost}"

        gathering = self._gather(num_groups, draw_prompts, groups, dropped)
        try:
            self._loop.run(named_wait(gathering, progress, hard_limit_s=self._timeout_s))
        except BaseException:
            self._loop.run(_cancel_all_others())
            raise
        return RolloutBatch(tuple(groups), tuple(dropped))

    async def _gather(
        self, num_groups: int, draw_prompts: DrawPrompts, groups: list[Group], dropped: list[Dropped]
    ) -> None:
        num_barren_rounds = num_rounds = 0
        while (
            len(groups) < num_groups
            and num_rounds != self._max_rounds
            and (draws := draw_prompts(num_groups - len(groups)))
        ):
            num_before, num_rounds = len(groups), num_rounds + 1
            for outcome in await self._run_groups(draws):
                if isinstance(outcome, Group):
                    groups.append(outcome)
                else:
                    dropped.append(outcome)
            num_barren_rounds = 0 if len(groups) > num_before else num_barren_rounds + 1
            # Where rounds have no limit, nothing else would end a run whose rollouts all fail.
            if num_barren_rounds == _MAX_BARREN_ROUNDS and self._max_rounds is None:
                raise _too_few(groups, dropped)
        if not groups:
            raise _too_few(groups, dropped)

    async def _run_groups(self, draws: Sequence[PromptDraw]) -> list[Group | Dropped]:
        """All side by side.

        The engine is held until their first requests are there: what it computes together decides the last bits of
        log-probs, and must not depend on how fast requests arrive.
        """
        self._engine.pause()
        running = asyncio.ensure_future(_all_or_first_error([self._run_group(draw) for draw in draws]))
        try:
            for _ in range(_TURNS_TO_FIRST_REQUEST):
                await asyncio.sleep(0)
        finally:
            self._engine.resume()
        return await running

    async def _run_group(self, draw: PromptDraw) -> Group | Dropped:
        prompt = draw.prompt
        episodes = (
            self._workflow.arun_episode(self._engine, EpisodeInput(prompt, sample, derive_key(draw.rng_key, sample)))
            for sample in range(self._num_samples)
        )
        greedy = [self._greedy.arun_episode(self._engine, EpisodeInput(prompt, GREEDY, 0))] if self._greedy else []
        try:
            results = await _all_or_first_error([*episodes, *greedy])
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
        group = self._to_group(prompt, results)
        if isinstance(group, Group) and self._should_accept is not None and not self._should_accept(group):
            return Dropped(prompt.uid, "all its samples scored the same (algorithm.filter_groups)", is_filtered=True)
        return group

    def _to_group(self, prompt: Prompt, results: Sequence[object]) -> Group | Dropped:
        if any(result is None or result == [] for result in results):
            return Dropped(prompt.uid, "rejected by the workflow")
        samples = self._trajectories(prompt, results[: self._num_samples])
        greedy = self._trajectories(prompt, results[self._num_samples :])
        return Group(prompt, tuple(samples), baseline=greedy[-1].reward if greedy else None)

    def _trajectories(self, prompt: Prompt, results: Sequence[object]) -> list[Trajectory]:
        trajectories: list[Trajectory] = []
        for result in results:
            parts = result if isinstance(result, list) else [result]
            for part in parts:
                if not isinstance(part, Trajectory):
                    name = type(self._workflow).__name__
                    raise RolloutFailed(
                        f"workflow {name} returned a {type(part).__name__} for row {prompt.uid}; "
                        "return a Trajectory, a list of them, or None to reject the episode"
                    )
                trajectories.append(part)
        return trajectories


def _too_few(groups: Sequence[Group], dropped: Sequence[Dropped]) -> RolloutFailed:
    causes = "\n".join(f"  - {each.uid}: {each.reason}" for each in dropped[:3])
    return RolloutFailed(
        f"{len(dropped)} groups of this step were dropped and only {len(groups)} are complete; "
        f"the first causes:\n{causes}"
    )


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


async def _cancel_all_others() -> None:
    """After Ctrl-C or an error nothing may go on behind our back; engines stop what nobody waits for."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
