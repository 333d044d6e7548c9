"""Server-sent events: a page learns which parts of which runs have changed, and requests what it shows."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from headwater.dashboard.errors import Refused
from headwater.dashboard.runs import Run, Runs

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_QUIET_S = 15.0

Describe = Callable[[Run], dict[str, Any]]


class Watch:
    """What changed since the last look. Only the sizes and times of files are read."""

    def __init__(self, runs: Runs, name: str | None) -> None:
        self._runs = runs
        self._name = name
        self._seen: dict[str, dict[str, object]] = {}
        self.changed()

    def changed(self) -> tuple[dict[str, list[str]], list[str]]:
        """The parts of each run that changed, and the runs that no longer exist."""
        now = self._runs.stamps() if self._name is None else self._stamps_of(self._name)
        before, self._seen = self._seen, now
        changes = {
            name: [part for part, stamp in parts.items() if before.get(name, {}).get(part) != stamp]
            for name, parts in now.items()
        }
        return {name: parts for name, parts in changes.items() if parts}, sorted(before.keys() - now.keys())

    def _stamps_of(self, name: str) -> dict[str, dict[str, object]]:
        try:
            return {name: self._runs.get(name).parts()}
        except Refused:
            return {}


async def stream(
    request: web.Request, runs: Runs, name: str | None, call: Callable[..., Any], describe: Describe
) -> web.StreamResponse:
    """Send events until the page is closed or the server stops."""
    if name is not None:
        await call(runs.get, name)
    watch: Watch = await call(Watch, runs, name)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await answer.prepare(request)
    await _send(answer, "hello", {})
    sent = time.monotonic()
    stopping: asyncio.Event = request.app[STOPPING]
    while not stopping.is_set():
        try:
            await asyncio.wait_for(stopping.wait(), _EVERY_S)
            break
        except TimeoutError:
            pass
        try:
            changes, gone = await call(watch.changed)
            more = await call(_described, runs, name, describe) if name is not None and changes else {}
        except Refused:  # too busy; what changed is seen at the next look. An error answer could no longer be sent.
            continue
        except Exception:
            logger.exception("events: the runs cannot be looked at")
            break  # the page connects again by itself
        for each in gone:
            await _send(answer, "gone", {"run": each})
        if changes:
            parts = sorted({part for each in changes.values() for part in each})
            await _send(answer, "changed", {"runs": sorted(changes), "parts": parts, **more})
        if gone or changes:
            sent = time.monotonic()
        elif time.monotonic() - sent > _QUIET_S:
            await answer.write(b": still here\n\n")
            sent = time.monotonic()
        if gone and name is not None:
            break
    return answer


def _described(runs: Runs, name: str, describe: Describe) -> dict[str, Any]:
    try:
        return describe(runs.get(name))
    except (Refused, OSError):  # deleted meanwhile; the next look says so
        return {}


async def _send(answer: web.StreamResponse, event: str, content: dict[str, Any]) -> None:
    await answer.write(f"event: {event}\ndata: {json.dumps(content)}\n\n".encode())


STOPPING: web.AppKey[asyncio.Event] = web.AppKey("stopping", asyncio.Event)
