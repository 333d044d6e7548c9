"""Runs the episodes of one prompt: a complete group, or a reason why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal, TypeVar

from headwater.core.errors import HeadwaterError, RewardFailed, RolloutFailed
from headwater.core.protocols import EpisodeEngine, EpisodeInput, RolloutWorkflow
from headwater.core.randomness import derive_key
from headwater.core.records import Prompt, Trajectory
from headwater.rollout.flight import Flight
from headwater.rollout.group import Dropped, Group

T = TypeVar("T")

GREEDY = -1
"""The sample number of an episode that only its reward is wanted of."""


class GroupRunner:
    """Runs ``num_samples`` episodes per prompt, side by side.

    A rejected episode (``None``) or, under ``on_failure="drop"``, a failed one drops its whole group, with its reason;
    so does a group that ``should_accept`` refuses. ``greedy`` runs one more episode per prompt, for its reward.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        *,
        num_samples: int,
        on_failure: Literal["stop", "drop"],
        greedy: RolloutWorkflow | None = None,
        should_accept: Callable[[Group], bool] | None = None,
    ) -> None:
        self._workflow = workflow
        self._num_samples = num_samples
        self._on_failure = on_failure
        self._greedy = greedy
        self._should_accept = should_accept

    @property
    def num_episodes(self) -> int:
        return self._num_samples + (self._greedy is not None)

    async def run(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Group | Dropped:
        """``engine_of`` a sample's number is what its episode asks."""
        prompt = flight.dispatch.draw.prompt
        try:
            group = self._to_group(prompt, await _all_or_first_error(self._episodes(flight, engine_of)))
        except asyncio.CancelledError:
            if flight.has_timed_out:
                return self._failed(prompt, RolloutFailed(f"row {prompt.uid}: {_too_slow(flight)}"))
            if _is_called_off():
                raise
            return self._failed(prompt, RolloutFailed(f"{self._where(prompt)} waited for something that was cancelled"))
        except (RewardFailed, RolloutFailed) as error:
            return self._failed(prompt, error)
        except HeadwaterError:
            raise
        except Exception as error:  # noqa: BLE001  a workflow is anybody's code
            message = f"{self._where(prompt)} raised {type(error).__name__}: {error}"
            return self._failed(prompt, RolloutFailed(message), error)
        return self._accepted(group)

    def _episodes(self, flight: Flight, engine_of: Callable[[int], EpisodeEngine]) -> Iterable[Awaitable[object]]:
        draw = flight.dispatch.draw
        for sample in range(self._num_samples):
            data = EpisodeInput(draw.prompt, sample, derive_key(draw.rng_key, sample))
            yield self._episode(self._workflow, flight, engine_of(sample), data)
        if self._greedy is not None:
            data = EpisodeInput(draw.prompt, GREEDY, 0)
            yield self._episode(self._greedy, flight, engine_of(GREEDY), data)

    @staticmethod
    async def _episode(workflow: RolloutWorkflow, flight: Flight, engine: EpisodeEngine, data: EpisodeInput) -> object:
        result = await workflow.arun_episode(engine, data)
        flight.num_done += 1
        return result

    def _where(self, prompt: Prompt) -> str:
        return f"workflow {type(self._workflow).__name__} on row {prompt.uid}"

    def _failed(self, prompt: Prompt, error: HeadwaterError, cause: Exception | None = None) -> Dropped:
        if self._on_failure == "stop":
            raise error from cause
        return Dropped(prompt.uid, str(error))

    def _accepted(self, group: Group | Dropped) -> Group | Dropped:
        if isinstance(group, Group) and self._should_accept is not None and not self._should_accept(group):
            reason = "all its samples scored the same (algorithm.filter_groups)"
            return Dropped(group.prompt.uid, reason, is_filtered=True)
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


def _is_called_off() -> bool:
    """Whether it is this task that was cancelled, and not something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _too_slow(flight: Flight) -> str:
    return (
        f"its episodes took longer than rollout.episode_timeout_s ({flight.seconds:.0f} s; {flight.doing()}); "
        "raise it, or find out what they wait for"
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
