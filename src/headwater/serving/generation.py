"""Running several requests of one client as one: together, and gone together when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from headwater.core.records import ModelRequest, ModelResponse

if TYPE_CHECKING:
    from headwater.engine.engine import Engine
    from headwater.engine.sequence import Delta


async def generate_all(engine: Engine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """All responses; if one request is refused, or the caller is cancelled, the others are aborted."""
    tasks = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(tasks)


async def stream_all(engine: Engine, requests: Sequence[ModelRequest]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas with the place of their request, as they come. Closing this iterator aborts what still runs."""
    # No limit: what waits here is at most the tokens that were asked for, and a slow reader must not slow the engine.
    arrived: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

    async def pump(place: int) -> None:
        try:
            # A generator, so that closing it tells the engine at once and not when it is collected.
            async with aclosing(engine.stream(requests[place])) as deltas:
                async for delta in deltas:
                    arrived.put_nowait((place, delta))
        finally:
            arrived.put_nowait((place, None))

    tasks = [asyncio.ensure_future(pump(place)) for place in range(len(requests))]
    try:
        num_running = len(tasks)
        while num_running:
            place, delta = await arrived.get()
            if delta is not None:
                yield place, delta
                continue
            num_running -= 1
            await tasks[place]  # raises what ended the stream, if anything did
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[ModelResponse]] | Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    # Waiting for them makes sure that the engine has heard of it before the client's names are free again.
    await asyncio.gather(*tasks, return_exceptions=True)
