"""An engine that only remembers what it was asked, for workflows that need nothing else of it."""

from __future__ import annotations


class HeldEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")
