"""How far generation may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Admission:
    """When groups may start, and what happens to those that are too old all the same."""

    batch_size: int
    max_staleness: int = 0
    max_concurrent: int = 0
    """Groups that run at a time; 0 is as many as staleness allows."""
    num_batches: int | None = None
    on_stale: Literal["mask", "drop", "wait"] = "mask"
    in_waves: bool = True
    """Start prompts together, and the next ones when all of those have ended. What the engine computes together
    decides the last bits of log-probs: in waves that does not depend on how fast things happen."""
    holds_engine: bool = True
    """In waves, the engine begins when the first requests of all episodes are there."""
    max_rounds: int | None = None
    """Batches' worth of prompts after which a step goes on with fewer groups than a batch; None is no limit."""
