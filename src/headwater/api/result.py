"""``Result``: what a run has produced, read from its directory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headwater.api.engine import Completion, Engine, Prompts
from headwater.core.errors import RunError
from headwater.observe.run_directory import RunDirectory


@dataclass(frozen=True)
class Result:
    """``Result(Path("runs/quickstart"))`` also reads a run that ended earlier."""

    path: Path
    """The run directory."""
    is_finished: bool = True
    """Whether training ended by itself: false after an interrupt. Then ``train(..., resume=result.path)`` continues."""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per training step, for example for ``pandas.DataFrame(result.metrics)``."""
        return self._records("train")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One dict per evaluation on held-out prompts."""
        return self._records("eval")

    @property
    def step(self) -> int:
        """Training steps done."""
        return max((record["step"] for record in self.metrics), default=0)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        run = RunDirectory(self.path)
        if not (steps := run.checkpoint_steps()):
            raise RunError(f"{self.path}: has no checkpoint")
        return run.checkpoint(steps[-1])

    @property
    def model_path(self) -> Path:
        """The trained model, a folder that ``transformers`` and inference servers load."""
        return self.checkpoint / "model"

    def generate(self, prompts: Prompts, **sampling: Any) -> Completion | list[Completion]:
        """Generate with the trained model; see ``Engine.generate``. Make an ``Engine`` for more than one call."""
        with Engine(self.model_path) as engine:
            return engine.generate(prompts, **sampling)

    def _records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in RunDirectory(self.path).read_metrics() if record["kind"] == kind]

    def __repr__(self) -> str:
        rewards = [f"{record['reward/mean']:.3f}" for record in self.evaluations]
        shown = f", held-out reward {rewards[0]} → {rewards[-1]}" if rewards else ""
        return f"Result({str(self.path)!r}, {self.step} steps{shown})"
