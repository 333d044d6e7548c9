"""Weights over a process group, as trainers send them to SGLang: member 0 of the group is this process.

    sender = GroupSender(link, info, "gloo", limit_s=60)
    await sender.join()                                     # once for each process of the server
    await sender.send(update, torch.bfloat16, "7", flush=True)

SGLang receives a bucket with each call. From 0.5.21, the calls of an update stand between two others, which begin and
end it. ``headwater serve`` checks the tensors of a model together, in one call.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch

from headwater.backends.remote.link import LinkLost, ServerInfo
from headwater.backends.sglang.http import SglangLink
from headwater.config.schema import WeightLink
from headwater.core.errors import HeadwaterError, RolloutFailed, WeightsError
from headwater.core.protocols import WeightUpdate
from headwater.core.waits import wait_for_future
from headwater.weights.links import Link, Meeting, host_store, own_address

Part = tuple[Sequence[str], Iterable[torch.Tensor]]
"""The names of the tensors that one call receives, and the tensors."""

_PUBLISHED_NAMES = (("model.language_model.", "model."), ("model.visual.", "visual."))
"""How the names of a vision model in memory begin, and those in the published files of Qwen2.5-VL."""


def with_published_names(update: WeightUpdate) -> WeightUpdate:
    """An update of a vision model with the only names that SGLang's Qwen2.5-VL has; its Qwen3-VL has both.

    For other names of the decoder its process ends, and it ignores other names of the tower without a word.
    """
    shapes = {_published(name): shape for name, shape in update.shapes.items()}
    buckets = ([(_published(name), tensor) for name, tensor in bucket] for bucket in update.buckets)
    return replace(update, shapes=shapes, buckets=buckets, direct=None, file=None, again=None)


def _published(name: str) -> str:
    for own, published in _PUBLISHED_NAMES:
        if name.startswith(own):
            return published + name.removeprefix(own)
    return name


class GroupSender:
    """The group with one process of a server. Belongs to one event loop."""

    def __init__(self, link: SglangLink, info: ServerInfo, backend: WeightLink, *, limit_s: float) -> None:
        """``backend`` is ``rollout.weight_link``. ``limit_s`` is how long joining, and sending one tensor, may take."""
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

    async def send(self, update: WeightUpdate, dtype: torch.dtype, label: str, *, flush: bool) -> None:
        """Return when the server uses the weights."""
        parts = _whole(update) if self.link.is_ours else _buckets(update)
        await self.link.begin_update()
        await asyncio.to_thread(self._send_all, parts, update, dtype, label, flush, asyncio.get_running_loop())
        await self.link.end_update()

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
    ) -> None:
        num_left = len(update.shapes)
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
            call = asyncio.run_coroutine_threadsafe(self.link.receive(body), loop)
            self._send_part(tensors, dtype, call)
        if num_left:
            raise WeightsError(f"{num_left} tensors of {len(update.shapes)} did not arrive")

    def _send_part(self, tensors: Iterable[torch.Tensor], dtype: torch.dtype, call: Future[None]) -> None:
        assert self._group is not None, "joined"
        try:
            for tensor in tensors:
                if call.done():  # it was refused, or the server has ended
                    call.result()
                    raise RolloutFailed("the server answered before it had received all weights")
                ready = tensor.detach().to(device=self._group.device_for(tensor), dtype=dtype).contiguous()
                self._group.broadcast(ready).wait()
        except WeightsError as error:
            self.close()
            reason = call.exception() if call.done() else None
            call.cancel()
            if reason is not None:
                raise reason from error
            raise LinkLost(str(error)) from error
        wait_for_future(call, lambda: "the SGLang server uses the weights", kind="weights", hard_limit_s=600.0)


def _buckets(update: WeightUpdate) -> Iterator[Part]:
    for bucket in update.buckets:
        yield [name for name, _ in bucket], [tensor for _, tensor in bucket]


def _whole(update: WeightUpdate) -> Iterator[Part]:
    expected: Mapping[str, Any] = update.shapes

    def tensors() -> Iterator[torch.Tensor]:
        names = iter(expected)
        for bucket in update.buckets:
            for name, tensor in bucket:
                if name != next(names, None):
                    raise WeightsError(f"{name}: was not announced in this place")
                yield tensor

    yield list(expected), tensors()
