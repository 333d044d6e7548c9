"""What a child was told, so that the next one can be told the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.backends.served.server_client import ServerClient
from headwater.core.protocols import MemoryTag
from headwater.weights.image import WrittenWeights


@dataclass
class ChildState:
    version: int = 0
    written: WrittenWeights | None = None
    """The newest weights that were taken; without them, those that the model was loaded with."""
    is_paused: bool = False
    asleep: set[MemoryTag] = field(default_factory=set)

    async def restore(self, client: ServerClient) -> None:
        """Tell a child that has just started, before it is asked for anything."""
        if self.is_paused:
            await client.call("/control/pause", {})
        if self.written is not None:
            body = {"version": self.version, "source": self.written.source, "mode": "in_flight"}
            await client.call("/control/update_weights", body)
        elif self.version:
            await client.call("/control/version", {"version": self.version})
        if self.asleep:
            await client.call("/control/sleep", {"tags": sorted(self.asleep)})
