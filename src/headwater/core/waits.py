"""Waiting for rollouts and engines, with a name and two limits: one at which the wait speaks, one at which it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headwater.core.errors import WaitTimeout

logger = logging.getLogger(__name__)
T = TypeVar("T")


async def named_wait(
    awaitable: Awaitable[T],
    describe: Callable[[], str],
    *,
    hard_limit_s: float,
    soft_limit_s: float = 30.0,
) -> T:
    """Wait for ``awaitable``; say what the wait is for every ``soft_limit_s``; cancel it and raise at ``hard_limit_s``.

    ``describe`` is asked anew each time, so the message shows how far things have come.
    """
    started = time.monotonic()
    task = asyncio.ensure_future(awaitable)
    try:
        while True:
            left_s = hard_limit_s - (time.monotonic() - started)
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(soft_limit_s, left_s)))
            if done:
                return task.result()
            waited_s = time.monotonic() - started
            if waited_s >= hard_limit_s:
                raise WaitTimeout(f"gave up after {waited_s:.0f} s: {describe()}")
            logger.warning("still waiting after %.0f s: %s", waited_s, describe())
    finally:
        task.cancel()
