"""One scoring function, called safely: sync or async, number or dict, with a time limit and no invented results."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from numbers import Real
from typing import Any

from headwater.core.errors import RewardFailed
from headwater.core.records import Prompt, Score

ScoreFunction = Callable[..., Any]


async def call_score_function(
    function: ScoreFunction,
    prompt: Prompt,
    response_text: str,
    settings: Mapping[str, Any],
    *,
    timeout_s: float,
    executor: Executor,
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
            loop = asyncio.get_running_loop()
            result = await asyncio.wait_for(loop.run_in_executor(executor, call), timeout_s)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, timeout_s)
        return to_score(result)
    except TimeoutError as error:
        raise RewardFailed(
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
            "mend the function, or set reward.on_failure=drop to drop and count such rows"
        ) from error


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


def _raised_at(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
