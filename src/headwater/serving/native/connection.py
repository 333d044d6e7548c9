"""Many requests over one connection: a rollout's thousands need no socket each, and start without a handshake each.

Client: ``{"id": 7, "request": {...}}`` starts a request, ``{"id": 7, "leave": true}`` ends one nobody waits for.
Server: lists of ``{"id": 7, "tokens": [...], "logprobs": [...], "versions": [...]}``, the last of an id with its
``stop_reason``; or ``{"id": 7, "error": {...}}``. What the engine has made since the last message goes out as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from headwater.core.errors import HeadwaterError
from headwater.serving import json_body
from headwater.serving.errors import ApiError, api_error
from headwater.serving.fields import Fields
from headwater.serving.native.lines import line_of
from headwater.serving.native.request import read_request
from headwater.serving.state import ServerState

log = logging.getLogger(__name__)


class Connection:
    """The requests of one client, by its numbers. They end with it."""

    def __init__(self, state: ServerState, socket: web.WebSocketResponse) -> None:
        self._state = state
        self._socket = socket
        self._running: dict[int, asyncio.Task[None]] = {}
        # No limit: at most the tokens that were asked for wait here, and a slow reader must not slow the engine.
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send())

    def take(self, text: str) -> None:
        """One message of the client; ``ApiError`` for one that belongs to no request."""
        fields = Fields(json_body.read_object(text.encode()))
        number, body, leave = fields.optional_integer("id"), fields.mapping("request"), fields.flag("leave", False)
        fields.done()
        if number is None or leave == (body is not None):
            raise ApiError('a message is {"id": number, "request": {...}} or {"id": number, "leave": true}')
        if body is None:
            running = self._running.pop(number, None)
            if running is not None:
                running.cancel()
        elif number in self._running:
            raise ApiError(f"id = {number}: a request of this number is running; choose another")
        else:
            self._running[number] = asyncio.create_task(self._run(number, body))

    async def end(self) -> None:
        """The client has gone, and so have its requests."""
        tasks = [self._sender, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, number: int, body: Mapping[str, Any]) -> None:
        try:
            request = read_request(body, self._state.limits)
            name = request.request_id
            # Shared: a trainer names a request after its prompt, which may be under way twice; and one that connects
            # anew may be back before the server has seen that it was gone.
            with self._state.active.share({name: (name,)}):
                async with aclosing(self._state.engine.stream(request)) as deltas:
                    async for delta in deltas:
                        self._outbox.put_nowait({"id": number, **line_of(delta)})
        except HeadwaterError as error:
            self._outbox.put_nowait({"id": number, **api_error(error).body()})
        except Exception:  # as for any other request: the client is told that, the log what
            log.exception("request %s failed", body.get("request_id"))
            unknown = ApiError("internal error; the server's log has it", status=500, code="internal_error")
            self._outbox.put_nowait({"id": number, **unknown.body()})
        finally:
            if self._running.get(number) is asyncio.current_task():
                del self._running[number]

    async def _send(self) -> None:
        while True:
            lines = [await self._outbox.get()]
            while not self._outbox.empty():
                lines.append(self._outbox.get_nowait())
            await self._socket.send_str(json_body.write(lines).decode())
