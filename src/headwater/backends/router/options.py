"""The settings of a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.backends.router.policy import MAX_SESSIONS
from headwater.core.waits import ENGINE_CALL_LIMIT_S

UpdateOrder = Literal["together", "rolling"]


@dataclass(frozen=True)
class RouterOptions:
    """Limits of a router."""

    max_open_per_server: int = 1024
    """The largest number of requests that a server has at the same time. A server's own limit may be smaller."""
    max_waiting: int = 65_536
    """The largest number of requests that wait for a server. More are refused."""
    max_sessions: int = MAX_SESSIONS
    """How many sessions are remembered; those that were used least recently are forgotten."""
    health_every_s: float = 1.0
    """Time between two health checks of a server. Longer if there are more than 100 servers for each second of it."""
    health_limit_s: float = 15.0
    """A server that does not report its status for this long counts as lost."""
    no_server_limit_s: float = 600.0
    """Requests fail if no server could take any request for this long, or if all servers have had older weights than a
    request has seen for this long."""
    update_start_limit_s: float = ENGINE_CALL_LIMIT_S
    """How long a server may take to begin a weight update. Running responses may have to end first."""
    update_new_start_limit_s: float = 120.0
    """The same for a server that has joined and takes its first weights alone. It has no responses of this router."""
    update_bucket_limit_s: float = 120.0
    """A server that takes longer for one bucket of a weight update is dropped from it."""
    weight_folder: str = ""
    """Where weights are written, once for all servers, if they read files (``rollout.weight_folder``)."""
    keeps_one: bool = False
    """Refuse to drain or remove the last server that can serve, because a run would wait for it until it fails."""
    update_order: UpdateOrder = "together"
    """Whether all servers take new weights at the same time, or one after another (``rollout.update_order``)."""
