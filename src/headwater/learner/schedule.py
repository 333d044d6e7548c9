"""The learning rate over a run: a linear rise, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwater.config.schema import Schedule


@dataclass(frozen=True)
class LearningRate:
    peak: float
    schedule: Schedule
    num_warmup_steps: int
    num_decay_steps: int
    """Steps after the warm-up until the lowest rate is reached; not used by ``constant``."""
    lowest_fraction: float
    """Of the peak, where the decay ends."""

    def at(self, step: int) -> float:
        """The rate of the optimiser step after ``step`` steps."""
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / (self.num_warmup_steps + 1)
        if self.schedule == "constant":
            return self.peak
        progress = min(1.0, (step - self.num_warmup_steps) / max(1, self.num_decay_steps))
        shape = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.lowest_fraction + (1 - self.lowest_fraction) * shape)
