"""How far a stage of a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageProgress:
    name: str
    done: int
    total: int
