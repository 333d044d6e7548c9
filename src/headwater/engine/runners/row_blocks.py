"""Blocks of a fixed number of rows, for results that do not depend on how many rows there are.

A library chooses its algorithm by the shape it is given, and may start a row's sum where the row's address is aligned.
So every block has the same shape, and its rows the same alignment: the last block is padded, and so is the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.engine.sampler import SamplingBatch, sample

NUM_ROWS = 64
_VOCABULARY_MULTIPLE = 256


def padded(block: Tensor) -> Tensor:
    """``NUM_ROWS`` rows; the added ones are zeros."""
    missing = NUM_ROWS - block.shape[0]
    return F.pad(block, (0, 0) * (block.dim() - 1) + (0, missing)) if missing else block


def sample_in_blocks(logits: Tensor, settings: SamplingBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``sample``, with each row's token and log-prob the same bits whatever rows stand beside it."""
    missing = -logits.shape[1] % _VOCABULARY_MULTIPLE
    drawn = []
    for start in range(0, len(logits), NUM_ROWS):
        block = slice(start, start + NUM_ROWS)
        rows = logits[block]
        if missing:
            rows = F.pad(rows, (0, missing), value=-torch.inf)  # tokens that are never drawn
        part = settings.map(lambda column, block=block: padded(column[block]))  # type: ignore[misc]
        tokens, logprobs = sample(padded(rows), part, padded(positions[block]))
        drawn.append((tokens[: len(rows)], logprobs[: len(rows)]))
    tokens, logprobs = (torch.cat(each) for each in zip(*drawn, strict=True))
    return tokens, logprobs
