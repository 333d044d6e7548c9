"""Sampling that depends on the host: biases, penalties, grammars, and the alternatives of a token.

The sequences that use them are sampled one token at a time, because their logits depend on the previous token. Each has
a ``Guide``. Before a step, the guides become one ``Guidance``, which changes the logits of their rows and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.core.requests import Alternatives, ModelRequest
from headwater.engine.grammar import GrammarMatcher


@dataclass(eq=False)
class Guide:
    """What the next token of one sequence depends on, besides the model. The engine's thread owns it."""

    request: ModelRequest
    matcher: GrammarMatcher | None = None
    counts: Counter[int] = field(default_factory=Counter)
    """How often the response contains each token."""
    num_taken: int = 0

    @property
    def error(self) -> str:
        return "" if self.matcher is None else self.matcher.error

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens of the response that were sampled since the last call."""
        new = tokens[self.num_taken :]
        self.num_taken = len(tokens)
        self.counts.update(new)
        if self.matcher is not None and new:
            self.matcher.take(new)

    def additions(self) -> dict[int, float]:
        """What is added to the logits of tokens."""
        sampling = self.request.sampling
        added = dict.fromkeys(self.counts, 0.0)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in self.counts.items():
                added[token] = -sampling.presence_penalty - count * sampling.frequency_penalty
        for token, bias in sampling.logit_bias:
            added[token] = added.get(token, 0.0) + bias
        return {token: amount for token, amount in added.items() if amount}

    def repeated(self) -> set[int]:
        """The tokens that the repetition penalty concerns."""
        if self.request.sampling.repetition_penalty == 1:
            return set()
        return {*self.request.input_tokens, *self.counts}

    def allowed(self) -> NDArray[np.bool_] | None:
        return None if self.matcher is None or self.matcher.error else self.matcher.allowed()


@dataclass(frozen=True)
class Guidance:
    """The changes that the guides of some rows make to one step. Rows are numbered within the guided rows."""

    rows: NDArray[np.int64]
    """The guided rows among all rows of the step."""
    additions: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
    """Rows, tokens and amounts."""
    repeated: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]
    """Rows, tokens and penalties."""
    masks: tuple[NDArray[np.int64], NDArray[np.bool_]]
    """Rows, and which tokens each allows, ``[rows, vocabulary]``."""
    num_top: int
    """The largest number of alternatives that a row needs."""

    @classmethod
    def of(cls, guides: Sequence[tuple[int, Guide]]) -> Guidance:
        """``guides`` with the rows they belong to."""
        added = [(row, *each) for row, (_, guide) in enumerate(guides) for each in guide.additions().items()]
        repeated = [
            (row, token, guide.request.sampling.repetition_penalty)
            for row, (_, guide) in enumerate(guides)
            for token in guide.repeated()
        ]
        masks = [(row, mask) for row, (_, guide) in enumerate(guides) if (mask := guide.allowed()) is not None]
        return cls(
            rows=np.array([row for row, _ in guides], np.int64),
            additions=_columns(added),
            repeated=_columns(repeated),
            masks=(
                np.array([row for row, _ in masks], np.int64),
                np.stack([mask for _, mask in masks]) if masks else np.zeros((0, 0), np.bool_),
            ),
            num_top=max(guide.request.sampling.num_top_logprobs for _, guide in guides),
        )

    def adjust(self, logits: Tensor) -> Tensor:
        """``logits`` of the guided rows with all changes, in float32."""
        changed, device = logits.float().clone(), logits.device
        if len(self.repeated[0]):
            rows, tokens, penalties = (torch.from_numpy(each).to(device) for each in self.repeated)
            before = changed[rows, tokens]
            changed[rows, tokens] = torch.where(before > 0, before / penalties, before * penalties)
        if len(self.additions[0]):
            rows, tokens, amounts = (torch.from_numpy(each).to(device) for each in self.additions)
            changed[rows, tokens] += amounts
        if len(self.masks[0]):
            rows, allowed = (torch.from_numpy(each).to(device) for each in self.masks)
            changed[rows] = changed[rows].masked_fill(~allowed, -torch.inf)
        return changed


def _columns(
    entries: Sequence[tuple[int, int, float]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    rows, tokens, values = zip(*entries, strict=True) if entries else ((), (), ())
    return np.array(rows, np.int64), np.array(tokens, np.int64), np.array(values, np.float32)


def alternatives(tokens: Tensor, logprobs: Tensor, count: int) -> Alternatives:
    """The first ``count`` alternatives of one position. Tokens that are excluded are none."""
    pairs = zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in pairs if logprob > -torch.inf)
