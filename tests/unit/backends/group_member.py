"""Member 1 of the process groups over which a trainer sends weights to SGLang, as a server with one process is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from headwater.weights.links import Link, Meeting


class GroupMember:
    """Does what the bodies of SGLang's calls say."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self._groups: dict[str, Link] = {}

    async def join(self, body: Mapping[str, Any]) -> None:
        """``/init_weights_update_group``"""
        name = body["group_name"]
        meeting = Meeting(
            body["master_address"], body["master_port"], name, body["backend"], 300.0, connects_first=False
        )
        self._groups[name] = await asyncio.to_thread(Link.connect, meeting, body["rank_offset"], body["world_size"])

    async def receive(self, body: Mapping[str, Any]) -> None:
        """``/update_weights_from_distributed``"""
        group = self._groups[body["group_name"]]
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            await asyncio.to_thread(lambda: group.broadcast(tensor).wait())  # noqa: B023
            self.received[name] = tensor
