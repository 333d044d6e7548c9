"""One scoring function, called safely: sync or async, number or dict, with a time limit and no invented results."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from headwater.core.errors import RewardFailed, RewardTimedOut
from headwater.core.records import Prompt, Score

ScoreFunction = Callable[..., Any]


async def call_score_function(
    function: ScoreFunction, prompt: Prompt, response_text: str, settings: Mapping[str, Any], *, timeout_s: float
) -> Score:
    """Score one response. Whatever goes wrong becomes ``RewardFailed`` with the function, the row and the cause."""
    call = partial(
        function,
        data_source=prompt.data_source,
        solution_str=response_text,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        **settings,
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        if inspect.iscoroutinefunction(function):
            result = await asyncio.wait_for(call(), timeout_s)
        else:
            result = await asyncio.wait_for(in_daemon_thread(call), timeout_s)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, timeout_s)
    except TimeoutError as error:
        raise RewardTimedOut(
            f"reward {name} on row {prompt.uid}: no result within {timeout_s:g} s; "
            "make it faster or raise reward.timeout_s"
        ) from error
    except RewardFailed:
        raise
    except Exception as error:  # a user's function may raise anything; it becomes a counted failure
        where = _raised_at(error)
        raise RewardFailed(
            f"reward {name} on row {prompt.uid} (data_source {prompt.data_source!r}) raised "
            f"{type(error).__name__}: {error}{where}; "
            "mend the function, or set rollout.on_failure=drop to drop and count such rows"
        ) from error
    try:
        return to_score(result)
    except Exception as error:  # a number of the user's own kind may raise anything too
        raise RewardFailed(
            f"reward {name}{_defined_at(function)} on row {prompt.uid} (data_source {prompt.data_source!r}) {error}; "
            "mend the function, or set rollout.on_failure=drop to drop and count such rows"
        ) from error


async def in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call beside the event loop. One that hangs cannot hold up the end of the process, as it could in a
    pool."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_outcome(value)

    def work() -> None:
        try:
            done = partial(settle, outcome.set_result, call())
        except BaseException as error:  # noqa: BLE001  passed on to whoever awaits the call
            done = partial(settle, outcome.set_exception, error)
        # The loop is closed when the run ended before this call did; nobody waits for the result then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await outcome


def to_score(result: Any) -> Score:
    """A score from what the function returned: a finite number, or a dict with a finite number under ``score``."""
    info: Mapping[str, Any] = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"returned a dict without 'score'; its keys are {sorted(map(str, result))}")
        value = result["score"]
        info = {str(key): entry for key, entry in result.items() if key != "score"}
    if not isinstance(value, (Real, bool)) or not math.isfinite(value):
        raise TypeError(f"returned {value!r}; return a finite number, or a dict with one under 'score'")
    return Score(float(value), info)


def _defined_at(function: ScoreFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)  # an object that is called has none
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _raised_at(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
