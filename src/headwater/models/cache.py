"""Where Headwater keeps what it fetched."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$HEADWATER_CACHE``, else ``$XDG_CACHE_HOME/headwater``, else ``~/.cache/headwater``."""
    own = os.environ.get("HEADWATER_CACHE", "")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "headwater"
