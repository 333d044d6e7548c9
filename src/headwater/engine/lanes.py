"""Host-side storage of the sequences that are being decoded, one lane each, and the queued rounds that fill it.

State is kept in arrays over lanes, so that storing the output of a round takes a few numpy operations however many
sequences there are. A lane keeps its number while its sequence moves between device rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.core.new_tokens import TOKEN, NewTokens
from headwater.engine.pages import Pages
from headwater.engine.runners.plain import Output
from headwater.engine.sampler import SamplingNeeds
from headwater.engine.sequence import EngineSequence

_PILE = 64
"""Number of new tokens after which a lane's output is passed to its sequence early, so that little is left to copy when
many sequences end at once or weights are swapped."""

_AS_TUPLE = attrgetter(*(field.name for field in fields(SamplingNeeds)))
"""The needs in field order. ``dataclasses.astuple`` is tens of times slower, and this runs for every sequence."""

_TRUNCATES = [field.name for field in fields(SamplingNeeds)].index("truncates")


class Lanes:
    """Arrays with one entry per lane. The engine's thread owns them."""

    def __init__(self, capacity: int, max_pages: int) -> None:
        self.capacity = capacity
        self.sequence: list[EngineSequence | None] = [None] * capacity
        self.row = np.full(capacity, -1, np.int64)
        self.planned = np.zeros(capacity, np.int64)
        """Tokens in the cache once all queued steps have run; fewer if the sequence ends early."""
        self.end = np.zeros(capacity, np.int64)
        """Tokens in the cache once the sequence has used its whole token budget."""
        self.num_pages = np.zeros(capacity, np.int64)
        self.page_table = np.zeros((capacity, max_pages), np.int32)
        self.version = np.zeros(capacity, np.int64)
        """Policy version of the cached keys and values; -1 once several versions are mixed."""
        self.tenancy = np.zeros(capacity, np.int64)
        """Counts the sequences that a lane has held, to recognise late output of an earlier one."""
        self.watched = np.zeros(capacity, np.bool_)
        """Lanes whose output the host inspects while they run: streams, stop strings, many stop tokens."""
        self.order = np.zeros(capacity, np.int64)
        """Arrival number of the sequence."""
        self.needs = np.zeros((capacity, len(fields(SamplingNeeds))), np.bool_)
        """What sampling needs for the lane, in the field order of ``SamplingNeeds``."""
        self.start: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * capacity
        """The tokens the lane started with: the prompt, and the tokens generated before an interruption."""
        self.feed = np.zeros(capacity, np.int64)
        """The caller that takes the lane's tokens round by round (``sequence.Following``); 0 if there is none."""
        self._number = np.zeros(capacity, np.int64)
        self._num_out = np.zeros(capacity, np.int64)
        self._num_sent = np.zeros(capacity, np.int64)
        self._num_collected = np.zeros(capacity, np.int64)
        self._tokens = np.zeros((capacity, 0), np.int32)
        self._logprobs = np.zeros((capacity, 0), np.float32)
        self._versions = np.zeros((capacity, 0), np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(
        self,
        sequences: Sequence[EngineSequence],
        rows: Sequence[int],
        start: NDArray[np.int32],
        pages: NDArray[np.int32],
        version: int,
    ) -> list[int]:
        """Lanes for samples of one prompt, whose tokens are ``start``. ``pages`` is ``[samples, pages]``."""
        numbers = [self._free.pop() for _ in sequences]
        lanes = np.array(numbers, np.int64)
        num_left = [each.num_left for each in sequences]
        following = [each.following for each in sequences]
        for lane, sequence in zip(numbers, sequences, strict=True):
            self.sequence[lane] = sequence
            self.start[lane] = start
        self.row[lanes] = rows
        self.planned[lanes] = len(start)
        # The last token of a response is sampled but never fed back.
        self.end[lanes] = len(start) - 1 + np.array(num_left)
        self.num_pages[lanes] = pages.shape[1]
        self.page_table[lanes, : pages.shape[1]] = pages
        self.version[lanes] = version
        self.watched[lanes] = [each.is_watched for each in sequences]
        self.order[lanes] = [each.order for each in sequences]
        samplings = {id(each.request.sampling): each.request.sampling for each in sequences}  # usually one for all
        needs = {key: _AS_TUPLE(SamplingNeeds.of(sampling)) for key, sampling in samplings.items()}
        self.needs[lanes] = [needs[id(each.request.sampling)] for each in sequences]
        self._num_out[lanes] = self._num_collected[lanes] = self._num_sent[lanes] = 0
        self.feed[lanes] = [0 if each is None else each.feed for each in following]
        self._number[lanes] = [0 if each is None else each.number for each in following]
        self._make_room(max(num_left))
        return numbers

    def needs_of(self, lanes: NDArray[np.int64]) -> SamplingNeeds:
        """What sampling needs for all of ``lanes`` together."""
        if not len(lanes):
            return SamplingNeeds()
        return SamplingNeeds(*self.needs[lanes].max(axis=0).tolist())

    def cut_rows_of(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of those ``lanes`` that truncate their distribution."""
        rows: NDArray[np.int64] = self.row[lanes[self.needs[lanes, _TRUNCATES]]]
        return rows

    def give_back(self, lane: int) -> None:
        self.sequence[lane] = None
        self.row[lane] = -1
        self.feed[lane] = 0
        self.tenancy[lane] += 1
        self._free.append(lane)

    def give_back_all(self, lanes: NDArray[np.int64]) -> None:
        """``give_back`` for many lanes."""
        numbers = lanes.tolist()
        for lane in numbers:
            self.sequence[lane] = None
        self.row[lanes] = -1
        self.feed[lanes] = 0
        self.tenancy[lanes] += 1
        self._free += numbers

    def pages(self, lane: int) -> Pages:
        return self.page_table[lane, : self.num_pages[lane]]

    def pages_of(self, lanes: NDArray[np.int64]) -> Pages:
        """The pages of all ``lanes``. A page that several lanes share occurs several times."""
        count = self.num_pages[lanes]
        table = self.page_table[lanes, : count.max(initial=0)]
        return table[np.arange(table.shape[1]) < count[:, None]]

    def last_pages_first(self, lanes: NDArray[np.int64]) -> Pages:
        """``pages_of`` in another order: the last page of every lane comes before the page in front of it."""
        count = self.num_pages[lanes]
        width = count.max(initial=0)
        table = self.page_table[lanes, :width]
        is_page = np.arange(width) < count[:, None]
        return table.T[::-1][is_page.T[::-1]]

    def page_updates(
        self, lanes: NDArray[np.int64], first: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Pages]:
        """Updates for the device's page table: rows, columns and values of the lanes' pages starting at ``first``."""
        count = self.num_pages[lanes] - first
        lane, column = np.repeat(lanes, count), _places(first, count)
        return self.row[lane], column, self.page_table[lane, column]

    def append(
        self,
        lanes: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        is_valid: NDArray[np.bool_],
        version: int,
    ) -> None:
        """Store ``[steps, lanes]`` of output. Entries that are not valid come from rows without a running sequence."""
        step, column = np.nonzero(is_valid)
        lane = lanes[column]
        place = self._num_out[lane] + step
        self._tokens[lane, place] = tokens[step, column]
        self._logprobs[lane, place] = logprobs[step, column]
        self._versions[lane, place] = version
        # Count only valid entries: rows without a sequence have lane -1, which would index the last lane.
        self._num_out += np.bincount(lane, minlength=self.capacity)

    def take_unsent(self, dropped: Mapping[int, int]) -> Iterator[tuple[Callable[[NewTokens], None], NewTokens]]:
        """The tokens that callers who follow their requests do not have yet, and how to pass them on.

        ``dropped`` says how many of a lane's last tokens were sampled after the end of the response. It must be called
        before such lanes are given back.
        """
        if not self.feed.any():
            return
        num_new = self._num_out - self._num_sent
        num_new[list(dropped.keys())] -= np.fromiter(dropped.values(), np.int64, len(dropped))
        fed = np.flatnonzero((self.feed > 0) & (num_new > 0))
        for feed in np.unique(self.feed[fed]).tolist():
            lanes = fed[self.feed[fed] == feed]
            count = num_new[lanes]
            lane, column = np.repeat(lanes, count), _places(self._num_sent[lanes], count)
            tokens = np.empty(len(lane), TOKEN)
            tokens["token"], tokens["logprob"] = self._tokens[lane, column], self._logprobs[lane, column]
            tokens["version"] = self._versions[lane, column]
            self._num_sent[lanes] += count
            sequence = self.sequence[lanes[0]]
            assert sequence is not None
            assert sequence.following is not None
            yield sequence.following.put, NewTokens(self._number[lanes], count.astype(np.int32), tokens)

    def collect(self, lane: int) -> None:
        """Pass a lane's new output to its sequence."""
        sequence = self.sequence[lane]
        assert sequence is not None
        new = slice(self._num_collected[lane], self._num_out[lane])
        sequence.extend(
            self._tokens[lane, new].tolist(), self._logprobs[lane, new].tolist(), self._versions[lane, new].tolist()
        )
        self._num_collected[lane] = self._num_out[lane]

    def collect_early(self) -> None:
        """Pass on the output of lanes that have collected many tokens."""
        piled_up = (self.row >= 0) & (self._num_out - self._num_collected >= _PILE)
        if piled_up.any():
            self.collect_all(np.flatnonzero(piled_up))

    def collect_all(self, lanes: NDArray[np.int64]) -> None:
        """``collect`` for many lanes."""
        first = self._num_collected[lanes]
        count = self._num_out[lanes] - first
        lane, column = np.repeat(lanes, count), _places(first, count)
        tokens = self._tokens[lane, column].tolist()
        logprobs = self._logprobs[lane, column].tolist()
        versions = self._versions[lane, column].tolist()
        start = 0
        for number, end in zip(lanes.tolist(), np.cumsum(count).tolist(), strict=True):
            sequence = self.sequence[number]
            assert sequence is not None
            sequence.extend(tokens[start:end], logprobs[start:end], versions[start:end])
            start = end
        self._num_collected[lanes] = self._num_out[lanes]

    def token_bytes(self, lane: int) -> bytes:
        """The bytes of ``EngineSequence.all_tokens`` once everything is collected, without a loop over tokens."""
        return b"".join((self.start[lane].data, self._tokens[lane, : self._num_out[lane]].data))

    def cached_tokens(self, lane: int) -> NDArray[np.int32]:
        """The tokens whose keys and values are known to be in the lane's pages."""
        # The last sampled token was never fed back.
        generated = self._tokens[lane, : max(0, self._num_out[lane] - 1)]
        return np.concatenate([self.start[lane], generated])

    def _make_room(self, num_tokens: int) -> None:
        """Make the arrays wide enough for a token budget. This costs address space; memory is used as it is written."""
        width = self._tokens.shape[1]
        if num_tokens > width:
            shape = self.capacity, max(num_tokens, 2 * width)
            self._tokens = self._widened(self._tokens, shape)
            self._logprobs = self._widened(self._logprobs, shape)
            self._versions = self._widened(self._versions, shape)

    def _widened(self, array: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
        wider = np.zeros(shape, array.dtype)
        for lane in np.flatnonzero(self.row >= 0):
            wider[lane, : self._num_out[lane]] = array[lane, : self._num_out[lane]]
        return wider


def _places(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges ``first[i], ..., first[i] + count[i] - 1``."""
    return np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)


@dataclass(frozen=True)
class Drawn:
    """The result of a round: the number of tokens, and the lanes that need attention."""

    num_tokens: int
    ended: list[int]
    """Lanes whose sequences sampled a stop token or used up their budgets."""
    watched: NDArray[np.int64]
    """Lanes that continue and whose output the host inspects."""
    watched_tokens: NDArray[np.int32]
    """The tokens of the watched lanes, ``[steps, watched]``; -1 where a lane sampled nothing."""
    broken: list[int]
    """Lanes that sampled from NaN or infinite logits. Their output was not stored."""


@dataclass(frozen=True)
class Round:
    """Steps that are queued on the device, and the lanes their output belongs to."""

    output: Output
    lanes: NDArray[np.int64]
    tenancies: NDArray[np.int64]
    version: int

    def take_in(self, lanes: Lanes) -> Drawn:
        """Wait for the output and store it in ``lanes``, except for lanes that hold another sequence by now."""
        tokens, logprobs, alive = self.output.wait()
        width = len(self.lanes)  # further rows are padding
        tokens, logprobs, alive = tokens[:, :width], logprobs[:, :width], alive[:width]
        is_current = (self.lanes >= 0) & (lanes.tenancy[self.lanes] == self.tenancies)
        valid = (tokens >= 0) & is_current
        is_broken = (valid & np.isnan(logprobs)).any(axis=0)
        is_current &= ~is_broken
        valid &= ~is_broken
        lanes.append(self.lanes, tokens, logprobs, valid, self.version)
        is_watched = is_current & alive & lanes.watched[self.lanes]
        return Drawn(
            num_tokens=int(valid.sum()),
            ended=self.lanes[is_current & ~alive].tolist(),
            watched=self.lanes[is_watched],
            watched_tokens=np.where(valid[:, is_watched], tokens[:, is_watched], -1),
            broken=self.lanes[is_broken].tolist(),
        )
