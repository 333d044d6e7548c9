"""How a server is set up, apart from its engine."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_MIB = 64
KEY_VARIABLE = "HEADWATER_API_KEY"
"""Where a server finds its key, because ``ps`` shows arguments to everybody and the environment to nobody else."""


@dataclass(frozen=True)
class ServerOptions:
    served_name: str
    """The model's name in requests and replies."""
    api_key: str = ""
    """What clients send as ``Authorization: Bearer``; empty lets everyone in."""
    max_body_bytes: int = DEFAULT_MAX_BODY_MIB * 2**20
