"""What all reward managers share: which function scores an episode, where it runs, and what happens if it fails.

An episode is scored as soon as it ends, while the engine generates the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headwater.config.rollout_schema import RewardConfig, SandboxConfig
from headwater.core.errors import RewardFailed, RewardsUnreliable, RewardTimedOut
from headwater.core.records import Prompt, ScorableEpisode, Score
from headwater.core.registry import is_path
from headwater.observe.spans import Spans
from headwater.rewards.functions import Failure, ScoreFunction, ScoringFunction, failure_of, read_result, to_score
from headwater.rewards.pool import TIMED_OUT, CallPool, WorkerPool, usable_cores

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 256
"""Calls over which ``reward.max_failed_share`` is measured."""
CONCLUSIVE_START = 32
"""If this many calls at the start of a run have all failed, the others will fail, too."""

_OF_CALLS = frozenset({"where", "workers", "max_concurrent", "timeout_s", "max_retries"})
"""The settings of ``reward`` that say how a function is called."""
_REMEDY = "fix the function, or set rollout.on_failure=drop to drop and count such rows"


@dataclass(frozen=True)
class Part:
    """One function of a mixture, or the only one."""

    name: str
    weight: float
    function: ScoringFunction | None
    """None for the built-in scorer that the row's ``data_source`` names."""
    settings: Mapping[str, Any]


class Scoring:
    """Base of the reward managers. ``Scoring(config, spans, function)`` scores with a function object, in this process.

    The names of ``reward.functions`` become entries of the score's info, and so do the other values that a function
    returns in its dict.
    """

    def __init__(
        self,
        config: RewardConfig,
        spans: Spans,
        function: ScoreFunction | None = None,
        *,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        """``sandbox`` is for built-in scorers that run code."""
        self._config = config
        self._sandbox = sandbox
        self._spans = spans
        self._parts = tuple(
            part if part.function is None else replace(part, function=self._with_sandbox(part.function))
            for part in _parts(config, function)
        )
        self._built_in: dict[tuple[str, str], ScoringFunction] = {}
        """The scorers so far, by the part and the data source."""
        self._failures = Failures(config.max_failed_share)
        num_workers = config.workers or usable_cores()
        self._plain_pool: CallPool = WorkerPool(num_workers)
        self._async_pool: CallPool = WorkerPool(1, config.max_concurrent)
        self._free_threads = asyncio.Semaphore(num_workers)
        self._free_async = asyncio.Semaphore(config.max_concurrent)

    def check_row(self, prompt: Prompt) -> None:
        """Raise ``RewardFailed`` if the row has no scorer, or lacks something that its scorer requires."""
        for part in self._parts:
            self._function(part, prompt).signature.check_row(prompt)

    def runs_code(self, prompt: Prompt) -> bool:
        """Whether a scorer of this row uses the sandbox."""
        return any("sandbox" in self._function(part, prompt).settings for part in self._parts)

    def unread_settings(self, prompt: Prompt) -> frozenset[str]:
        """The settings of ``reward`` that have no effect on the calls of any scorer of this row."""
        return frozenset.intersection(*(self._unread_by(self._function(part, prompt)) for part in self._parts))

    def _unread_by(self, function: ScoringFunction) -> frozenset[str]:
        if function.is_quick:
            return _OF_CALLS
        blocks = self._config.where == "event_loop" and not function.is_async
        return frozenset({"workers", "timeout_s"}) if blocks else frozenset()

    def reads_column(self, name: str) -> bool:
        """Whether a function that the config names receives a column of the data."""
        signatures = [part.function.signature for part in self._parts if part.function is not None]
        return any(signature.takes_rest or name in signature.columns for signature in signatures)

    def use(self, pool: CallPool) -> None:
        """Call functions there instead of in worker processes of this machine."""
        self.close()
        self._plain_pool = self._async_pool = pool

    def start(self) -> None:
        """Start a worker for each function that needs one, so that it is loaded when the first episode ends."""
        for part in self._parts:
            if part.function is not None and self._runs_in_pool(part.function):
                self._pool(part.function).start(part.function)

    def close(self) -> None:
        """End the workers."""
        self._plain_pool.close()
        self._async_pool.close()

    def take_counts(self) -> dict[str, float]:
        """Metrics about failed calls since the last call of this method."""
        return self._failures.take()

    def status(self) -> dict[str, dict[str, Any]]:
        """Failed calls of the whole run by cause, each with the message of the last one."""
        return self._failures.status()

    async def score(self, episode: ScorableEpisode) -> Score:
        with self._spans.span("reward"):
            if not self._config.functions:
                return await self._score_part(self._parts[0], episode)
            coroutines = [self._score_part(part, episode) for part in self._parts]
            # All parts are awaited, so that none runs on after the score has failed.
            scores = await asyncio.gather(*coroutines, return_exceptions=True)
            return _mixed(self._parts, scores)

    async def call(self, function: ScoringFunction, episode: ScorableEpisode) -> Score:
        """Score with another function than the config's, with the same workers, limits and counts."""
        with self._spans.span("reward"):
            (score,) = await self._scores(function, [episode])
        return score

    async def _score_part(self, part: Part, episode: ScorableEpisode) -> Score:
        function = self._function(part, episode.prompt)
        if not function.is_quick:
            return await self._score_one(function, episode)
        try:
            score = to_score(function.function(**function.arguments(episode), **function.settings))
        except Exception as error:  # any scorer may fail on a row that does not suit it
            raise self._failed(function, [episode], failure_of(error, function.function)) from error
        self._failures.note_success()
        return score

    async def _score_one(self, function: ScoringFunction, episode: ScorableEpisode) -> Score:
        (score,) = await self._scores(function, [episode])
        return score

    async def _scores(self, function: ScoringFunction, episodes: Sequence[ScorableEpisode]) -> list[Score]:
        """One call for ``episodes``, repeated ``reward.max_retries`` times if it fails."""
        for num_left in reversed(range(self._config.max_retries + 1)):
            reply = await self._reply(function, episodes)
            if not isinstance(reply, Failure):
                self._failures.note_success()
                return reply
            if num_left:
                self._failures.note_retry(reply)
                logger.warning("row %s: reward %s %s; it is retried", episodes[0].prompt.uid, function.name, reply.text)
                continue
            raise self._failed(function, episodes, reply)
        raise AssertionError("the last attempt ends in a result or an error")

    async def _reply(self, function: ScoringFunction, episodes: Sequence[ScorableEpisode]) -> list[Score] | Failure:
        try:
            arguments = function.one_call(episodes)
        except RewardFailed as error:
            return failure_of(error, function.function)
        count = len(episodes) if function.signature.is_batched else None
        if self._runs_in_pool(function):
            return await self._pool(function).call(function, arguments, count, self._config.timeout_s)
        call = partial(function.function, **arguments, **function.settings)
        try:
            return read_result(await self._in_process(function, call), count)
        except TimeoutError:
            return TIMED_OUT
        except Exception as error:  # noqa: BLE001  a custom function may raise anything; it is a counted failure
            return failure_of(error, function.function)

    async def _in_process(self, function: ScoringFunction, call: partial[Any]) -> Any:
        timeout_s = self._config.timeout_s
        if function.is_async:
            async with self._free_async:
                return await asyncio.wait_for(call(), timeout_s)
        if self._config.where == "event_loop":
            result = call()
        else:
            # The time limit counts from the start of the call, not while the call waits for a free slot.
            async with self._free_threads:
                result = await asyncio.wait_for(in_daemon_thread(call), timeout_s)
        return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result

    def _runs_in_pool(self, function: ScoringFunction) -> bool:
        return self._config.where == "processes" and bool(function.path) and not function.is_quick

    def _pool(self, function: ScoringFunction) -> CallPool:
        return self._async_pool if function.is_async else self._plain_pool

    def _function(self, part: Part, prompt: Prompt) -> ScoringFunction:
        if part.function is not None:
            return part.function
        key = part.name, prompt.data_source
        if key not in self._built_in:
            self._built_in[key] = self._with_sandbox(ScoringFunction.of_row(prompt, part.settings))
        return self._built_in[key]

    def _with_sandbox(self, function: ScoringFunction) -> ScoringFunction:
        """A built-in scorer with a parameter ``sandbox`` receives the settings of the run's sandbox."""
        takes = "sandbox" in function.signature.columns and not is_path(function.path)
        if self._sandbox is None or not takes:
            return function
        signature = replace(function.signature, columns=function.signature.columns - {"sandbox"})
        return replace(function, settings={**function.settings, "sandbox": self._sandbox}, signature=signature)

    def _failed(
        self, function: ScoringFunction, episodes: Sequence[ScorableEpisode], failure: Failure
    ) -> RewardFailed | RewardsUnreliable:
        """Count a failed call. The error to raise names the function, the row and the cause."""
        prompt, more = episodes[0].prompt, f" and {len(episodes) - 1} others" if len(episodes) > 1 else ""
        where = f"row {prompt.uid}{more} (data_source {prompt.data_source!r})"
        error: RewardFailed
        if failure.cause == "timed_out":
            error = RewardTimedOut(
                f"reward {function.name} on row {prompt.uid}{more}: no result within {self._config.timeout_s:g} s; "
                "make it faster or raise reward.timeout_s"
            )
        else:
            name = function.place if failure.cause == "bad_value" else function.name
            text = f"reward {name} on {where} {failure.text}; {_REMEDY}"
            error = RewardFailed(text, cause=failure.cause, spent=failure.spent)
        return self._failures.note(error) or error


class Failures:
    """Counts failed calls by cause. Too many of them among the last calls stop the run."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[str] = deque(maxlen=FAILURE_WINDOW)
        """The causes of the last calls; empty text for those that did not fail."""
        self._counts: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self._taken: Counter[str] = Counter()
        """``_counts`` when they were last taken."""
        self._num_retries = 0
        self._num_retries_taken = 0
        self._num_scored = 0
        self._spent: Counter[str] = Counter()
        """What failed calls have used up since it was last taken. A name that has occurred once stays."""

    def note_success(self) -> None:
        self._num_scored += 1
        self._recent.append("")

    def note_retry(self, failure: Failure) -> None:
        self._num_retries += 1
        self._spent.update(failure.spent)

    def note(self, error: RewardFailed) -> RewardsUnreliable | None:
        """Count a failed call. Returns the error that stops the run, if too many calls failed."""
        self._counts[error.cause] += 1
        self._messages[error.cause] = str(error)
        self._recent.append(error.cause)
        self._spent.update(error.spent)
        num_failed = sum(bool(cause) for cause in self._recent)
        if not self._is_conclusive(num_failed):
            return None
        most, count = Counter(filter(None, self._recent)).most_common(1)[0]
        which = f"of the last {FAILURE_WINDOW}" if len(self._recent) == FAILURE_WINDOW else f"of {len(self._recent)}"
        return RewardsUnreliable(
            f"{num_failed} {which} scoring calls failed, and reward.max_failed_share = {self._max_share:g} allows "
            f"{self._max_share * FAILURE_WINDOW:g} of {FAILURE_WINDOW}; the most frequent cause is {most} "
            f"({count} calls), for example: {self._messages[most]}"
        )

    def _is_conclusive(self, num_failed: int) -> bool:
        """Whether the share of failures is too high, also if calls are still missing in the window."""
        none_works = not self._num_scored and num_failed >= CONCLUSIVE_START and self._max_share < 1
        return none_works or num_failed > self._max_share * FAILURE_WINDOW

    def take(self) -> dict[str, float]:
        """Counts since the last call of this method. A cause that has occurred once keeps its metric."""
        counts = {cause: self._counts[cause] - self._taken[cause] for cause in self._counts}
        num_retries = self._num_retries - self._num_retries_taken
        self._taken, self._num_retries_taken = Counter(self._counts), self._num_retries
        spent = {f"reward/spent_on_failures/{name}": value for name, value in self._spent.items()}
        self._spent = Counter(dict.fromkeys(self._spent, 0))
        return {
            "reward/failed_calls": sum(counts.values()),
            "reward/retried_calls": num_retries,
            **{f"reward/failures/{cause}": count for cause, count in counts.items()},
            **spent,
        }

    def status(self) -> dict[str, dict[str, Any]]:
        return {cause: {"count": count, "message": self._messages[cause]} for cause, count in self._counts.items()}


def _parts(config: RewardConfig, function: ScoreFunction | None) -> tuple[Part, ...]:
    if function is not None:
        name = getattr(function, "__name__", type(function).__name__)
        given = ScoringFunction.of(function, "", config.function_args, f"reward function {name}")
        return (Part("", 1.0, given, config.function_args),)
    if not config.functions:
        args = config.function_args
        named = ScoringFunction.named(config.function, args, "reward.function") if config.function else None
        return (Part("", 1.0, named, args),)
    parts = []
    for name, settings in config.functions.items():
        args, path = settings.get("args", {}), settings.get("function", "")
        found = ScoringFunction.named(path, args, f"reward.functions.{name}.function") if path else None
        parts.append(Part(name, settings.get("weight", 1.0), found, args))
    return tuple(parts)


def _mixed(parts: Sequence[Part], scores: Sequence[Score | BaseException]) -> Score:
    """The weighted sum. Each part is in the info under its name, and its other values under ``name_value``."""
    values: list[float] = []
    info: dict[str, Any] = {}
    for part, score in zip(parts, scores, strict=True):
        if isinstance(score, BaseException):
            raise score
        values.append(score.value)
        info[part.name] = score.value
        info |= {f"{part.name}_{name}": value for name, value in score.info.items()}
    total = sum(part.weight * value for part, value in zip(parts, values, strict=True))
    return Score(total, {**info, "reward_parts": values})


async def in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a daemon thread. Unlike a thread pool, a call that hangs cannot delay process exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_outcome(value)

    def work() -> None:
        try:
            with _event_loop():
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
    """An event loop for this thread, for functions that call ``get_event_loop().run_until_complete``."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()
