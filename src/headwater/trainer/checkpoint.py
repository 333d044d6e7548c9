"""Checkpoints: all that a run needs to go on exactly where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwater.core.errors import RunError
from headwater.learner.actor import Actor
from headwater.learner.critic import Critic
from headwater.models.save import save_model
from headwater.rollout.snapshot import DrawAgain, RolloutSnapshot


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, between two steps."""

    step: int
    """Steps done; also the policy version."""
    rollouts: RolloutSnapshot
    """What was drawn and is not trained on yet."""
    warm_started: bool
    """Whether the supervised start is behind us, or there is none."""
    kl_coefficient: float = 0.0
    """Of the penalty in the reward, which may be steered."""


class Checkpoints:
    """``checkpoints/step_000100/``: ``model/`` in Hugging Face format, ``train/`` with weights and optimiser as they
    are trained, the same of a critic under ``critic/``, ``state.json``, and ``rollouts.json`` with what was drawn or
    generated ahead."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainerState, actor: Actor, critic: Critic | None, tokenizer: Any) -> Path:
        """Written beside its place and moved there when it is whole, so a checkpoint that exists is complete."""
        target = self._place(state.step)
        if target.exists():
            return target
        for leftover in self._folder.glob(".step_*"):  # of a process killed while saving
            shutil.rmtree(leftover)
        temporary = self._folder / f".{target.name}"
        temporary.mkdir(parents=True)
        save_model(actor.engine.module.model, tokenizer, temporary / "model", dict(actor.engine.export_weights()))
        actor.engine.save(temporary)
        if critic is not None:
            critic.engine.save(temporary / "critic")
        rest = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "rollouts"}
        (temporary / "state.json").write_text(json.dumps(rest), encoding="utf-8")
        (temporary / "rollouts.json").write_text(state.rollouts.to_json(), encoding="utf-8")
        temporary.replace(target)
        for old in self.all()[: -self._keep]:
            # Renamed first, so that a checkpoint that is half removed never looks like one.
            shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
        return target

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than ``step``: the run goes on from there and will make its own."""
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
    """``again`` draws the prompts of rollouts that were not trained on."""
    try:
        rest = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        rollouts = RolloutSnapshot.from_json((checkpoint / "rollouts.json").read_text(encoding="utf-8"), again)
        return TrainerState(rollouts=rollouts, **rest)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{checkpoint}: damaged checkpoint ({error}); resume from an older one with --step") from error
