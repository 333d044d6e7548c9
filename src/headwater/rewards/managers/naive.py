"""Scores one episode at a time with one function: sync or async, with a time limit, and without invented results."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
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
from headwater.rewards.scorers import SCORERS, scorer_of
from headwater.rewards.signature import Signature, defined_at, read_signature

ScoreFunction = Callable[..., Any]

_REMEDY = "fix the function, or set rollout.on_failure=drop to drop and count such rows"


@dataclass(frozen=True)
class _Scorer:
    """A scoring function and the arguments that it takes."""

    function: ScoreFunction
    signature: Signature
    name: str
    is_async: bool
    is_custom: bool

    @classmethod
    def of(cls, function: ScoreFunction, config: RewardConfig, setting: str) -> _Scorer:
        signature = read_signature(function, config.function_args, setting)
        name = getattr(function, "__qualname__", type(function).__name__)
        return cls(function, signature, name, inspect.iscoroutinefunction(function), bool(config.function))

    def arguments(self, episode: ScorableEpisode) -> dict[str, Any]:
        """The values that the function takes."""
        prompt, signature = episode.prompt, self.signature
        values: dict[str, Any] = {
            "data_source": prompt.data_source,
            "solution_str": episode.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        if "messages" in signature.names:
            values["messages"] = [dict(message) for message in episode.messages]
        if signature.is_batched:
            values["prompts"], values["completions"] = _as_conversation(episode)
        taken = {name: value for name, value in values.items() if name in signature.names}
        if signature.columns or signature.takes_rest:
            signature.check_row(prompt)
            rest = prompt.columns.keys() - {*values, "prompt"} if signature.takes_rest else frozenset()
            wanted = signature.columns | rest
            taken |= {name: value for name, value in prompt.columns.items() if name in wanted}
        return {name: [value] for name, value in taken.items()} if signature.is_batched else taken


@REWARD_MANAGERS.register
class NaiveRewardManager:
    """Calls ``reward.function``, or the built-in scorer named by the row's ``data_source``."""

    def __init__(self, config: RewardConfig, spans: Spans) -> None:
        self._config = config
        self._spans = spans
        self._custom = _Scorer.of(_find_custom(config.function), config, _setting(config)) if config.function else None
        self._built_in: dict[str, _Scorer] = {}
        """The scorers of the data sources so far."""
        self._free = asyncio.Semaphore(config.max_concurrent)

    def check_row(self, prompt: Prompt) -> None:
        """Raise ``RewardFailed`` if the row has no scorer, or lacks something that its scorer requires."""
        self._scorer(prompt).signature.check_row(prompt)

    def reads_column(self, name: str) -> bool:
        """Whether ``reward.function`` receives a column of the data."""
        signature = self._custom.signature if self._custom is not None else None
        return signature is not None and (signature.takes_rest or name in signature.columns)

    async def score(self, episode: ScorableEpisode) -> Score:
        scorer = self._scorer(episode.prompt)
        # reward.timeout_s counts from the start of the call, not while the call waits for a free slot.
        async with nullcontext() if scorer.is_async else self._free:
            with self._spans.span("reward"):
                return await _call(scorer, episode, self._config)

    def _scorer(self, prompt: Prompt) -> _Scorer:
        return self._custom or self._built_in.get(prompt.data_source) or self._find(prompt)

    def _find(self, prompt: Prompt) -> _Scorer:
        name, function = _built_in(prompt)
        return self._built_in.setdefault(prompt.data_source, _Scorer.of(function, self._config, f"scorer {name}"))


def _setting(config: RewardConfig) -> str:
    return f"reward.function = {config.function}"


def _find_custom(name: str) -> ScoreFunction:
    """The function that ``reward.function`` names. A file without the name of a function provides compute_score."""
    with blaming(f"reward.function = {name}"):
        if name.endswith(".py"):
            try:
                found = SCORERS.resolve(f"{name}:{_DEFAULT_FUNCTION}")
            except UnknownName as error:
                raise UnknownName(f"{error}; name the function as {name}:function") from error
        else:
            found = SCORERS.resolve(name)
    if inspect.isclass(found) or not callable(found):
        what = "is a class" if inspect.isclass(found) else "not callable"
        raise RewardFailed(f"reward.function = {name}: {what}; name a function")
    function: ScoreFunction = found
    return function


_DEFAULT_FUNCTION = "compute_score"


def _built_in(prompt: Prompt) -> tuple[str, ScoreFunction]:
    try:
        name = scorer_of(prompt.data_source)
        return name, SCORERS.resolve(name)
    except UnknownName as error:
        # A row without data_source has the name of its file or task, which is also the first part of its uid.
        is_default = prompt.uid.partition("/")[0].partition("#")[0] == prompt.data_source
        origin = ", the name of its file or task, which is the default for rows without one" if is_default else ""
        raise RewardFailed(
            f"row {prompt.uid}: no built-in scorer for data_source {prompt.data_source!r}{origin} ({error}); "
            "add a data_source to the rows that names a scorer, or set reward.function to your own compute_score"
        ) from error


def _as_conversation(episode: ScorableEpisode) -> tuple[Any, Any]:
    """Prompt and completion: text if the row's prompt is plain text, otherwise lists of messages."""
    plain = episode.prompt.columns.get("prompt")
    if isinstance(plain, str):
        return plain, episode.text
    messages = [dict(message) for message in episode.messages]
    start = len(episode.prompt.messages)
    return messages[:start], messages[start:]


async def _call(scorer: _Scorer, episode: ScorableEpisode, config: RewardConfig) -> Score:
    """Score one episode. Any failure becomes ``RewardFailed`` with the function, the row and the cause."""
    prompt, function, timeout_s = episode.prompt, scorer.function, config.timeout_s
    where = f"row {prompt.uid} (data_source {prompt.data_source!r})"
    try:
        call = partial(function, **scorer.arguments(episode), **config.function_args)
        if scorer.is_async:
            result = await asyncio.wait_for(call(), timeout_s)
        else:
            result = await asyncio.wait_for(_in_daemon_thread(call, has_loop=scorer.is_custom), timeout_s)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, timeout_s)
    except TimeoutError as error:
        raise RewardTimedOut(
            f"reward {scorer.name} on row {prompt.uid}: no result within {timeout_s:g} s; "
            "make it faster or raise reward.timeout_s"
        ) from error
    except RewardFailed:
        raise
    except Exception as error:  # a custom function may raise anything; it becomes a counted failure
        raise RewardFailed(
            f"reward {scorer.name} on {where} raised {type(error).__name__}: {error}{_raised_at(error, function)}; "
            f"{_REMEDY}"
        ) from error
    try:
        return _to_score(_only(result) if scorer.signature.is_batched else result)
    except Exception as error:  # a custom number type may raise anything too
        raise RewardFailed(f"reward {scorer.name}{defined_at(function)} on {where} {error}; {_REMEDY}") from error


async def _in_daemon_thread(call: Callable[[], Any], *, has_loop: bool) -> Any:
    """Run a blocking call in a daemon thread. Unlike a thread pool, a call that hangs cannot delay process exit.

    With ``has_loop``, the thread has an event loop, for functions that call ``get_event_loop().run_until_complete``.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_outcome(value)

    def work() -> None:
        try:
            with _event_loop() if has_loop else nullcontext():
                done = partial(settle, outcome.set_result, call())
        except BaseException as error:  # noqa: BLE001  raised again in the awaiting coroutine
            done = partial(settle, outcome.set_exception, error)
        # If the run ended before this call, the loop is closed and the result is not needed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await outcome


@contextlib.contextmanager
def _event_loop() -> Iterator[None]:
    """An event loop for this thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _only(result: Any) -> Any:
    """The score in the list that a function of lists returns."""
    try:
        (value,) = result
    except (TypeError, ValueError):
        raise TypeError(f"returned {result!r} for one completion; return a list with one number") from None
    return value


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


def _raised_at(error: BaseException, function: ScoreFunction) -> str:
    """Where an error was raised: the last line of the function's own file, or else the last line of all."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [each for each in frames if code is not None and each.filename == code.co_filename]
    return f" at {each.filename}:{each.lineno}" if (each := next(reversed(own or frames), None)) else ""
