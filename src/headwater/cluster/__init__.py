"""Several processes that train together. This file stays light: it is read before torch is imported."""

from __future__ import annotations

import os


def num_launched() -> int:
    """The number of ranks that a launcher such as torchrun has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """The number of this rank, from 0."""
    return int(os.environ.get("RANK", "0"))
