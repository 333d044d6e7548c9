"""What the scheduler tells the loop to do next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.engine.pages import Pages
from headwater.engine.rows import SamplingNeeds
from headwater.engine.runner import PrefillBatch


class NeedsRoom(Exception):
    """The next steps need pages that are in use; before one is preempted, what the queued steps drew must be known."""


@dataclass(frozen=True)
class PrefillPlan:
    batch: PrefillBatch
    started: tuple[int, ...]
    """Lanes whose first token this batch draws, in the order of its new rows."""
    page_updates: tuple[NDArray[np.int64], NDArray[np.int64], Pages]
    """Rows, columns and pages for the device's page table."""


@dataclass(frozen=True)
class DecodePlan:
    num_rows: int
    num_steps: int
    lanes: NDArray[np.int64]
    """Lane of each row; -1 where a row has no sequence."""
    page_updates: tuple[NDArray[np.int64], NDArray[np.int64], Pages]
    needs: SamplingNeeds


@dataclass(frozen=True)
class Moves:
    """Rows that change places so that the rows in use are the first ones."""

    sources: list[int]
    targets: list[int]
