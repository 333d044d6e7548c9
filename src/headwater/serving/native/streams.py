"""The requests of a connection, for an engine that streams each response separately."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import cast

from headwater.core.errors import RolloutFailed
from headwater.core.new_tokens import NewTokens
from headwater.core.protocols import Follower, InferenceEngine, RoundEngine, RoundSink
from headwater.core.records import ModelRequest, StopReason


def follow(engine: InferenceEngine, sink: RoundSink) -> Follower:
    """Requests whose new tokens are passed to ``sink``: all together if the engine can do that, or stream by stream."""
    if engine.capabilities.rounds:
        return cast(RoundEngine, engine).follow(sink)
    return StreamFollower(engine, sink)


class StreamFollower:
    """One task per request. Belongs to one event loop."""

    def __init__(self, engine: InferenceEngine, sink: RoundSink) -> None:
        self._engine = engine
        self._sink = sink
        self._tasks: dict[int, asyncio.Task[StopReason]] = {}

    def enter(self, number: int, request: ModelRequest) -> None:
        task = self._tasks[number] = asyncio.create_task(self._run(number, request))
        # Not at the end of the task itself: one that is cancelled before it has started does not run at all.
        task.add_done_callback(lambda _: self._end(number))

    def leave(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    async def _run(self, number: int, request: ModelRequest) -> StopReason:
        async with aclosing(self._engine.astream(request)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    self._sink.take(NewTokens.of_delta(number, delta))
                if delta.stop_reason is not None:
                    return delta.stop_reason
        raise RolloutFailed(f"request {request.request_id}: the engine's stream has no end; its last part needs one")

    def _end(self, number: int) -> None:
        task = self._tasks.pop(number)
        if task.cancelled():
            self._sink.ended(number, "abort")
        elif isinstance(error := task.exception(), Exception):
            self._sink.failed(number, error)
        else:
            self._sink.ended(number, task.result())
