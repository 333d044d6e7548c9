"""``headwater replay``: repeat a recorded run and compare it bit for bit."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.api import launch
from headwater.api.site import launched_learner
from headwater.cli.process import EXIT_INTERRUPTED
from headwater.cluster import num_launched
from headwater.core.errors import HeadwaterError, RunError

if TYPE_CHECKING:
    from headwater.config.schema import Config
    from headwater.observe.run_directory import RunDirectory
    from headwater.rollout.replay import RecordedSchedule

HELP = (
    "Repeat a recorded run. The groups of each step and the policy version of each token are read from ledger.jsonl. "
    "Tokens and updates are computed again, and the weights of every step must equal the recorded ones bit for bit. "
    "The run must have been made with engine.deterministic=true. A run with several learner ranks is replayed with "
    "torchrun, on as many. The replay gets a separate run directory."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, for example runs/quickstart")
    parser.add_argument("--steps", type=int, metavar="N", help="replay only the first N steps")


def run(args: argparse.Namespace) -> int:
    if launch.is_helper():
        launch.serve_rank()
        return 0
    from headwater.config.load import load_config
    from headwater.observe.run_directory import RunDirectory
    from headwater.rollout.replay import RecordedSchedule

    if args.steps is not None and args.steps < 1:
        raise HeadwaterError(f"--steps = {args.steps}: must be >= 1")
    recorded = RunDirectory.open(args.run)
    config = load_config(recorded.config_file, was_accepted=True).config
    schedule = RecordedSchedule.read(recorded.read_ledger(), str(recorded.ledger_file))
    if args.steps is not None:
        schedule = schedule.first(args.steps)
    _check(config, schedule, args.run)
    _check_ranks(recorded)
    _check_same([load_config(file, was_accepted=True).config for file in recorded.config_files], args.run)
    return _replay(_for_replay(config, args.run), schedule, args.run)


def _check(config: Config, schedule: RecordedSchedule, path: Path) -> None:
    # Whether the backend can repeat a run is decided by its capabilities, when the engine is made.
    if not config.engine.deterministic:
        raise RunError(
            f"{path}: was made with engine.deterministic = false, so its results depend on how the engine batched "
            "requests; record a run with rollout.backend=embedded engine.deterministic=true"
        )
    if schedule.has_mixed_responses and config.engine.chosen_update_mode == "in_flight":
        raise RunError(
            f"{path}: was made with engine.update_mode = in_flight, where responses continue with keys and values "
            "of older weights, which cannot be reproduced; record a run with engine.update_mode=interrupt"
        )


def _check_ranks(recorded: RunDirectory) -> None:
    """Another number of ranks adds gradients in another order, so every weight may differ."""
    from headwater.observe.status_file import read_status

    status = read_status(recorded.status_file)
    num_ranks = status.num_ranks if status else 1
    rows = [row for row in recorded.read_metrics() if row["kind"] == "train"]
    if num_ranks == 1:
        is_mixed = any(row.get("ranks/tokens_min") != row.get("ranks/tokens_max") for row in rows)
    else:
        is_mixed = any("ranks/tokens_min" not in row for row in rows)
    if is_mixed:
        raise RunError(
            f"{recorded.path}: was resumed with another number of learner ranks, and a replay has the same number in "
            "all steps; record a run that keeps its number of ranks"
        )
    if num_ranks != num_launched():
        command = "" if num_ranks == 1 else f"torchrun --standalone --nproc-per-node {num_ranks} -m "
        raise RunError(
            f"{recorded.path}: was trained by {_ranks(num_ranks)}, and the results of {_ranks(num_launched())} differ "
            f"from theirs by rounding; use: {command}headwater replay {recorded.path}"
        )


def _ranks(count: int) -> str:
    return "1 learner rank" if count == 1 else f"{count} learner ranks"


def _check_same(configs: list[Config], path: Path) -> None:
    """A resume may have changed the settings, and the run does not record which step used which settings."""
    latest = configs[-1]

    def of_the_weights(config: Config) -> Config:
        total_steps = config.trainer.total_steps if config.learner.schedule != "constant" else 1
        replayed = _for_replay(config, path)
        return replace(replayed, trainer=replace(replayed.trainer, total_steps=total_steps))

    if any(of_the_weights(config) != of_the_weights(latest) for config in configs):
        raise RunError(
            f"{path}: its settings were changed when it was resumed (compare its config*.yaml), so it cannot be "
            "replayed as one run"
        )


def _for_replay(config: Config, path: Path) -> Config:
    """The recorded settings without those that do not affect the weights."""
    return replace(
        config,
        run=replace(
            config.run, root=str(path.resolve().parent), name=f"{path.resolve().name}-replay", project="replay"
        ),
        eval=replace(config.eval, before=False, after=False, every_steps=0, every_epochs=0),
        trainer=replace(
            config.trainer,
            checkpoint_every_steps=0,
            checkpoint_every_epochs=0,
            checkpoint_every_minutes=0.0,
            checkpoint_in_background=True,
            checkpoint_dir="",
            best_metric="",
            best_mode="max",
            save_rollouts_every_steps=0,
            trackers=(),
            tracker_args={},
            num_tracked_samples=0,
            profile=replace(config.trainer.profile, steps=()),
        ),
    )


def _replay(config: Config, schedule: RecordedSchedule, path: Path) -> int:
    import torch

    from headwater.config.explain import to_yaml
    from headwater.config.paths import with_absolute_paths
    from headwater.learner.build import LearnerSpec
    from headwater.models.device import with_dtype
    from headwater.observe.progress import Display
    from headwater.observe.run_directory import RunDirectory
    from headwater.observe.run_lock import RunLock
    from headwater.trainer.learner_setup import build_training
    from headwater.trainer.loop import Trainer
    from headwater.trainer.rollout_setup import build_rollout

    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    config = with_dtype(config)
    display = Display()
    with (
        launched_learner(config) as make_learner,
        closing(build_rollout(config, config.model.path, schedule)) as rollout,
    ):
        spec = LearnerSpec(config, config.model.path, config.model.path)
        training = build_training(
            spec,
            rollout.tokenizer,
            make_learner,
            check_prompts=rollout.check_prompts,
            tools=rollout.tools_of_row,
        )
        directory = RunDirectory.create(Path(config.run.root), config.run.name)
        directory.write_config(to_yaml(with_absolute_paths(config)))
        display.say(f"Replaying {len(schedule.steps)} steps of {path} in {directory.path}")
        with RunLock(directory.lock_file), directory.removed_if_unused():
            finished = Trainer(config, rollout, training, directory, display, last_step=len(schedule.steps)).fit()
    if not finished:
        display.say("Interrupted. The next replay starts from the beginning.")
        return EXIT_INTERRUPTED
    display.say(f"The weights of all {len(schedule.steps)} steps equal the recorded ones, bit for bit.")
    return 0
