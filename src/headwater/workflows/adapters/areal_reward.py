"""Reward functions of workflows for AReaL: ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)``."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.core.errors import RewardFailed, RewardTimedOut, RolloutFailed
from headwater.core.records import Answer, Prompt, ScorableEpisode
from headwater.core.registry import EXTENSION_PREFIX
from headwater.rewards.functions import ScoringFunction, Signature
from headwater.rewards.scoring import Scoring, in_daemon_thread
from headwater.workflows.adapters.journal import Journal, current_journal
from headwater.workflows.episode import WorkflowContext


class RunReward:
    """The run's reward as a function for workflows: it scores the completion by the recipe's ``reward`` settings."""

    def __init__(self, context: WorkflowContext) -> None:
        self._context = context

    async def __call__(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        journal = current_journal()
        if journal is None:
            raise RolloutFailed("the run's reward can be computed only within an episode; call it in arun_episode")
        text = self._context.tokenizer.decode(list(completion_ids), skip_special_tokens=True)
        score = await self._context.reward.score(Answer(journal.episode.prompt, text))
        journal.note_score(score)
        return score.value


class AsyncRewardWrapper:
    """Calls a reward function without blocking other episodes.

    In an episode, functions run as the run's own do: in worker processes, with the limits ``reward.timeout_s`` and
    ``reward.max_retries``, and failures are counted. With a reward manager of your own, plain functions run in threads,
    and ``timeout_seconds`` and ``max_retries`` are the limits. A function that fails never gives a reward of 0.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 3,
        **kwargs: Any,
    ) -> None:
        self.reward_fn = reward_fn
        self.timeout_seconds = timeout_seconds
        self.max_retries = max_retries
        self._name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        self._function = None if isinstance(reward_fn, RunReward) else _scoring_function(reward_fn)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            return await self.reward_fn(*args, **kwargs)
        journal = current_journal()
        reward = journal.episode.context.reward if journal is not None else None
        if journal is not None and isinstance(reward, Scoring):
            return await self._scored(self._function, reward, journal, self._by_name(args, kwargs))
        return await self._called(*args, **kwargs)

    async def _scored(
        self, function: _ArealFunction, reward: Scoring, journal: Journal, arguments: dict[str, Any]
    ) -> float:
        score = await reward.call(function, _Call(journal.episode.prompt, arguments))
        journal.note_score(score)
        return score.value

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by the names of the function's parameters."""
        try:
            bound = inspect.signature(self.reward_fn).bind(*args, **kwargs)
        except TypeError as error:
            raise RewardFailed(f"reward {self._name} cannot be called: {error}") from error
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise RewardFailed(f"reward {self._name}: replace its parameter *{name} by parameters with names")
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return named

    async def _called(self, *args: Any, **kwargs: Any) -> Any:
        for num_left in reversed(range(self.max_retries + 1)):
            try:
                return await asyncio.wait_for(self._in_process(*args, **kwargs), self.timeout_seconds)
            except TimeoutError as error:
                raise RewardTimedOut(
                    f"reward {self._name}: no result within {self.timeout_seconds:g} s; make it faster, or pass a "
                    "larger timeout_seconds to AsyncRewardWrapper"
                ) from error
            except RewardFailed:
                raise
            except Exception as error:  # a user's function may raise anything
                if not num_left:
                    raise RewardFailed(f"reward {self._name} raised {type(error).__name__}: {error}") from error
        raise AssertionError("the last attempt ends in a result or an error")

    async def _in_process(self, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(self.reward_fn):
            return await self.reward_fn(*args, **kwargs)
        result = await in_daemon_thread(partial(self.reward_fn, *args, **kwargs))
        return await result if isinstance(result, Awaitable) else result


@dataclass(frozen=True)
class _Call:
    """The arguments of one call. It takes the place of an episode."""

    prompt: Prompt
    arguments: dict[str, Any]
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()


class _ArealFunction(ScoringFunction):
    """A function that is called with given arguments."""

    def one_call(self, episodes: Sequence[ScorableEpisode]) -> dict[str, Any]:
        (call,) = episodes
        assert isinstance(call, _Call)
        return call.arguments


def _scoring_function(function: Callable[..., Any]) -> _ArealFunction:
    is_async = inspect.iscoroutinefunction(function)
    return _ArealFunction(function, _path_of(function), {}, Signature(frozenset()), is_async, is_quick=False)


def _path_of(function: Callable[..., Any]) -> str:
    """What a worker process finds the function by; empty if only this process has it."""
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    if not name.isidentifier() or module is None or getattr(module, name, None) is not function:
        return ""
    if module.__name__.startswith(EXTENSION_PREFIX):
        return f"{module.__file__}:{name}"
    return "" if module.__name__ == "__main__" else f"{module.__name__}:{name}"
