"""Your own code at the events of a run: ``headwater.train(..., callbacks=[...])``.

class StopWhenSolved(Callback):
    def on_evaluate(self, step, metrics):
        if metrics["reward/mean"] > 0.95:
            raise StopTraining("solved")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


class StopTraining(Exception):
    """Raised by a callback: training ends after this step, with the last evaluation and a checkpoint.

    It is not an error. The run can be resumed.
    """


class Callback:
    """Override the methods that you need. An error in one of them ends the run, after a checkpoint was saved."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every training step, with its metrics; ``step`` counts from 1."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation on held-out prompts; step 0 is the one before training."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was saved; ``path / "model"`` is the model in Hugging Face format."""


class StepFunction(Callback):
    """A plain function of the step and its metrics, as a callback."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self._function = function

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._function(step, metrics)
