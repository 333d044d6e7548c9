"""Where prompts come from (``PromptStream``), and what the training loop needs of rollouts (``RolloutSource``)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from headwater.core.errors import DataError, HeadwaterError
from headwater.core.records import Prompt
from headwater.core.requests import derive_key
from headwater.data.digest import check_same, digests_of, from_text, to_text
from headwater.data.load import DigestedDataset, MixedDataset, PromptDataset
from headwater.data.rlhf_dataset import RLHFDataset, is_read_by_threads
from headwater.data.sampler import Draw, MixingSampler, Sampler, ShufflingSampler
from headwater.rollout.group import PromptDraw, RolloutBatch, UnreadableRow
from headwater.rollout.ledger import Ledger, LedgerCounts
from headwater.rollout.snapshot import Books, RolloutSnapshot

logger = logging.getLogger(__name__)

_DIGESTS = "rows"
_READ_TOGETHER = 16
"""Prompts with images or videos that are read at the same time, each by a thread."""


class PromptSource(Protocol):
    def take(self, count: int) -> Sequence[PromptDraw]:
        """The next ``count`` prompts, or fewer if there are no more."""
        ...

    def again(self, index: int, epoch: int) -> PromptDraw:
        """Repeat an earlier draw."""
        ...

    def prepare(self, count: int) -> None:
        """The next ``count`` prompts will soon be taken: render and encode them now, if that helps."""
        ...

    async def read_ahead(self, count: int, at_least: int) -> int:
        """Make it fast to take ``at_least`` of the next ``count`` prompts, or more. Returns how many."""
        ...


class PromptStream:
    """The endless stream of training prompts, in the order of the sampler. Its state has the sampler's, and digests of
    the rows."""

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool, *, gives_unreadable: bool = False) -> None:
        """``gives_unreadable``: a row that cannot be read is drawn as an ``UnreadableRow``, and is no error here."""
        self._dataset = dataset
        self._gives_unreadable = gives_unreadable
        self._seed = seed
        self._parts = dataset.parts if isinstance(dataset, MixedDataset) else ()
        self._mixing = MixingSampler(self._parts, seed, shuffle) if any(part.weight for part in self._parts) else None
        self._sampler: Sampler = self._mixing or ShufflingSampler(len(dataset), seed, shuffle)
        self._digests = self._state_of_rows()
        self._prepared: dict[int, Prompt] = {}
        """Prompts that are built already, by their rows. Only a cache: a resumed run builds them again."""
        self._unreadable: dict[int, DataError] = {}
        """Why rows that were read ahead cannot be built, until they are taken."""
        self._reading: dict[int, asyncio.Task[None]] = {}
        """Prompts with images or videos that are being built by other threads, by their rows."""
        self._reads_all: asyncio.Task[int] | None = None
        self._waited_s = self._told_s = 0.0
        """For how long groups have waited for the images and videos of their prompts, and how much of it ``metrics``
        has told."""

    def take(self, count: int) -> list[PromptDraw]:
        return [self.again(draw.index, draw.epoch) for draw in self._sampler.take(count)]

    def again(self, index: int, epoch: int) -> PromptDraw:
        """Repeat an earlier draw: the same prompt with the same randomness."""
        row = self._prepared.pop(index, None) or self._built(index)
        # The epoch is part of the key, so that a prompt gets new responses in every epoch.
        return PromptDraw(row, derive_key(self._seed, "rollout", epoch, row.uid), index, epoch)

    def _built(self, index: int) -> Prompt | UnreadableRow:
        try:
            # Not read again: that could take long, and all episodes would wait for it.
            if (error := self._unreadable.pop(index, None)) is not None:
                raise error
            return self._dataset[index]
        except DataError as error:
            if not self._gives_unreadable:
                raise
            return UnreadableRow(self._uid(index), error)

    def _uid(self, index: int) -> str:
        """The uid of a row that cannot be read. A custom class cannot tell it."""
        return self._dataset.uid(index) if type(self._dataset) is RLHFDataset else f"row {index}"

    def prepare(self, count: int) -> None:
        """Build the next ``count`` prompts. The position in the stream does not change.

        A custom dataset is asked when its prompts are taken, because its rows may depend on the state of the run.
        """
        if type(self._dataset) is not RLHFDataset:
            return
        if is_read_by_threads(self._dataset):
            self._reads_all = asyncio.ensure_future(self._read_next(count, at_least=count))
            return
        self._prepared = {}
        for draw in self._sampler.peek(count):
            try:
                self._prepared[draw.index] = self._dataset[draw.index]
            except HeadwaterError:  # ``take`` raises it, if the run gets that far
                return

    async def read_ahead(self, count: int, at_least: int) -> int:
        """Build the next prompts in other threads if they may have images or videos, because reading these takes long.

        The caller's event loop runs the episodes. Returns how many of the next ``count`` are built, so that the first
        ones can start while others are read.
        """
        if not is_read_by_threads(self._dataset):
            return count
        began = time.monotonic()
        try:
            return await self._read_next(count, at_least)
        finally:
            self._waited_s += time.monotonic() - began

    async def _read_next(self, count: int, at_least: int) -> int:
        draws, num_read = self._sampler.peek(count), 0
        while num_read < min(count, at_least):
            await self._read(draws[num_read : num_read + _READ_TOGETHER])
            num_read += _READ_TOGETHER
        built = itertools.takewhile(lambda draw: self._has_read(draw.index), draws)
        return max(len(list(built)), min(count, num_read))

    async def _read(self, draws: Sequence[Draw]) -> None:
        """Build those of the prompts that are not built yet, together."""
        for draw in draws:
            if not self._has_read(draw.index) and draw.index not in self._reading:
                self._reading[draw.index] = asyncio.ensure_future(self._read_one(draw.index))
        if tasks := [self._reading[draw.index] for draw in draws if draw.index in self._reading]:
            await asyncio.wait(tasks)

    def _has_read(self, index: int) -> bool:
        return index in self._prepared or index in self._unreadable

    async def _read_one(self, index: int) -> None:
        try:
            self._prepared[index] = await asyncio.to_thread(self._dataset.__getitem__, index)
        except DataError as error:  # ``take`` says so, if the run gets that far
            self._unreadable[index] = error
        except Exception:  # ``take`` raises it
            logger.debug("row %d cannot be read ahead", index, exc_info=True)
        finally:
            del self._reading[index]

    def metrics(self, prompts: Iterable[Prompt]) -> dict[str, float]:
        """How long groups waited for the images and videos of their prompts since the last call, if a prompt has any.

        If there are several sources, also the prompts of a step from each of them, and with weights all draws so far.
        """
        prompts, metrics = list(prompts), dict[str, float]()
        if any(prompt.media for prompt in prompts):
            waited_s = self._waited_s
            metrics["time/media_wait_s"] = waited_s - self._told_s
            self._told_s = waited_s
        if len(self._parts) < 2:
            return metrics
        counts = Counter(prompt.source for prompt in prompts)
        metrics |= {f"data/{part.name}/prompts": counts[part.name] for part in self._parts}
        if self._mixing is not None:
            for part, drawn, epoch in zip(self._parts, self._mixing.counts, self._mixing.epochs, strict=True):
                metrics |= {f"data/{part.name}/drawn": drawn, f"data/{part.name}/epoch": epoch}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {**self._sampler.state_dict(), **self._digests}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raise an error if its rows were others."""
        self._sampler.load_state_dict(state)
        self._prepared, self._unreadable = {}, {}
        if _DIGESTS in state:
            self._check_rows(state[_DIGESTS])
        elif self._digests:
            logger.warning(
                "the checkpoint has no digests of its rows, as those of earlier versions: only the number of rows was "
                "compared, not whether the data are the same"
            )

    def _state_of_rows(self) -> dict[str, str]:
        dataset = self._dataset
        if not isinstance(dataset, DigestedDataset):
            return {}
        return {_DIGESTS: to_text(digests_of(dataset.row_digest, len(dataset)))}

    def _check_rows(self, saved: str) -> None:
        """The number of rows is that of the checkpoint. It decides which of them are compared."""
        dataset, before = self._dataset, from_text(saved)
        if isinstance(dataset, DigestedDataset):
            now = from_text(self._digests[_DIGESTS])
            if len(now) != len(before):  # another version of Headwater compares another number of rows
                now = digests_of(dataset.row_digest, len(dataset), len(before))
            check_same(before, now, len(dataset), lambda index: dataset[index].uid)


class RolloutSource(Protocol):
    """What the training loop needs of rollouts. ``WorkflowExecutor`` generates them, ``ReplayedRollouts`` repeats those
    of a recorded run."""

    ledger: Ledger

    def expect_batches(self, num_batches: int) -> None:
        """The number of batches that the learner will take; no prompt starts for a later one."""
        ...

    def prepare_batch(self, prompts: PromptSource) -> RolloutBatch: ...
    def trained(self, step: int, weights: Callable[[], str]) -> None:
        """The last batch was trained on in ``step``. ``weights`` waits for the checksum of the new weights."""
        ...

    def finish_all(self) -> None: ...
    def set_version(self, version: int) -> None: ...
    def check_ledger(self) -> LedgerCounts: ...
    def close_books(self, cursor: Callable[[], Mapping[str, Any]]) -> Books: ...
    def snapshot(self, cursor: Callable[[], Mapping[str, Any]]) -> RolloutSnapshot: ...
    def restore(self, snapshot: RolloutSnapshot, version: int) -> None: ...
    def status(self) -> dict[str, Any]: ...
