"""Holding the engine while groups start, so that their first requests are computed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.core.protocols import InferenceEngine

_TURNS_TO_FIRST_REQUEST = 8
"""Turns of the event loop in which a workflow that asks the engine first thing has asked: through group and episode."""


@asynccontextmanager
async def held_engine(engine: InferenceEngine) -> AsyncIterator[None]:
    """Hold the engine until the first requests of all that starts are there."""
    engine.pause()
    try:
        yield
        for _ in range(_TURNS_TO_FIRST_REQUEST):
            await asyncio.sleep(0)
    finally:
        engine.resume()
