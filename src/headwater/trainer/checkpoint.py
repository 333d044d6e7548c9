"""Checkpoints: everything a run needs to continue exactly where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path

from headwater.core.errors import RunError
from headwater.core.protocols import Learner
from headwater.rollout.snapshot import DrawAgain, RolloutSnapshot


@dataclass(frozen=True)
class TrainerState:
    """The state of a run between two steps."""

    step: int
    """Steps done; also the policy version."""
    rollouts: RolloutSnapshot
    """Prompts that were drawn but not trained on yet."""
    warm_started: bool
    """Whether the warm start is finished, or there is none."""
    kl_coefficient: float = 0.0
    """The coefficient of the KL penalty in the reward, which a controller may change."""


class Checkpoints:
    """Folders such as ``checkpoints/step_000100/``.

    The learner writes ``model/`` (Hugging Face format), ``train/`` (trained weights and optimiser) and ``critic/``.
    ``state.json`` holds the trainer's state, and ``rollouts.json`` the prompts and rollouts that are ahead of it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainerState, learner: Learner) -> Path:
        """Write a checkpoint under a temporary name and rename it, so that a checkpoint that exists is complete."""
        target = self._place(state.step)
        if target.exists():
            return target
        for leftover in self._folder.glob(".step_*"):  # left by a process that was killed while saving
            shutil.rmtree(leftover)
        temporary = self._folder / f".{target.name}"
        temporary.mkdir(parents=True)
        learner.save(temporary)
        rest = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "rollouts"}
        (temporary / "state.json").write_text(json.dumps(rest), encoding="utf-8")
        (temporary / "rollouts.json").write_text(state.rollouts.to_json(), encoding="utf-8")
        temporary.replace(target)
        for old in self.all()[: -self._keep]:
            # Renamed first, so that a partly removed checkpoint is never mistaken for a complete one.
            shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
        return target

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than ``step``, because the run continues from there and will write new ones."""
        for later in self.all():
            if step_of(later) > step:
                number = 1
                while (aside := later.with_name(f"superseded-{number}_{later.name}")).exists():
                    number += 1
                later.rename(aside)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self._folder.glob("step_*"))

    def latest(self) -> Path | None:
        found = self.all()
        return found[-1] if found else None

    def has(self, step: int) -> bool:
        return self._place(step).is_dir()

    def at(self, step: int) -> Path:
        path = self._place(step)
        if not path.is_dir():
            known = ", ".join(str(step_of(each)) for each in self.all()) or "none"
            raise RunError(f"{path}: no such checkpoint; saved steps: {known}")
        return path

    def _place(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path, again: DrawAgain) -> TrainerState:
    """``again`` draws the prompts of rollouts that were not trained on yet."""
    try:
        rest = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        rollouts = RolloutSnapshot.from_json((checkpoint / "rollouts.json").read_text(encoding="utf-8"), again)
        return TrainerState(rollouts=rollouts, **rest)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{checkpoint}: damaged checkpoint ({error}); resume from an older one with --step") from error
