"""Records that the scheduler passes to the loop and the runner: what to compute next. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.core.requests import SamplingParams
from headwater.engine.batch_media import BatchMedia
from headwater.engine.pages import Pages
from headwater.engine.sampler import SamplingNeeds

MAX_STOP_IDS = 16
"""Number of stop tokens per row that the device checks. For a request with more, the host checks the rest."""


class NeedsRoom(Exception):
    """The next steps need pages that are in use. The output of queued steps must be read before a preemption."""


@dataclass(frozen=True)
class NewRow:
    """A sequence that starts in a row: everything that a decode step needs to know about it."""

    row: int
    num_tokens: int
    """Tokens whose keys and values are in the cache: the prompt, and tokens generated before an interruption."""
    num_generated: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    rng_key: int
    rotary_shift: int = 0
    """What to add to the position of a token to get its rotary position, after media with a grid."""


@dataclass(frozen=True)
class PrefillBatch:
    """Packed chunks of prompts, and the rows that start because a chunk completes their prompt."""

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    page_table: NDArray[np.int32]
    """``[chunks, pages]``"""
    copied_pages: tuple[NDArray[np.int32], NDArray[np.int32]]
    """Sources and targets of copy-on-write."""
    new_rows: Sequence[NewRow]
    new_row_tokens: Sequence[int]
    """Per new row, the index in ``input_ids`` of its prompt's last token."""
    needs: SamplingNeeds
    media: BatchMedia | None = None
    """``None`` unless a prompt has media."""


@dataclass(frozen=True)
class PrefillPlan:
    batch: PrefillBatch
    started: tuple[int, ...]
    """Lanes whose first token this batch samples, in the order of its new rows."""
    page_updates: tuple[NDArray[np.int64], NDArray[np.int64], Pages]
    """Rows, columns and pages for the device's page table."""


@dataclass(frozen=True)
class DecodePlan:
    num_rows: int
    num_steps: int
    lanes: NDArray[np.int64]
    """Lane of each row; -1 for a row without a sequence."""
    page_updates: tuple[NDArray[np.int64], NDArray[np.int64], Pages]
    needs: SamplingNeeds
    cut_rows: NDArray[np.int64]
    """Rows whose distribution is truncated."""


@dataclass(frozen=True)
class Moves:
    """Rows that move so that the rows in use are the first ones."""

    sources: list[int]
    targets: list[int]
