"""The ``headwater serve`` behind a ``NativeEngine``, whichever process runs it at the moment.

``launch`` keeps a process alive, or waits for the return of one that someone else has started. This module talks to it:
requests, control calls, and the state that the next process must be given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from headwater.backends.launch.keeper import ChildKeeper, ServerProcess
from headwater.backends.native.client import ConnectionLost, EngineFailed, RequestLink, ServerClient
from headwater.backends.native.places import ForeignServer, OwnServer
from headwater.backends.native.requests import FramedRequest, OpenRequests
from headwater.core.capabilities import MemoryTag
from headwater.core.errors import RolloutFailed, TransferLost, WeightsIncomplete
from headwater.core.waits import ENGINE_CALL_LIMIT_S, wait_for_future
from headwater.observe.spans import Spans
from headwater.weights import ControlCall

logger = logging.getLogger(__name__)

_LOST_S = 0.1
"""Time to wait after a lost connection, in which the end of the process is noticed."""
_REACH_S = 5.0
"""How long a process that is alive may be unreachable."""


@dataclass
class ToldState:
    """What the process was told, so that the next one can be told the same."""

    version: int = 0
    again: ControlCall | None = None
    """The call that gives the newest weights to a new process."""
    must_resend: bool = False
    """Only the learner can give the newest weights to a new process."""
    needs_weights: bool = False
    """The process does not hold a complete version. Requests wait until it does."""
    is_paused: bool = False
    asleep: set[MemoryTag] = field(default_factory=set)

    async def restore(self, client: ServerClient) -> None:
        """Tell a process that has just started, before it is asked for anything."""
        if self.is_paused:
            await client.call("/control/pause", {})
        if self.again is not None:
            await client.call(self.again.path, {**self.again.body, "version": self.version})
        elif self.version:
            await client.call("/control/version", {"version": self.version})
        self.needs_weights = self.must_resend
        if self.asleep:
            await client.call("/control/sleep", {"tags": sorted(self.asleep)})


class NativeServer:
    """A server that is always there: its process is replaced if it dies. Belongs to one event loop.

        server = NativeServer(OwnServer("tiny:qwen3", dtype="float32"), spans)
        await server.keeper.start()
        server.enter(opened)                        # answered even if processes die meanwhile
        await server.call("/control/pause", {})     # answered by whichever process serves
        await server.end()

    When the keeper gives up, every open request and every call fails with the cause, and so does everything that comes
    later. Each ``ServerClient`` belongs to one process.
    """

    def __init__(self, place: OwnServer | ForeignServer, spans: Spans, *, hands_over: bool = False) -> None:
        """``hands_over`` fails the open requests with ``ServerLost`` when the process is lost."""
        self.state = ToldState()
        self.keeper = ChildKeeper(self, place.remedy, is_foreign=isinstance(place, ForeignServer))
        self.requests = OpenRequests(spans, on_finish=self.keeper.note_progress, on_failed_engine=self.keeper.kill)
        self.info: dict[str, Any] = {}
        """What the process says about itself."""
        self._place = place
        self._hands_over = hands_over
        self._url = ""
        self._client: ServerClient | None = None
        self._link: RequestLink | None = None
        self._incomplete: ServerClient | None = None
        """The process in which an update failed after it had changed weights."""
        if isinstance(place, ForeignServer) and place.owns_weights:
            self.state.must_resend = True  # it may hold any weights

    @property
    def url(self) -> str:
        """The address of the process that serves now, or served last."""
        return self._url

    # Requests and calls

    def enter(self, opened: FramedRequest) -> None:
        if self.keeper.failure is not None:
            opened.fail(self.keeper.failure)
        elif self._hands_over and not self.keeper.is_settled:
            opened.hand_over(f"the engine's {self.name} is not reachable at the moment")
        else:
            self.requests.enter(opened)

    @property
    def name(self) -> str:
        """For messages."""
        return f"server {self._place.url}" if isinstance(self._place, ForeignServer) else "process"

    async def client(self) -> ServerClient:
        """The client of the process that serves, once one does."""
        await self.keeper.until_serving()
        assert self._client is not None, "it serves"
        return self._client

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call whichever process serves. Every such call may be repeated: if it dies, the next one is called."""
        _, reply = await self.call_any(path, body)
        return reply

    async def call_any(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[ServerClient, dict[str, Any]]:
        """As ``call``, and returns the client of the process that answered too."""
        num_lost, lost_by = 0, None
        while True:
            client = await self.client()
            try:
                return client, await client.call(path, body)
            except ConnectionLost as error:
                num_lost, lost_by = (num_lost + 1 if client is lost_by else 1), client
                await asyncio.sleep(_LOST_S)
                # Attempts are counted instead of time, because one of them may have been a call that took long.
                if num_lost * _LOST_S > _REACH_S and self.keeper.is_settled and client is self._client:
                    raise RolloutFailed(
                        f"the engine's {self.keeper.child.name} is alive but cannot be reached: {error}; "
                        f"{num_lost} attempts"
                    ) from error
            except EngineFailed as error:  # the process is alive but useless
                self.keeper.kill(f"{path}: {error}")
                await asyncio.sleep(_LOST_S)

    async def call_same(self, client: ServerClient, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One step of a weight update in the process of ``client``. ``TransferLost`` if it does not survive it."""
        try:
            return await client.call(path, body)
        except ConnectionLost as error:
            await self._until_noticed(client)
            raise TransferLost(f"the engine's process ended during a weight update: {error}") from error
        except EngineFailed as error:
            if client is self._client:
                self.keeper.kill(f"{path}: {error}")
            raise TransferLost(f"the engine failed during a weight update: {error}") from error

    async def _until_noticed(self, client: ServerClient) -> None:
        """Wait until the keeper has noticed the end of a process: otherwise the next update would be sent to it too."""
        for _ in range(int(_REACH_S / _LOST_S)):
            if client is not self._client or not self.keeper.is_settled:
                return
            await asyncio.sleep(_LOST_S)

    async def end(self) -> None:
        """Stop the process. Open requests end with the tokens they have."""
        self.requests.abort_all()
        await self.keeper.end()
        self.requests.abort_all()  # those that came meanwhile

    # Weights

    async def check_untouched(self) -> None:
        """Raise ``RolloutFailed`` if someone else has given weights to a running server."""
        if not isinstance(self._place, ForeignServer) or self.state.needs_weights:
            return
        version = (await self.call("/control/version"))["version"]
        if version != self.state.version and not self.state.needs_weights:
            raise RolloutFailed(
                f"the {self.name} serves version {version}, but this run gave it version {self.state.version}: another "
                "program has published weights to it; reserve the servers of rollout.servers for one run, and resume"
            )

    async def begin_transfer(self) -> ServerClient:
        """The client of the process that is to take weights that only the learner holds.

        A process that replaces it needs them too, even if this one dies before it has told that it uses them.
        """
        client = await self.client()
        self.state.must_resend = True
        return client

    def weights_arrived(self, client: ServerClient, version: int, again: ControlCall | None) -> None:
        """The process of ``client`` uses a complete ``version``: requests that waited for it are sent."""
        if client is not self._client:
            raise TransferLost("the engine's process ended after a weight update")
        self.state.version, self.state.again, self.state.must_resend = version, again, again is None
        self.state.needs_weights = False
        if self._link is not None and self.requests.link is None:
            self.requests.continue_on(self._link)

    def weights_incomplete(self, client: ServerClient) -> None:
        """An update failed in the process of ``client`` after it had changed weights."""
        if client is self._client:
            self._incomplete = client
            self.state.needs_weights = True

    async def checksum(self) -> str:
        """The checksum of the newest weights. ``TransferLost`` if the process that took them has been replaced."""
        client = await self.client()
        if self.state.needs_weights and client is self._incomplete:
            raise WeightsIncomplete("the engine's process holds parts of two versions; publish a complete one first")
        if self.state.needs_weights:
            raise TransferLost("the engine's process was replaced, and the new one needs the weights again")
        path = "/control/checksum"
        reply = await (self.call_same(client, path) if self.state.must_resend else self.call(path))
        checksum: str = reply["checksum"]
        return checksum

    # What the keeper calls

    @property
    def num_open(self) -> int:
        return len(self.requests)

    async def start_child(self) -> ServerProcess:
        return await self._place.start()

    async def on_up(self, child: ServerProcess) -> None:
        self._url = child.url
        self._client = ServerClient(child.url, self._place.api_key, self._place.heartbeat_s)
        if isinstance(self._place, ForeignServer) and await self._meet(self._client, self._place):
            logger.info("the %s was not restarted and has kept its weights", self.name)
        else:
            await self.state.restore(self._client)
        self._link = await self._client.connect(self.requests)
        if not self.state.needs_weights:
            self.requests.continue_on(self._link)
        elif self.keeper.num_restarts:  # otherwise the run is about to publish its first version
            logger.warning(
                "the engine's new process needs the weights of version %d; %d requests wait until they are published",
                *(self.state.version, len(self.requests)),
            )

    async def _meet(self, client: ServerClient, place: ForeignServer) -> bool:
        """Look at a running server. Return whether it still holds what this process gave it before."""
        before, info = self.info, await client.call("/get_server_info")
        for key in ("vocab_size", "context_length", "capabilities") if before else ():
            if info[key] != before[key]:
                raise RolloutFailed(f"the {self.name} has changed: {key} was {before[key]} and is {info[key]}")
        self.info, version = info, int(info["weight_version"])
        if not place.owns_weights:
            self.state.version = version
            return True
        if not before:
            await _end_pauses(client, info["internal_states"][0])
        if not before and version:
            logger.warning(
                "the %s serves version %d of another run; it gets the weights of this run", self.name, version
            )
        is_same = bool(before) and info["instance"] == before["instance"] and version == self.state.version
        return is_same and not self.state.needs_weights

    async def until_lost(self) -> None:
        assert self._link is not None, "connected"
        await self._link.run()

    def on_lost(self) -> None:
        self.requests.link = None
        if isinstance(self._place, ForeignServer):
            self.keeper.child.kill()  # its connection has ended, and nothing else is known about its process
        if self._hands_over:
            self.requests.hand_over_all(f"the engine's {self.name} was lost")

    async def on_down(self) -> None:
        client, self._client = self._client, None
        self._link = self.requests.link = None
        if client is not None:
            await client.close()

    def on_failure(self, failure: RolloutFailed) -> None:
        self.requests.fail_all(failure)


async def _end_pauses(client: ServerClient, now: Mapping[str, Any]) -> None:
    """An earlier run may have left a server paused or asleep."""
    if now["is_paused"]:
        await client.call("/control/resume", {})
    if now["is_asleep"]:
        await client.call("/control/wake", {})


@dataclass
class EngineChannel:
    """A ``weights.Channel``. Its methods may be called from any thread."""

    server: NativeServer
    start: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    """Starts a coroutine on the server's event loop."""
    version: int
    client: ServerClient | None
    """The process that takes the update. None until the first answer if every process may take it."""
    limit_s: float
    is_pinned: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_pinned = self.client is not None

    @property
    def url(self) -> str:
        assert self.client is not None, "known before the first call, or after it"
        return self.client.url

    @property
    def process(self) -> str:
        return f"{self.url} {id(self.client)}"

    def call(self, call: ControlCall) -> Future[dict[str, Any]]:
        return self.start(self._call(call))

    def accepted(self, again: ControlCall | None) -> None:
        self._do(lambda client: self.server.weights_arrived(client, self.version, again))

    def incomplete(self) -> None:
        self._do(self.server.weights_incomplete)

    async def _call(self, call: ControlCall) -> dict[str, Any]:
        if self.is_pinned:
            assert self.client is not None, "given"
            return await self.server.call_same(self.client, call.path, call.body)
        self.client, answer = await self.server.call_any(call.path, call.body)
        return answer

    def _do(self, change: Callable[[ServerClient], None]) -> None:
        async def on_the_servers_loop() -> None:
            assert self.client is not None, "it has answered"
            change(self.client)

        done = self.start(on_the_servers_loop())
        try:
            what = "the engine's process has taken weights"
            wait_for_future(done, lambda: what, kind="engine_call", hard_limit_s=ENGINE_CALL_LIMIT_S)
        finally:
            done.cancel()
