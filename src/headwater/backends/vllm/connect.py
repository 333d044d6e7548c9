"""A vLLM server that runs already. If it is lost, the connection is tried again for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from headwater.backends.vllm.http import HttpLink
from headwater.backends.vllm.link import LinkLost, VllmInfo
from headwater.backends.vllm.session import Session
from headwater.core.errors import HeadwaterError, RolloutFailed, WaitTimeout

REACH_LIMIT_S = 600.0
"""How long a server that was lost may take to come back, for example to load a large model."""
_FIRST_LIMIT_S = 30.0
"""How long the first connection is tried. A server that is not there is most likely a wrong address."""
_RETRY_S = 1.0


class ConnectedServer:
    """Keeps a connection to one URL. Belongs to one event loop."""

    def __init__(self, session: Session, url: str, api_key: str, check: Callable[[HttpLink, VllmInfo], object]) -> None:
        """``check`` raises if the server cannot be used; a coroutine function."""
        self.url = url
        self.num_restarts = 0
        """How often another process was found at the URL."""
        self._session = session
        self._api_key = api_key
        self._check = check
        self._link: HttpLink | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._connect(_FIRST_LIMIT_S)
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
                await self._connect(REACH_LIMIT_S)
            except HeadwaterError as error:
                self._session.fail(RolloutFailed(str(error)))
                return

    async def _connect(self, limit_s: float) -> None:
        began = time.monotonic()
        while True:
            link = HttpLink(self.url, self._api_key)
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
                if time.monotonic() - began > limit_s:
                    raise RolloutFailed(
                        f"the vLLM server at {self.url} cannot be reached for {limit_s:.0f} s: {error}; is it running, "
                        "and is rollout.servers right?"
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
