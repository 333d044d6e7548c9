"""The state of an engine at one moment, and of the servers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server behind an engine that uses several."""

    name: str
    """Unique within the engine."""
    url: str = ""
    """Empty for an engine in this process."""
    version: int = 0
    """The policy version that it serves."""
    num_running: int = 0
    num_waiting: int = 0
    is_alive: bool = True
    """False while it cannot be reached or has failed."""
    num_restarts: int = 0
    state: str = "serving"
    """In words, for example ``serving``, ``draining`` or ``unreachable: connection refused``."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine at one moment."""

    version: int
    """The policy version of the current weights."""
    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    """How often the engine's process was replaced."""
    needs_weights: bool = False
    """The engine generates nothing until the current weights have been published to it again."""
    is_paused: bool = False
    is_asleep: bool = False
    """Some of the engine's memory is released, so it generates nothing until ``wake``."""
    is_alive: bool = True
    """False after the engine has failed or was closed; every request then fails."""
    is_reachable: bool = True
    """False while the engine's process or server does not answer, for example because it restarts. Requests wait."""
    servers: tuple[ServerStatus, ...] = ()
    """The servers of an engine that uses several (``backends/router``)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's settings, with automatic values resolved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further measurements; their names depend on the engine."""
