"""Steps that are queued on the device, and what becomes of their output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.engine.lanes import Lanes
from headwater.engine.runners.plain import Output


@dataclass(frozen=True)
class Drawn:
    """What a round has come to: its tokens, and the lanes that somebody has to look at."""

    num_tokens: int
    ended: list[int]
    """Their sequences have drawn a stop token or used up their budgets."""
    watched: NDArray[np.int64]
    """They go on, and the host looks at what they drew."""
    watched_tokens: NDArray[np.int32]
    """What these drew, ``[steps, watched]``; -1 where they drew nothing."""
    broken: list[int]
    """They drew from logits that are NaN or infinite; nothing of that was taken in."""


@dataclass(frozen=True)
class Round:
    """Steps that are queued, and whom their output belongs to."""

    output: Output
    lanes: NDArray[np.int64]
    tenancies: NDArray[np.int64]
    version: int

    def take_in(self, lanes: Lanes) -> Drawn:
        """Wait for the output and store it in ``lanes``, but for those that hold another sequence by now."""
        tokens, logprobs, alive = self.output.wait()
        width = len(self.lanes)  # rows beyond are padding of the batch
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
