"""Ends what scorers start once and keep until their process ends."""

from __future__ import annotations

import os

from headwater.rewards import verifier
from headwater.rewards.scorers import code as code_scorer


def end_judge() -> None:
    """The sandboxes of this process. The next program starts another one."""
    with code_scorer._judges_lock:
        while code_scorer._judges:
            code_scorer._judges.popitem()[1].close()


def end_verifier() -> None:
    """The process that compares answers for this one."""
    verifier._process_of(os.getpid()).close()
