"""The settings of a server, apart from its engine."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_MIB = 64
DEFAULT_MAX_RESPONSES = 4096
KEY_VARIABLE = "HEADWATER_API_KEY"
"""The environment variable that holds the API key. Unlike an argument, ``ps`` does not show it to other users."""


@dataclass(frozen=True)
class ServerOptions:
    served_name: str
    """The model's name in requests and replies."""
    short_name: str = ""
    """Another name that requests may give, such as the last part of a folder; empty if there is none."""
    api_key: str = ""
    """The key that clients send as ``Authorization: Bearer KEY``. If it is empty, no key is needed."""
    max_body_bytes: int = DEFAULT_MAX_BODY_MIB * 2**20
    """The size of the largest request body that is accepted."""
    max_responses: int = DEFAULT_MAX_RESPONSES
    """The largest number of responses that one request may ask for: its prompts times its samples per prompt."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients may reach a server without a key, in addition to this machine's own names and to IP
    addresses. ``*`` allows every name."""
    idle_limit_s: float = 75.0
    """A connection is closed if it sends no complete request header for this long."""
    body_limit_s: float = 120.0
    """How long a request body may take to arrive."""
    model_path: str = ""
    """Where the model was loaded from, for ``/get_model_info``. Defaults to ``served_name``."""
    device: str = ""
    """The engine's device, for example ``cuda:1``; empty for a router, which has no device."""
    fetches_media: bool = False
    """Whether images may be given as addresses on the network, which the server then downloads."""
    tool_parser: str = "auto"
    """The format of tool calls: a file in ``headwater/chat/parsers``, or ``auto`` to choose it from the template."""

    @property
    def gpu(self) -> str:
        """The engine's GPU. Other threads have to be told, because their current one is the first."""
        return self.device if self.device.startswith("cuda") else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give."""
        return (self.served_name, self.short_name) if self.short_name else (self.served_name,)
