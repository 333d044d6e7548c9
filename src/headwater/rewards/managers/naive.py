"""Scores one episode at a time with one function: sync or async, with a time limit, and without invented results."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any

from headwater.config.schema import RewardConfig
from headwater.core.errors import RewardFailed, RewardTimedOut, UnknownName
from headwater.core.protocols import ScorableEpisode
from headwater.core.records import MAX_REWARD, Prompt, Score, is_reward
from headwater.core.registry import blaming
from headwater.observe.spans import Spans
from headwater.rewards.managers import REWARD_MANAGERS
from headwater.rewards.scorers import SCORERS

ScoreFunction = Callable[..., Any]

_REMEDY = "fix the function, or set rollout.on_failure=drop to drop and count such rows"


@REWARD_MANAGERS.register
class NaiveRewardManager:
    """Calls ``reward.function``, or the built-in scorer named by the row's ``data_source``."""

    def __init__(self, config: RewardConfig, spans: Spans) -> None:
        self._config = config
        self._spans = spans
        self._custom: ScoreFunction | None = None
        if config.function:
            with blaming(f"reward.function = {config.function}"):
                self._custom = SCORERS.resolve(config.function)
        if self._custom is not None and not callable(self._custom):
            raise RewardFailed(f"reward.function = {config.function}: not callable; name a function")
        self._reads_messages = (
            self._custom is not None
            and "messages" not in config.function_args
            and "messages" in _parameter_names(self._custom)
        )
        self._built_in: dict[str, ScoreFunction] = {}
        """The scorers of the data sources so far."""
        self._free = asyncio.Semaphore(config.max_concurrent)

    async def score(self, episode: ScorableEpisode) -> Score:
        function = self._custom or self._built_in.get(episode.prompt.data_source) or self._find(episode.prompt)
        arguments = dict(self._config.function_args)
        if self._reads_messages:
            arguments["messages"] = [dict(message) for message in episode.messages]
        # reward.timeout_s counts from the start of the call, not while the call waits for a free slot.
        async with nullcontext() if inspect.iscoroutinefunction(function) else self._free:
            with self._spans.span("reward"):
                return await _call(function, episode, arguments, timeout_s=self._config.timeout_s)

    def _find(self, prompt: Prompt) -> ScoreFunction:
        return self._built_in.setdefault(prompt.data_source, _built_in(prompt))


def _built_in(prompt: Prompt) -> ScoreFunction:
    # "reasoning_gym:leg_counting" and "openai/gsm8k" name the scorers reasoning_gym and gsm8k.
    name = prompt.data_source.partition(":")[0].rpartition("/")[2]
    try:
        function: ScoreFunction = SCORERS.resolve(name)
    except UnknownName as error:
        # A row without data_source has the name of its file or task, which is also the first part of its uid.
        is_default = prompt.uid.partition("/")[0].partition("#")[0] == prompt.data_source
        origin = ", the name of its file or task, which is the default for rows without one" if is_default else ""
        raise RewardFailed(
            f"row {prompt.uid}: no built-in scorer for data_source {prompt.data_source!r}{origin} ({error}); "
            "add a data_source to the rows that names a scorer, or set reward.function to your own compute_score"
        ) from error
    return function


async def _call(
    function: ScoreFunction, episode: ScorableEpisode, arguments: Mapping[str, Any], *, timeout_s: float
) -> Score:
    """Score one episode. Any failure becomes ``RewardFailed`` with the function, the row and the cause."""
    prompt = episode.prompt
    call = partial(
        function,
        data_source=prompt.data_source,
        solution_str=episode.text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        **arguments,
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        if inspect.iscoroutinefunction(function):
            result = await asyncio.wait_for(call(), timeout_s)
        else:
            result = await asyncio.wait_for(_in_daemon_thread(call), timeout_s)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, timeout_s)
    except TimeoutError as error:
        raise RewardTimedOut(
            f"reward {name} on row {prompt.uid}: no result within {timeout_s:g} s; "
            "make it faster or raise reward.timeout_s"
        ) from error
    except RewardFailed:
        raise
    except Exception as error:  # a custom function may raise anything; it becomes a counted failure
        raise RewardFailed(
            f"reward {name} on row {prompt.uid} (data_source {prompt.data_source!r}) raised "
            f"{type(error).__name__}: {error}{_raised_at(error)}; {_REMEDY}"
        ) from error
    try:
        return _to_score(result)
    except Exception as error:  # a custom number type may raise anything too
        raise RewardFailed(
            f"reward {name}{_defined_at(function)} on row {prompt.uid} (data_source {prompt.data_source!r}) {error}; "
            f"{_REMEDY}"
        ) from error


async def _in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a daemon thread. Unlike a thread pool, a call that hangs cannot delay process exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_outcome(value)

    def work() -> None:
        try:
            done = partial(settle, outcome.set_result, call())
        except BaseException as error:  # noqa: BLE001  raised again in the awaiting coroutine
            done = partial(settle, outcome.set_exception, error)
        # If the run ended before this call, the loop is closed and the result is not needed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await outcome


def _to_score(result: Any) -> Score:
    """A score from a function's result: a finite number, or a dict with a finite number under ``score``."""
    info: Mapping[str, Any] = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"returned a dict without 'score'; its keys are {sorted(map(str, result))}")
        value = result["score"]
        info = {str(key): entry for key, entry in result.items() if key != "score"}
    if not isinstance(value, (Real, bool)):
        raise TypeError(f"returned {value!r}; return a finite number, or a dict with one under 'score'")
    if not is_reward(value):
        raise TypeError(f"returned {value!r}; return a finite number within ±{MAX_REWARD:g}")
    return Score(float(value), info)


def _parameter_names(function: ScoreFunction) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        return set()


def _defined_at(function: ScoreFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)  # a callable object has none
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _raised_at(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
