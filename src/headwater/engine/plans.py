"""What the scheduler tells the loop and the runner to do next. Host data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.core.records import SamplingParams
from headwater.engine.pages import Pages

MAX_STOP_IDS = 16
"""Stop tokens of a row that are watched on the device; a request with more is watched on the host as well."""


class NeedsRoom(Exception):
    """The next steps need pages that are in use; before one is preempted, what the queued steps drew must be known."""


@dataclass(frozen=True)
class SamplingNeeds:
    """What drawing tokens for a set of rows takes; steps that no row needs are left out."""

    truncates: bool = False
    """Whether any row cuts its distribution; sorting the vocabulary is skipped otherwise."""
    scales: bool = False
    """Whether any row has a temperature other than 1; without one a pass over the logits is saved."""
    has_greedy: bool = False
    """Whether any row takes the likeliest token; finding it is skipped otherwise."""
    has_minimum: bool = False
    """Whether any row must make so many tokens before one may end it."""

    @classmethod
    def of(cls, *params: SamplingParams) -> SamplingNeeds:
        return cls(
            truncates=any(each.top_k > 0 or each.top_p < 1 or each.min_p > 0 for each in params),
            scales=any(each.temperature not in (0.0, 1.0) for each in params),
            has_greedy=any(each.temperature == 0 for each in params),
            has_minimum=any(each.min_new_tokens > 0 for each in params),
        )


@dataclass(frozen=True)
class NewRow:
    """A sequence that joins the rows: everything a decode step needs to know of it."""

    row: int
    num_tokens: int
    """Tokens whose keys and values are in the cache: the prompt, and what was generated before an interruption."""
    num_generated: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    rng_key: int


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of prompts, packed one after the other, and the rows that start where a chunk completes its prompt."""

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
    """Per new row, the place in ``input_ids`` of its prompt's last token."""
    needs: SamplingNeeds


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
