"""Weights over a process group, as trainers send them to SGLang and vLLM: member 0 of the group is this process.

    stream = GroupStream("gloo", torch.bfloat16)
    await stream.load(link, info, update, "7", flush=True)  # joins the group of a server's process first
    await stream.end()

A server receives the tensors of one call after the other. SGLang receives a bucket with each call; from 0.5.21, the
calls of an update stand between two others, which begin and end it. ``headwater serve`` and vLLM receive all tensors of
a model in one call, in the order in which it names them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from headwater.backends.remote.link import LinkLost, ServerInfo
from headwater.config.schema import WeightLink
from headwater.core.errors import HeadwaterError, RolloutFailed, WeightsError
from headwater.core.protocols import Bucket, WeightUpdate
from headwater.core.waits import wait_for_future
from headwater.weights.collective import LIMIT_S
from headwater.weights.links import Link, Meeting, host_store, own_address
from headwater.weights.memory import as_announced

_LAST_ANSWER_S = 10.0
"""How long the answer of a call may take after the group was given up. It says more than the sender knows."""
_LAST_CALL_S = 600.0
"""How long a server may take for what follows the last tensor of a call."""
Part = tuple[Sequence[str], Iterable[torch.Tensor]]
"""The names of the tensors that one call receives, and the tensors."""


class GroupLink(Protocol):
    """The calls to a server whose processes join groups. Their bodies are those of SGLang."""

    @property
    def url(self) -> str: ...
    @property
    def takes_whole(self) -> bool:
        """One call receives all tensors, in the order of its names."""
        ...

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join the process group over which weights are sent; returns when all members have come."""
        ...

    async def leave_group(self, name: str) -> None: ...
    async def begin_update(self) -> None: ...
    async def receive(self, body: Mapping[str, Any]) -> str:
        """Receive tensors. Returns when the model has them: the checksum of what has arrived, if the server tells."""
        ...

    async def end_update(self) -> None: ...


class GroupStream:
    """A ``WeightStream`` over groups. Each process of a server has one, which is kept for the next updates."""

    def __init__(self, backend: WeightLink, dtype: torch.dtype) -> None:
        """``backend`` is ``rollout.weight_link``, ``dtype`` the number type of the server."""
        self.checksum = ""
        self._backend = backend
        self._dtype = dtype
        self._sender: GroupSender | None = None

    def prepare(self, shapes: Mapping[str, Any]) -> None:
        """Tensors are sent from where they are."""

    async def load(self, link: GroupLink, info: ServerInfo, update: WeightUpdate, label: str, *, flush: bool) -> None:
        sender = await self._joined(link, info)
        try:
            self.checksum = await sender.send(update, self._dtype, label, flush=flush)
        except BaseException:
            sender.close()
            self._sender = None
            raise

    async def _joined(self, link: GroupLink, info: ServerInfo) -> GroupSender:
        if self._sender is None or self._sender.link is not link:
            if self._sender is not None:
                self._sender.close()
            sender = GroupSender(link, info, self._backend, limit_s=LIMIT_S)
            await sender.join()
            self._sender = sender
        return self._sender

    async def end(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.leave()


class GroupSender:
    """The group with one process of a server. Belongs to one event loop."""

    def __init__(self, link: GroupLink, info: ServerInfo, backend: WeightLink, *, limit_s: float) -> None:
        """``limit_s`` is how long joining, and sending one tensor, may take."""
        self.link = link
        self._num_workers = info.num_workers
        self._backend = backend
        self._limit_s = limit_s
        self._name = f"headwater-{uuid.uuid4().hex[:12]}"
        self._group: Link | None = None

    async def join(self) -> None:
        """Meet all workers of the server."""
        host = own_address(urlsplit(self.link.url).hostname or "127.0.0.1")
        backend, port = self._backend, host_store(host).port
        size = self._num_workers + 1
        meeting = Meeting(host, port, self._name, backend, self._limit_s, connects_first=False)
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self._name,
            "backend": backend,
        }
        joining = asyncio.create_task(asyncio.to_thread(partial(Link.connect, meeting, 0, size)))
        try:
            await self.link.join_group(body)
        except BaseException:
            with suppress(Exception):  # this end gives up at its limit; why the server refused says more
                (await joining).close()
            raise
        self._group = await joining

    async def send(self, update: WeightUpdate, dtype: torch.dtype, label: str, *, flush: bool) -> str:
        """Return when the server uses the weights: their checksum, if it tells one."""
        buckets = as_announced(update.buckets, update.shapes, dtype)
        parts = _whole(buckets, update.shapes) if self.link.takes_whole else _buckets(buckets)
        await self.link.begin_update()
        loop = asyncio.get_running_loop()
        checksum = await asyncio.to_thread(self._send_all, parts, update, dtype, label, flush, loop)
        await self.link.end_update()
        return checksum

    async def leave(self) -> None:
        """End the group on both sides."""
        with suppress(LinkLost, HeadwaterError):  # older versions cannot, and the server may have ended
            await self.link.leave_group(self._name)
        self.close()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send_all(
        self,
        parts: Iterator[Part],
        update: WeightUpdate,
        dtype: torch.dtype,
        label: str,
        flush: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> str:
        num_left, checksum = len(update.shapes), ""
        for names, tensors in parts:
            num_left -= len(names)
            body = {
                "names": list(names),
                "dtypes": [str(dtype).removeprefix("torch.")] * len(names),
                "shapes": [list(update.shapes[name]) for name in names],
                "group_name": self._name,
                "flush_cache": flush and not num_left,
            }
            if not num_left:  # only the last call completes the version
                body["weight_version"] = label
            ready = _begun(tensors)
            call = asyncio.run_coroutine_threadsafe(self.link.receive(body), loop)
            checksum = self._send_part(ready, dtype, call)
        return checksum

    def _send_part(self, tensors: Iterable[torch.Tensor], dtype: torch.dtype, call: Future[str]) -> str:
        assert self._group is not None, "joined"
        for tensor in tensors:
            if call.done():  # it was refused, or the server has ended
                call.result()
                raise RolloutFailed("the server answered before it had received all weights")
            ready = tensor.detach().to(device=self._group.device_for(tensor), dtype=dtype).contiguous()
            try:
                self._group.broadcast(ready).wait()
            except WeightsError as error:
                self.close()
                raise self._reason(call) or LinkLost(str(error)) from error
        return wait_for_future(call, lambda: "the server uses the weights", kind="weights", hard_limit_s=_LAST_CALL_S)

    def _reason(self, call: Future[str]) -> BaseException | None:
        """Why a call failed whose group has broken; None if it does not tell.

        The other members of the group notice its end, and a call that receives all tensors then returns. A call for
        one bucket of many may wait for what follows.
        """
        try:
            return call.exception(_LAST_ANSWER_S if self.link.takes_whole else 0)
        except (TimeoutError, CancelledError):
            call.cancel()
            return None


def _begun(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, once the first one is there. The server's limit begins with the call, and other servers that take
    the same stream may have to finish responses first."""
    rest = iter(tensors)
    return chain([first for first in [next(rest, None)] if first is not None], rest)


def _buckets(buckets: Iterable[Bucket]) -> Iterator[Part]:
    for bucket in buckets:
        yield [name for name, _ in bucket], [tensor for _, tensor in bucket]


def _whole(buckets: Iterable[Bucket], expected: Mapping[str, Any]) -> Iterator[Part]:
    def tensors() -> Iterator[torch.Tensor]:
        names = iter(expected)
        for bucket in buckets:
            for name, tensor in bucket:
                if name != next(names, None):
                    raise WeightsError(f"{name}: was not announced in this place")
                yield tensor

    yield list(expected), tensors()
