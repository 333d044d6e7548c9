"""Starts and resumes runs. The command line and ``headwater.train`` both come here."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.api.site import open_site
from headwater.cluster import launched_rank, num_launched
from headwater.core.errors import HeadwaterError, RankFailed, RunError

if TYPE_CHECKING:
    from headwater.config.schema import Config
    from headwater.observe.progress import Display
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.callbacks import Callback

logger = logging.getLogger(__name__)

Overrides = Sequence[str | Mapping[str, Any]]
"""Settings over those of the recipe: ``key=value``, or mappings from Python code."""


@dataclass(frozen=True)
class Ended:
    """How a run has ended."""

    run: RunDirectory
    is_finished: bool
    """Whether all steps are done. Otherwise the run was interrupted, and can be resumed."""


def start(
    config: Config,
    given: Collection[str] = frozenset(),
    *,
    callbacks: Sequence[Callback] = (),
    display: Display | None = None,
) -> Ended:
    """Start a new run, or continue the one of this name (``run.if_exists``).

    ``given`` are the keys that were set explicitly. A run that continues has its own settings for all others.
    """
    from headwater.config import schema
    from headwater.config.keys import settings, value_at

    attempts = _Attempts(callbacks=callbacks, display=display)
    if (path := _run_to_continue(config)) is None:
        return _with_restarts(lambda attempts: _start(config, given, attempts), attempts)
    values = {key: value_at(config, key) for key in sorted(given) if key in settings(schema.Config)}
    return _with_restarts(functools.partial(_resume, path, None, [values], is_repeat=True), attempts)


def _run_to_continue(config: Config) -> Path | None:
    """The run that ``run.if_exists`` says to continue, here or fetched from its copy; None to start a new one."""
    from headwater.observe.run_directory import RunDirectory
    from headwater.observe.run_lock import RunLock
    from headwater.trainer.mirror import fetch_lost

    if config.run.if_exists != "resume" or config.eval.only:
        return None
    run = RunDirectory(Path(config.run.root) / config.run.name)
    if (run.path / "config.yaml").is_file() or fetch_lost(run, config.trainer.checkpoint_dir):
        return run.path
    if run.path.exists():
        run.check_unstarted()
        with RunLock(run.lock_file):  # refused while another process starts the run
            shutil.rmtree(run.path)
    return None


def resume(
    path: str,
    step: int | None = None,
    overrides: Overrides = (),
    *,
    callbacks: Sequence[Callback] = (),
    display: Display | None = None,
) -> Ended:
    """Continue a run from its latest checkpoint, or from that of ``step``. ``path`` may be the URL of its copy."""
    from headwater.trainer.mirror import local_run

    return _with_restarts(
        lambda attempts: _resume(local_run(path), step, overrides, attempts),
        _Attempts(callbacks=callbacks, display=display),
    )


def is_helper() -> bool:
    """Whether this process is a rank above 0, which only executes the learner's calls (``serve_rank``)."""
    return launched_rank() > 0


def serve_rank() -> None:
    """Execute the learner's calls for rank 0, which alone reads the recipe and writes the run directory."""
    from headwater.cluster.torchrun import join

    with closing(join()) as group:
        group.serve()


@dataclass
class _Attempts:
    """A run and the times that it may be continued after a learner rank has died (``cluster.max_restarts``)."""

    run: RunDirectory | None = None
    max_restarts: int = 0
    num_restarts: int = 0
    callbacks: Sequence[Callback] = ()
    display: Display | None = None
    """None prints to standard output."""
    objects: Overrides = ()
    """What a Python program passed, which the recipe of the run cannot name."""


def _with_restarts(first: Callable[[_Attempts], Ended], attempts: _Attempts) -> Ended:
    """Start a run and continue it from its last checkpoint if a rank dies, as often as its config allows."""
    attempt = first
    while True:
        try:
            return attempt(attempts)
        except RankFailed as error:
            run = attempts.run
            if run is None or attempts.num_restarts >= attempts.max_restarts:
                raise
            attempts.num_restarts += 1
            logger.warning(
                "%s; the run continues from its last checkpoint (restart %d of cluster.max_restarts = %d)",
                *(error, attempts.num_restarts, attempts.max_restarts),
            )
            attempt = functools.partial(_resume, run.path, None, attempts.objects)


def _start(config: Config, given: Collection[str], attempts: _Attempts) -> Ended:
    from headwater.models.source import check_model
    from headwater.observe.trackers import Trackers

    # Checked before torch is imported, so that a mistyped name fails at once.
    for key, path in {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.critic.enabled else "",
        "reference.path": config.reference.path,
        "reward.model": config.reward.model,
    }.items():
        if path:
            check_model(path, key)
    Trackers.of(config.trainer.trackers, config.trainer.tracker_args)
    return _fit(config, run=None, checkpoint=None, attempts=attempts, given=given)


def _resume(
    path: Path, step: int | None, overrides: Overrides, attempts: _Attempts, *, is_repeat: bool = False
) -> Ended:
    """``is_repeat``: the command that started the run was given again, and ``overrides`` are its settings."""
    from headwater.observe.run_directory import RunDirectory
    from headwater.observe.run_lock import RunLock

    run = RunDirectory.open(path)
    with RunLock(run.lock_file):
        return _resume_locked(run, step, overrides, attempts, is_repeat=is_repeat)


def _resume_locked(
    run: RunDirectory, step: int | None, overrides: Overrides, attempts: _Attempts, *, is_repeat: bool
) -> Ended:
    from headwater.config.checks import fits_checkpoint
    from headwater.config.extension_checks import START_CHECKS
    from headwater.config.load import load_config
    from headwater.config.python_values import PYTHON_CODE
    from headwater.observe.progress import Display
    from headwater.trainer.checkpoint import Checkpoints, check_whole, step_of
    from headwater.trainer.mirror import fetch_missing

    before = load_config(run.config_file, was_accepted=True).config
    if fetch_missing(run, before.trainer.checkpoint_dir, step):
        before = load_config(run.config_file, was_accepted=True).config
    checkpoints = Checkpoints(run.checkpoints, before.trainer.keep_checkpoints)
    checkpoint = checkpoints.latest() if step is None else checkpoints.at(step)
    fits = [fits_checkpoint(before, checkpoint)] if checkpoint else []
    source = "this recipe" if is_repeat else PYTHON_CODE
    config = load_config(run.config_file, overrides, [*START_CHECKS, *fits], mappings_from=source).config
    if checkpoint is not None:
        if config.trainer.total_epochs == before.trainer.total_epochs:  # otherwise the data decide the number of steps
            done, planned = step_of(checkpoint), before.trainer.total_steps
            if is_repeat and not _has_work_left(run, done, planned, config):
                (attempts.display or Display()).say(f"{run.path}: all {done} steps are done; nothing is left to do")
                return Ended(run, is_finished=True)
            _check_steps_left(run, done, planned, config)
        check_whole(run, checkpoint)
    for foreign in run.foreign_checkpoints():
        logger.warning("%s is not a checkpoint and is ignored", foreign)
    return _fit(config, run, checkpoint, attempts)


def _has_work_left(run: RunDirectory, done: int, planned: int, config: Config) -> bool:
    """``planned`` is the run's number of steps before this resume, and ``config`` has the one it asks for."""
    wanted = config.trainer.total_steps
    return wanted > done or (wanted == planned == done and _lacks_evaluation(run, done, config))


def _check_steps_left(run: RunDirectory, done: int, planned: int, config: Config) -> None:
    if _has_work_left(run, done, planned, config):
        return
    wanted = config.trainer.total_steps
    if wanted == planned:
        raise RunError(f"{run.path}: all {done} steps are done; to continue, add for example {_more_steps(done)}")
    remedy = (
        f"leave it out to continue to step {planned}" if planned > done else f"give more, such as {_more_steps(done)}"
    )
    raise RunError(f"trainer.total_steps = {wanted}: {run.path} has done {done} steps already; {remedy}")


def _lacks_evaluation(run: RunDirectory, step: int, config: Config) -> bool:
    """Whether the evaluation after the last step, ``step``, was broken off. A resumed run then makes it."""
    from headwater.data.load import sources_of

    if not config.eval.after or not sources_of(config.data, "eval"):
        return False
    return not any(each["kind"] == "eval" and each["step"] == step for each in run.read_metrics())


def _more_steps(done: int) -> str:
    return f"trainer.total_steps={2 * done}"


def _fit(
    config: Config,
    run: RunDirectory | None,
    checkpoint: Path | None,
    attempts: _Attempts,
    given: Collection[str] = frozenset(),
) -> Ended:
    """``given`` are the keys that were set explicitly."""
    import torch

    from headwater.chat.render import has_template
    from headwater.config.explain import to_yaml
    from headwater.config.notices import config_notices
    from headwater.config.paths import with_absolute_paths
    from headwater.config.python_values import python_objects
    from headwater.data.notices import data_notices
    from headwater.learner.build import LearnerSpec
    from headwater.models.device import auto_dtype, resolve_device, resolve_dtype, sums_restored
    from headwater.observe.progress import Display
    from headwater.observe.run_directory import RunDirectory
    from headwater.observe.run_lock import RunLock
    from headwater.trainer.learner_setup import build_training
    from headwater.trainer.logprob_sources import logprob_sources
    from headwater.trainer.loop import Trainer
    from headwater.trainer.memory_advice import advised
    from headwater.trainer.memory_setup import describe_plan, plan_run, planned
    from headwater.trainer.memory_turns import releases_cache
    from headwater.trainer.rollout_setup import build_rollout, describe
    from headwater.trainer.summary import how_to_resume, summarise, what_is_kept

    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    display = attempts.display or Display()
    attempts.objects = [python_objects(config)]
    resuming = run is not None
    attempts.run, attempts.max_restarts = run, config.cluster.max_restarts
    with ExitStack() as lock, ExitStack() as stack:
        stack.enter_context(sums_restored())
        site = stack.enter_context(open_site(config, is_restart=attempts.num_restarts > 0))
        config = site.config
        model_path = str(checkpoint.absolute() / "model") if checkpoint else config.model.path
        # Everything that bad input can break is built first, so that only a run that can start gets a directory.
        plan = plan_run(config, model_path, num_launched())
        built = planned(config, plan)
        with advised("load_engine", config, plan, is_resumed=resuming):
            remote = site.remote()
            rollout = stack.enter_context(closing(build_rollout(built, model_path, remote=remote)))
        if releases_cache(config, plan):
            rollout.sleep_cache()  # the learner is built in the memory that the cache gives back
        # Without a checkpoint, a warm start is repeated and makes the reference again.
        reference_path = str(run.reference) if run and checkpoint and run.reference.exists() else config.model.path
        spec = LearnerSpec(built, model_path, reference_path)
        with advised("load_learner", config, plan, is_resumed=resuming):
            training = build_training(
                spec,
                rollout.tokenizer,
                site.make_learner,
                check_prompts=rollout.check_prompts,
                tools=rollout.tools_of_row,
            )
        stack.enter_context(closing(training.learner))
        # A resumed run makes its own plan, so the config that is kept has none of this one.
        config = replace(training.config, engine=config.engine, learner=config.learner)
        training = replace(training, config=config)
        if run is None:
            run = RunDirectory.create(Path(config.run.root), config.run.name)
            lock.enter_context(RunLock(run.lock_file))
            stack.enter_context(run.removed_if_unused())
            attempts.run = run
        site.log_to(run.path / "logs")
        template = getattr(rollout.tokenizer, "chat_template", None)
        notices = [
            *config_notices(config, given, site.device, remote.weight_transfer if remote is not None else None),
            *data_notices(
                training.train_data,
                config,
                template,
                rollout.reads_column,
                rollout.runs_code,
                rollout.unread_settings,
                takes_media=training.takes_media,
            ),
        ]
        texts = [str(each) for each in notices]
        trainer = Trainer(
            config, rollout, training, run, display, notices=texts, callbacks=attempts.callbacks, plan=plan
        )
        if checkpoint is not None:
            with advised("resume", config, plan):
                trainer.restore(checkpoint)
            display.say(f"Resuming {run.path} after step {trainer.step}")
            if site.is_here and resolve_dtype(config.model.dtype) != (
                chosen := auto_dtype(resolve_device(config.model.device))
            ):
                name = str(chosen).removeprefix("torch.")
                kept = f"The run keeps model.dtype = {config.model.dtype}"
                display.say(f"{kept}; on this device, auto would choose {name}")
        elif resuming:
            display.say(f"{run.path} has no checkpoint yet: starting from the beginning")
        else:
            _announce(run, config, display)
        run.write_config(to_yaml(with_absolute_paths(config)))
        display.say(
            f"{describe(training.train_data, 'training')}, "
            f"{describe(rollout.eval_data, 'held-out', config.eval.num_prompts)}"
        )
        display.say(logprob_sources(config))
        if plan is not None:
            display.say(describe_plan(plan))
        for notice in notices:
            display.say(f"Note: {notice}")
        if not has_template(rollout.tokenizer):
            display.say("The model has no chat template: prompts are used as plain text")
        if resuming and (changed := _changed_servers(run, config)):
            display.say(changed)
        stack.enter_context(rollout.open_calls(run, training.train_data))
        try:
            finished = trainer.fit()
            stack.close()
            summarise(run, display, is_finished=finished)
        except KeyboardInterrupt:
            # A second interrupt, while the run was ending.
            if training.learner.status().failure:
                raise  # the site names the rank
            total_steps = config.trainer.total_steps
            display.say(how_to_resume(run, None if _lacks_evaluation(run, total_steps, config) else total_steps))
            return Ended(run, is_finished=False)
        except Exception as error:
            if not isinstance(error, RankFailed) and (kept := what_is_kept(run)):  # after those, a run may go on itself
                display.say(kept)
            raise
    return Ended(run, is_finished=finished)


def _changed_servers(run: RunDirectory, config: Config) -> str:
    """How the servers were changed while the part before ran, if this one begins without these changes."""
    from headwater.observe.server_changes import Difference, read_changes

    before = Difference.of(read_changes(run.servers_file))
    named = [url.rstrip("/") for url in config.rollout.servers]
    lost = Difference(
        tuple(name for name in before.added if name not in named),
        tuple(name for name in before.removed if name in named or not named),
    )
    if not lost:
        return ""
    return (
        f"Servers were changed while {run.path} ran before: {lost}. It starts with those of its recipe again; "
        f"`headwater servers {run.path}` lists and changes them"
    )


def _announce(run: RunDirectory, config: Config, display: Display) -> None:
    display.say(f"Run directory {run.path}")
    wanted = Path(config.run.root) / config.run.name
    if run.path != wanted:
        how = f"; to resume it:  {_resuming(wanted)}" if (wanted / "config.yaml").is_file() else ""
        display.say(f"{wanted} exists and is left unchanged{how}")


def _resuming(path: Path) -> str:
    from headwater.config.load import load_config
    from headwater.observe.run_directory import RunDirectory
    from headwater.trainer.summary import needs_its_script, resume_command

    run = RunDirectory(path)
    command = resume_command(run)
    if needs_its_script(run):
        return command
    try:
        config = load_config(run.config_file, was_accepted=True).config
        done = max(run.checkpoint_steps(), default=0)
        is_complete = done >= config.trainer.total_steps and not _lacks_evaluation(run, done, config)
    except HeadwaterError:
        return command  # it will report the problem
    return f"{command} {_more_steps(done)}" if is_complete else command
