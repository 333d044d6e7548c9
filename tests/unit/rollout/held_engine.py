"""An engine that only remembers what it was asked, for workflows that need nothing else of it."""

from __future__ import annotations

from headwater.core.capabilities import Capabilities


class HeldEngine:
    capabilities = Capabilities()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")
