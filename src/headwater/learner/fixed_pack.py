"""Packs filled up to one of a few shapes, so that a recorded pass can compute many different packs.

    shape = PassShape.of(pack)
    inputs = FixedInputs.of(pack, shape)        # tensors of fixed sizes, in main memory like the pack

Tokens that fill up are separate sequences at the end of the pack. Nothing attends to them, no result is read from
them, and their gradient is zero, so the results are those of the pack itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.learner.packing import Pack
from headwater.models.packed_attention import AttentionTables, Copies, Segments, cumulative

_LEAST_TOKENS, _LEAST_PREDICTIONS, _LEAST_SEGMENTS, _LEAST_LENGTH, _LEAST_READERS = 128, 64, 16, 128, 4
_TOKEN_STEPS, _PREDICTION_STEPS = 4, 2
"""Sizes from one power of two to the next, unless a shape is coarse. The work grows with these two; larger tables cost
less than more graphs."""


@dataclass(frozen=True)
class PassShape:
    """The sizes of a pass."""

    num_tokens: int
    num_predictions: int
    num_segments: int
    longest_query: int
    longest_key: int
    num_keys: int = 0
    """With the copies of shared prompts. 0 if no prompt is shared."""
    num_shared: int = 0
    """Tokens of shared prompts. 0 if there is no backward pass, which alone needs to know them."""
    num_places: int = 0
    """Of a token of a shared prompt: its own, and one for every sample that reads it."""

    @classmethod
    def of(cls, pack: Pack, *, has_gradient: bool = True, is_coarse: bool = False) -> PassShape:
        """The smallest shape for ``pack``. It depends on nothing else, so a resumed run finds the same one.

        Coarse shapes are powers of two, so that fewer are needed: for packs that are computed faster than recorded.
        """
        token_steps, prediction_steps = (1, 1) if is_coarse else (_TOKEN_STEPS, _PREDICTION_STEPS)
        segments = pack.segments
        num_real = len(pack.input_ids)
        # At least one token fills up: places that fill up tables point to it.
        num_tokens = rounded_up(num_real + 1, _LEAST_TOKENS, token_steps)
        longest_query = rounded_up(int(segments.lengths.max()), _LEAST_LENGTH)
        longest_key = rounded_up(int((segments.lengths + segments.prefix_lengths).max()), _LEAST_LENGTH)
        num_fillers = -(-(num_tokens - num_real) // longest_query)
        own = cls(
            num_tokens,
            rounded_up(len(pack.targets), _LEAST_PREDICTIONS, prediction_steps),
            rounded_up(len(segments.lengths) + num_fillers, _LEAST_SEGMENTS),
            longest_query,
            longest_key,
        )
        if not segments.prefix_lengths.any():
            return own
        own = replace(own, num_keys=rounded_up(num_tokens + int(segments.prefix_lengths.sum()), _LEAST_TOKENS))
        if not has_gradient:
            return own
        prefixes = segments.prefixes()
        return replace(
            own,
            num_shared=rounded_up(int(prefixes.lengths.sum()), _LEAST_TOKENS),
            num_places=1 + rounded_up(int(prefixes.num_readers.max()), _LEAST_READERS),
        )


def rounded_up(size: int, least: int, steps: int = 1) -> int:
    """The next size of a series that has ``steps`` sizes from one power of two to the next."""
    size = max(size, least)
    unit = max(1, (1 << (size - 1).bit_length()) // (2 * steps))
    return -(-size // unit) * unit


class FixedInputs(NamedTuple):
    """What a pass over a filled-up pack reads, ``[...]`` as in ``PassShape``."""

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    query_starts: Tensor
    key_starts: Tensor
    key_places: Tensor
    own: Tensor
    shared: Tensor
    places: Tensor
    counts: Tensor

    @classmethod
    def of(cls, pack: Pack, shape: PassShape) -> FixedInputs:
        num_real, last = len(pack.input_ids), shape.num_tokens - 1
        segments = _filled_segments(pack.segments, num_real, shape)
        num_empty = shape.num_segments - len(segments.lengths)
        lengths = np.pad(segments.lengths, (0, num_empty))
        prefix_lengths = np.pad(segments.prefix_lengths, (0, num_empty))
        num_more = shape.num_predictions - len(pack.targets)
        return cls(
            # The first token of the pack at the first position: a sequence of others could overflow in float16.
            _filled(pack.input_ids, shape.num_tokens, with_value=int(pack.input_ids[0])),
            _filled(pack.position_ids, shape.num_tokens),
            # All different, because the gradient of places that are equal is summed one after the other.
            torch.cat([pack.predictors, torch.arange(num_more) % shape.num_tokens]),
            _filled(pack.targets, shape.num_predictions),
            cumulative(lengths),
            cumulative(lengths + prefix_lengths),
            *_prefix_tables(segments, shape, last),
        )

    def pack(self) -> Pack:
        """The pack as a model reads it. It has no rows."""
        nothing, no_rows = self.targets[:0], np.zeros(0, np.int64)
        return Pack(
            rows=[],
            batch_rows=nothing,
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            segments=Segments(no_rows, no_rows, no_rows, no_rows),
            predictors=self.predictors,
            targets=self.targets,
            row=nothing,
            column=nothing,
            width=0,
        )

    def tables(self, shape: PassShape) -> AttentionTables:
        plain = AttentionTables(self.query_starts, self.key_starts, shape.longest_query, shape.longest_key)
        if not shape.num_keys:
            return plain
        copies = Copies(self.own, self.shared, self.places, self.counts) if shape.num_shared else None
        return plain._replace(key_places=self.key_places, copies=copies)


@dataclass(frozen=True, kw_only=True)
class FilledPack(Pack):
    """A pack on the device, with what a recorded pass reads."""

    shape: PassShape
    inputs: FixedInputs
    """In main memory."""


def _filled_segments(segments: Segments, num_real: int, shape: PassShape) -> Segments:
    """The segments, and after them those of the tokens that fill up."""
    starts = np.arange(num_real, shape.num_tokens, shape.longest_query)
    lengths = np.diff(starts, append=shape.num_tokens)
    nothing = np.zeros_like(starts)
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]] = (
        (segments.starts, starts),
        (segments.lengths, lengths),
        (segments.prefix_starts, starts),
        (segments.prefix_lengths, nothing),
    )
    return Segments(*(np.concatenate(part) for part in parts))


def _prefix_tables(segments: Segments, shape: PassShape, last: int) -> list[Tensor]:
    """``key_places`` and ``Copies`` in fixed sizes. Those that a pass does not need are empty."""
    nothing = torch.zeros(0, dtype=torch.int64)
    key_places = nothing
    if shape.num_keys:
        key_places = _filled(torch.from_numpy(segments.all_key_places()), shape.num_keys)
    if not shape.num_shared:
        return [key_places, nothing, nothing, nothing, torch.zeros(0, dtype=torch.bool)]
    copies = segments.copies()
    num_shared, num_places = copies.places.shape
    places = torch.empty(shape.num_shared, shape.num_places, dtype=torch.int64)
    places[:num_shared, :num_places] = copies.places
    places[:num_shared, num_places:] = 0
    # Several entries may write the gradient of the last token: all of them write the one that it has.
    places[num_shared:] = copies.own[last]
    counts = torch.zeros(shape.num_shared, shape.num_places, dtype=torch.bool)
    counts[:num_shared, :num_places] = copies.counts
    counts[num_shared:, 0] = True
    shared = torch.full((shape.num_shared,), last)
    shared[:num_shared] = copies.shared
    return [key_places, copies.own, shared, places, counts]


def _filled(values: Tensor, size: int, *, with_value: int = 0) -> Tensor:
    filled = values.new_full((size,), with_value)
    filled[: len(values)] = values
    return filled
