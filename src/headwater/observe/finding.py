"""One finding about a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FindingKind = Literal[
    "damaged_file",
    "damaged_checkpoint",
    "skipped",
    "killed",
    "failed",
    "unresponsive",
    "unknown_state",
    "ledger_unbalanced",
    "long_wait",
    "long_step",
    "drops",
    "reward_failures",
    "engine_restarts",
    "server_lost",
    "slower_steps",
    "learner_waits",
    "generation_ahead",
    "low_disk",
    "no_effect",
]


@dataclass(frozen=True)
class Finding:
    kind: FindingKind
    severity: Literal["problem", "hint"]
    """A problem is an error; a hint is a possible improvement."""
    what: str
    """The evidence, in words."""
    remedy: str = ""
