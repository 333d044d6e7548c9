"""A server that someone else has started, supervised like a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headwater.core.errors import RolloutFailed, WaitTimeout
from headwater.core.waits import named_wait

_RETRY_S = 0.5
_PROBE_S = 5.0
"""How long a server may take to answer whether it is healthy."""


class RunningServer:
    """A server at a URL. Ending it means to end the connection to it: its process belongs to someone else."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lost = asyncio.Event()

    @classmethod
    async def reach(cls, url: str, probe: Callable[[], Awaitable[None]], limit_s: float) -> RunningServer:
        """Wait until the server answers. ``probe`` asks it, and raises ``OSError`` or ``RolloutFailed`` if it does not.

        After ``limit_s``, raise ``RolloutFailed`` with the last error.
        """
        last = "it has not answered yet"

        async def ask() -> None:
            nonlocal last
            while True:
                try:
                    await asyncio.wait_for(probe(), _PROBE_S)
                    return
                except TimeoutError:
                    last = f"no answer within {_PROBE_S:g} s"
                except (OSError, RolloutFailed) as error:
                    last = str(error)
                await asyncio.sleep(_RETRY_S)

        try:
            await named_wait(
                ask(), lambda: f"the server {url} answers; {last}", hard_limit_s=limit_s, kind="server_reached"
            )
        except WaitTimeout as error:
            raise RolloutFailed(
                f"the server {url} cannot be reached, after {limit_s:g} s of attempts (rollout.server_timeout_s): "
                f"{last}; start it, or correct rollout.servers"
            ) from error
        return cls(url)

    @property
    def name(self) -> str:
        return f"server {self.url}"

    @property
    def last_lines(self) -> str:
        return ""

    async def wait(self) -> str:
        await self._lost.wait()
        return f"{self.name} ended or stopped answering"

    def kill(self) -> None:
        self._lost.set()

    async def stop(self) -> None:
        self._lost.set()
