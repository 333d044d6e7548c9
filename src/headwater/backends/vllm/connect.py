"""A vLLM server that runs already. If it is lost, the connection is tried again for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.link import LinkLost, VllmInfo
from headwater.backends.vllm.session import Session
from headwater.core.errors import HeadwaterError, RolloutFailed, WaitTimeout

_RETRY_S = 1.0


class ConnectedServer:
    """Keeps a connection to one URL. Belongs to one event loop."""

    def __init__(
        self,
        session: Session,
        url: str,
        *,
        api_key: str,
        check: Callable[[HttpLink, VllmInfo], Awaitable[None]],
        limit_s: float,
        is_one_of_many: bool = False,
        make_link: Callable[[str, str], HttpLink] = HttpLink,
    ) -> None:
        """``check`` raises if the server cannot be used. ``limit_s`` is how long it may be unreachable.

        One of many may stay away for longer, because the others continue its requests.
        """
        self.url = url
        self.num_restarts = 0
        """How often another process was found at the URL."""
        self._session = session
        self._api_key = api_key
        self._check = check
        self._limit_s = limit_s
        self._is_one_of_many = is_one_of_many
        self._make_link = make_link
        self._link: HttpLink | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._connect()
        self._watch = asyncio.create_task(self._keep())

    async def end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._drop()

    async def _keep(self) -> None:
        while True:
            assert self._link is not None, "connected"
            with suppress(LinkLost):
                await self._session.until_lost(self._link)
            await self._drop()
            try:
                await self._connect()
            except HeadwaterError as error:
                self._session.fail(RolloutFailed(str(error)))
                return

    async def _connect(self) -> None:
        began = time.monotonic()
        while True:
            link = self._make_link(self.url, self._api_key)
            try:
                await link.check_alive()
                info = await link.describe()
                known = self._session.info
                if known is None or known.instance != info.instance:
                    await self._take(link, info, is_first=known is None)
                await self._session.attach(link, info)
                self._link = link
                return
            except (LinkLost, WaitTimeout) as error:
                await link.close()
                is_awaited = self._is_one_of_many and self._session.info is not None
                if time.monotonic() - began > self._limit_s and not is_awaited:
                    raise RolloutFailed(
                        f"the {link.program} server at {self.url} cannot be reached, after {self._limit_s:g} s of "
                        f"attempts (rollout.server_timeout_s): {error}; start it, or correct rollout.servers"
                    ) from error
                await asyncio.sleep(_RETRY_S)
            except BaseException:
                await link.close()
                raise

    async def _take(self, link: HttpLink, info: VllmInfo, *, is_first: bool) -> None:
        """A process that was not seen before: check it. Its weights are not those of this run."""
        await self._check(link, info)
        if not is_first:
            self.num_restarts += 1

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._session.lost(link, "the connection was closed")
            await link.close()
