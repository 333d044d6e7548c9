"""Checkpoints: everything a run needs to continue exactly where it stopped."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.core.disk import disk_full
from headwater.core.errors import ConfigError, DamagedCheckpoint, DiskFull, HeadwaterError, RunError
from headwater.core.learner import Learner, SavedLater
from headwater.core.waits import wait_for_future
from headwater.observe.manifest import MANIFEST, Damage, damage, num_bytes, seal
from headwater.observe.media_store import MediaStore
from headwater.observe.run_directory import RunDirectory, saved_steps, set_aside
from headwater.rollout.snapshot import RolloutSnapshot
from headwater.rollout.source import PromptStream

if TYPE_CHECKING:
    from headwater.config.schema import TrainerConfig
    from headwater.trainer.mirror import Mirror

logger = logging.getLogger(__name__)

WRITE_LIMIT_S = 6 * 3600.0
"""Limit for writing and uploading one checkpoint. A large one on a slow network takes long."""

_DEFAULT_METRIC = "eval/reward/mean"

MEDIA_FOLDER = "media"
"""Folder of a checkpoint with the images and videos of ``rollouts.json``."""

ADAPTERS = " adapters "
"""In the text that the ledger has of trained weights: between the merged weights and what was trained."""


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
    has_optimizer: bool = True
    """Whether checkpoints of this state contain the optimiser's averages."""


class BestStep:
    """Which evaluation was the best so far, by ``trainer.best_metric``."""

    def __init__(self, metric: str, mode: Literal["max", "min"]) -> None:
        """``metric`` is a name such as ``eval/reward/mean``; empty if no checkpoint is the best."""
        self._name = metric.removeprefix("eval/")
        self._sign = 1.0 if mode == "max" else -1.0
        self._value: float | None = None

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Refuse a name that the metrics of an evaluation do not have."""
        if self._name and self._name not in metrics:
            known = ", ".join(f"eval/{name}" for name in sorted(metrics))
            raise ConfigError(
                [
                    f"trainer.best_metric = eval/{self._name}: the evaluation of step {step} has no such metric; use "
                    f"one of {known}, or remove this"
                ]
            )

    def is_improved(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the metrics of an evaluation are better than all before; then they are the best from now on."""
        self.check(step, metrics)
        if not self._name:
            return False
        value = self._sign * metrics[self._name]
        if self._value is not None and not value > self._value:
            return False
        self._value = value
        return True


class Checkpoints:
    """Folders such as ``checkpoints/step_000100/``.

    The learner writes ``model/`` (Hugging Face format), ``train/`` (trained weights and optimiser) and ``critic/``.
    ``state.json`` holds the trainer's state, and ``rollouts.json`` the prompts and rollouts that are ahead of it, whose
    images and videos are in ``media/``.
    ``manifest.json`` is written last and has the checksum of every other file.
    """

    def __init__(self, folder: Path, keep: int, *, mirror: Mirror | None = None) -> None:
        """``mirror`` gets a copy of every checkpoint (``trainer.checkpoint_dir``)."""
        self._folder = folder
        self._keep = keep
        self._mirror = mirror
        self._best: int | None = None
        self._failed_copies: list[str] = []
        """Why copies could not be made. Each was tried again with the next checkpoint."""
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        """The checkpoint that is being written in the background. There is at most one."""

    @classmethod
    def of(cls, settings: TrainerConfig, run: RunDirectory) -> Checkpoints:
        """The checkpoints of a run, with a copy elsewhere if the config asks for it."""
        if not settings.checkpoint_dir:
            return cls(run.checkpoints, settings.keep_checkpoints)
        from headwater.trainer.mirror import Mirror, is_same_place  # only these runs need it

        is_copy = is_same_place(settings.checkpoint_dir, run)
        mirror = None if is_copy else Mirror.of(settings.checkpoint_dir, run)
        return cls(run.checkpoints, settings.keep_checkpoints, mirror=mirror)

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of ``step``, and no longer the one that was the best before."""
        self._best = step

    def save(
        self, state: TrainerState, learner: Learner, *, in_background: bool = False, is_last: bool = False
    ) -> Path:
        """Write a checkpoint under a temporary name and rename it, so that a checkpoint that exists is complete.

        ``in_background`` returns when the learner may continue. ``settle`` then waits for the rest. ``is_last`` means
        that no later checkpoint can repeat a copy that fails.
        """
        self.settle()
        target = self._place(state.step)
        if (target / MANIFEST).is_file():
            if is_last:
                self._copy(is_last=True)  # for the records that came after it
            return target
        if target.exists():
            set_aside(target)  # something else has the name
        for leftover in self._folder.glob(".step_*"):  # left by a process that was killed while saving
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = self._folder / f".{target.name}"
        with self._cleaning_up(temporary, target):
            temporary.mkdir(parents=True)
            snapshot = learner.snapshot(temporary) if in_background else None
            if snapshot is None:
                learner.save(temporary)
        if not in_background:
            self._finish(state, target, temporary, None, is_last=is_last)
            return target
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._pool.submit(self._finish, state, target, temporary, snapshot)
        return target

    def _finish(
        self,
        state: TrainerState,
        target: Path,
        temporary: Path,
        snapshot: SavedLater | None,
        *,
        is_last: bool = False,
    ) -> None:
        """Write what is missing, then make the checkpoint valid, remove old ones and upload it."""
        with self._cleaning_up(temporary, target):
            if snapshot is not None:
                snapshot.write()
            rest = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "rollouts"}
            (temporary / "state.json").write_text(json.dumps(rest), encoding="utf-8")
            (temporary / "rollouts.json").write_text(state.rollouts.to_json(), encoding="utf-8")
            # Not in the run's own store, because a checkpoint may be copied without the rest of the run.
            store = MediaStore(temporary / MEDIA_FOLDER)
            for content in state.rollouts.contents():
                store.add(content)
            seal(temporary)
            temporary.replace(target)
        kept = self._kept()
        for old in self.all():
            if old not in kept:
                # Renamed first, so that a partly removed checkpoint is never mistaken for a complete one.
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
        self._copy(is_last=is_last)

    def _copy(self, *, is_last: bool) -> None:
        """Bring the copy up to date. The checkpoint here is complete, so only the last copy must succeed."""
        if self._mirror is None:
            return
        best = "" if self._best is None else self._place(self._best).name
        try:
            self._mirror.update(self._kept(), num_newest=self._keep, best=best)
        except HeadwaterError as error:
            if is_last:
                raise
            self._failed_copies.append(str(error))
            logger.warning("%s; this is tried again with the next checkpoint", error)

    def _kept(self) -> list[Path]:
        newest = self.all()[-self._keep :]
        best = [] if self._best is None or not self.has(self._best) else [self._place(self._best)]
        return sorted({*newest, *best})

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written in the background. Does not wait."""
        if self._writing is not None and self._writing.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error if it failed."""
        if (writing := self._writing) is not None:
            what = "a checkpoint is written in the background"
            try:
                wait_for_future(writing, lambda: what, kind="checkpoint", hard_limit_s=WRITE_LIMIT_S)
            finally:
                if writing.done():  # an interrupt leaves it running
                    self._writing = None

    def finish(self, say: Callable[[str], object]) -> None:
        """The run ends: wait for a checkpoint that is still being written. If it fails, another error came before."""
        try:
            self.settle()
        except (HeadwaterError, OSError) as error:
            logger.warning("the last checkpoint was not written: %s", error)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if failed := self._failed_copies:
            say(f"Warning: {len(failed)} times, checkpoints could not be copied at once. The last cause: {failed[-1]}")

    @contextmanager
    def _cleaning_up(self, temporary: Path, target: Path) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            num_written = num_bytes(temporary)
            shutil.rmtree(temporary, ignore_errors=True)  # the space is needed for everything else
            if (full := self._disk_full(error, target, num_written)) is not None:
                raise full from error
            raise

    def _disk_full(self, error: Exception, target: Path, num_written: int) -> DiskFull | None:
        before = self.latest()
        needed = num_written + (error.needed_bytes if isinstance(error, DiskFull) else 0)
        kept = f"free some space (the checkpoint of step {step_of(before)} is intact)" if before else "free some space"
        return disk_full(
            error,
            target,
            "the checkpoint",
            needed_bytes=max(needed, num_bytes(before) if before else 0),
            remedy=f"{kept} or save less (trainer.keep_checkpoints=1, trainer.checkpoint_dtype=bfloat16, "
            "trainer.checkpoint_optimizer=false)",
        )

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than ``step``, because the run continues from there and will write new ones."""
        for later in self.all():
            if step_of(later) > step:
                set_aside(later)
        if self._mirror is not None:
            self._mirror.set_aside_after(step)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first. Other folders are ignored."""
        return [self._place(step) for step in saved_steps(self._folder)]

    def latest(self) -> Path | None:
        found = self.all()
        return found[-1] if found else None

    def has(self, step: int) -> bool:
        return (self._place(step) / MANIFEST).is_file()

    def saved_anywhere(self) -> set[int]:
        """The steps of all checkpoints, also of those that only the copy has."""
        return {*map(step_of, self.all()), *(self._mirror.steps() if self._mirror is not None else ())}

    def at(self, step: int) -> Path:
        path = self._place(step)
        if not path.is_dir():
            known = ", ".join(str(step_of(each)) for each in self.all()) or "none"
            raise RunError(f"{path}: no such checkpoint; saved steps: {known}")
        return path

    def _place(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"


def find_checkpoint(run: RunDirectory, settings: TrainerConfig, wanted: str) -> Path:
    """The checkpoint that ``--step`` names: a number, ``best``, or the latest if it is empty."""
    checkpoints = Checkpoints(run.checkpoints, settings.keep_checkpoints)
    if wanted == "best":
        return checkpoints.at(_best_saved_step(run, settings))
    if wanted and not wanted.isdecimal():
        raise RunError(f"--step = {wanted}: use the number of a saved step, or best")
    checkpoint = checkpoints.at(int(wanted)) if wanted else checkpoints.latest()
    if checkpoint is None:
        raise RunError(
            f"{run.path}: no checkpoint yet; wait for one or, if the run was stopped, continue it: "
            f"headwater train --resume {run.path}"
        )
    return checkpoint


def _best_saved_step(run: RunDirectory, settings: TrainerConfig) -> int:
    """The saved step whose evaluation has the best ``trainer.best_metric``."""
    best = BestStep(settings.best_metric or _DEFAULT_METRIC, settings.best_mode)
    saved, found = set(run.checkpoint_steps()), None
    for record in run.read_metrics():
        is_saved = record["kind"] == "eval" and record["step"] in saved
        if is_saved and best.is_improved(record["step"], record):
            found = record["step"]
    if found is None:
        raise RunError(
            f"--step best: {run.path} has no checkpoint of a step that was evaluated; saved steps: "
            f"{', '.join(map(str, sorted(saved))) or 'none'}"
        )
    return int(found)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def check_whole(run: RunDirectory, checkpoint: Path, *, part: str = "") -> None:
    """Refuse a checkpoint that has a missing or changed file, and name the newest one that is intact.

    With ``part``, such as ``model``, only that folder of it is checked. Otherwise the reference model is checked too.
    """
    if problems := damage(checkpoint, part=part):
        others = (step for step in reversed(saved_steps(run.checkpoints)) if step != step_of(checkpoint))
        whole = next((step for step in others if not damage(run.checkpoint(step), part=part)), None)
        remedy = (
            "no other checkpoint of this run is intact, so it cannot be resumed"
            if whole is None
            else f"the newest intact checkpoint is that of step {whole}; to use it, add --step {whole}"
        )
        raise DamagedCheckpoint(f"damaged checkpoint: {_show(problems)}; {remedy}")
    if not part and run.reference.exists() and (problems := damage(run.reference)):
        raise DamagedCheckpoint(
            f"damaged reference model: {_show(problems)}; restore its files, or start a new run from the checkpoint's "
            f"model: headwater train RECIPE model.path={checkpoint / 'model'}"
        )


def _show(problems: tuple[Damage, ...]) -> str:
    return str(problems[0]) + (f" (and {len(problems) - 1} more files)" if len(problems) > 1 else "")


def read_state(checkpoint: Path, prompts: PromptStream) -> TrainerState:
    """``prompts`` continues from the checkpoint, and draws the prompts of rollouts that were not trained on yet."""
    try:
        rest = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        text = (checkpoint / "rollouts.json").read_text(encoding="utf-8")
        rollouts = RolloutSnapshot.from_json(
            text,
            prompts.again,
            MediaStore(checkpoint / MEDIA_FOLDER).read,
            use_cursor=prompts.load_state_dict,
        )
        return TrainerState(rollouts=rollouts, **rest)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(
            f"{checkpoint}: damaged checkpoint ({error}); resume from an older one with --step"
        ) from error


def check_weights(run: RunDirectory, step: int, weights: str) -> None:
    """Refuse weights that are not those that ``step`` trained, according to the ledger.

    ``weights`` is the text that the ledger has of the restored weights. If the adapters and the critic are the same but
    the merged weights are not, this is only logged: another device may round the merged weights differently.
    """
    record = next((each for each in run.read_ledger() if each["kind"] == "step" and each["step"] == step), None)
    if record is None:
        return  # step 0 has none
    was = str(record.get("weights", ""))
    if was == weights:
        return
    trained_then, trained_now = was.partition(ADAPTERS)[2], weights.partition(ADAPTERS)[2]
    if not trained_then or trained_then != trained_now:
        raise DamagedCheckpoint(
            f"{run.checkpoint(step)}: its weights are not those that step {step} trained (checksum {weights}, but "
            f"{run.ledger_file} has {was}); resume from another checkpoint with --step"
        )
    logger.warning(
        "%s: the adapters are those that step %d trained, but merged into the model they give other weights: this "
        "device rounds differently, or the files at model.path were changed",
        run.checkpoint(step),
        step,
    )
