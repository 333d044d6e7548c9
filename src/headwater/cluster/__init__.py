"""Several processes that train together. This file stays light: it is read before torch is imported."""

from __future__ import annotations

import os


def num_launched() -> int:
    """The number of ranks that a launcher such as torchrun has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """The number of this rank, from 0."""
    return int(os.environ.get("RANK", "0"))


def keep_ray_local() -> None:
    """Let a Ray that this process starts listen on this machine only. To be called before Ray is imported."""
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # with 0, Ray uses the loopback address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
