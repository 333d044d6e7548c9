"""The one loop: take rollouts, make experience, update, publish, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from headwater.config.schema import Config
from headwater.core.errors import (
    CopyFailed,
    DeviceMemoryFull,
    DiskFull,
    HeadwaterError,
    LeftOut,
    RankFailed,
    RolloutFailed,
)
from headwater.core.interpreter import Interrupts, collect_young_garbage, sharing_interpreter
from headwater.core.learner import ProfileOrder
from headwater.core.memory_plan import MemoryPlan
from headwater.core.records import Prompt, Trajectory
from headwater.observe.manifest import seal
from headwater.observe.progress import Display
from headwater.observe.run_directory import RunDirectory
from headwater.observe.status_file import ENGINE_FIELDS, StatusFile
from headwater.observe.trackers import Trackers
from headwater.rollout.group import PromptDraw, RolloutBatch
from headwater.rollout.source import PromptStream
from headwater.trainer.callbacks import Callback, StopTraining
from headwater.trainer.checkpoint import ADAPTERS, BestStep, Checkpoints, TrainerState, check_weights, read_state
from headwater.trainer.evaluate import evaluate, rows_of
from headwater.trainer.experience import Experience
from headwater.trainer.learner_setup import TrainingParts
from headwater.trainer.memory_turns import MemoryTurns
from headwater.trainer.metrics import EngineWatch, RunFacts
from headwater.trainer.recorder import TRAINING, Recorder
from headwater.trainer.rollout_setup import RolloutParts, num_left_out
from headwater.trainer.warm_start import warm_start
from headwater.weights.publish import AdaptersAlone, Published, publish, send

logger = logging.getLogger(__name__)

NOTHING = -1
"""The step of a run from which nothing is kept."""

_NUM_PROBED = 256
"""Prompts that the warm start samples to measure the policy, if ``eval.num_prompts`` does not limit them."""


class Trainer:
    """Trains one run from its config, or from its latest checkpoint.

    Between two steps everything is consistent: weights, optimiser, policy version and data cursor all belong to
    ``self._state``. An interrupt or a failed rollout therefore leaves a checkpoint that resumes exactly. An interrupt
    during the warm start leaves no checkpoint, and a resumed run starts from the beginning.
    """

    def __init__(
        self,
        config: Config,
        rollout: RolloutParts,
        training: TrainingParts,
        run: RunDirectory,
        display: Display,
        *,
        last_step: int | None = None,
        notices: Sequence[str] = (),
        callbacks: Sequence[Callback] = (),
        plan: MemoryPlan | None = None,
    ) -> None:
        """``last_step`` ends training before ``trainer.total_steps`` and changes nothing else. ``notices`` are for the
        doctor. ``plan`` says what leaves the GPU when."""
        self._callbacks = callbacks
        self._unsaid: dict[int, Path] = {}
        """The checkpoint that callbacks were not told about yet."""
        self._saved_step = NOTHING
        """The last step that was saved, or is being saved."""
        config = training.config
        self._notices = tuple(notices)
        self._last_step = min(last_step or config.trainer.total_steps, config.trainer.total_steps)
        self._config = config
        self._parts = rollout
        self._rollouts = rollout.train_rollouts
        self._training = training
        self._learner = training.learner
        self._run = run
        self._display = display
        self._stream = PromptStream(
            training.train_data,
            config.run.seed,
            config.data.shuffle,
            gives_unreadable=config.rollout.on_failure == "drop",
        )
        self._checkpoints = Checkpoints.of(config.trainer, run)
        self._periods = Periods(config, len(training.train_data))
        self._best = BestStep(config.trainer.best_metric, config.trainer.best_mode)
        self._interrupts = Interrupts(
            lambda doing: display.say(f"Stopping after {doing}. Ctrl-C again stops immediately.")
        )
        is_local = not config.rollout.is_separate and config.cluster.kind == "local"
        self._engine_watch = EngineWatch(rollout.engine.status, is_local=is_local)
        self._trackers = Trackers.of(config.trainer.trackers, config.trainer.tracker_args, display)
        self._recorder = Recorder(
            run,
            display,
            rollout.spans,
            rollout.trace,
            save_rollouts_every_steps=config.trainer.save_rollouts_every_steps,
            num_left_out=num_left_out(training.train_data),
            facts=RunFacts.of(config, self._learner.status().num_ranks),
            trackers=self._trackers if config.trainer.trackers else None,
            num_tracked_samples=config.trainer.num_tracked_samples,
            reward_counts=rollout.reward_counts,
            engine_metrics=lambda: {**self._engine_watch.take(), **self._turns.take_report()},
        )
        self._turns = MemoryTurns(
            config, plan, self._learner, rollout.engine, self._switch, settle=self._recorder.flush
        )
        self._adapters = AdaptersAlone() if config.rollout.publish == "adapter" else None
        self._compares_later = is_local and not config.lora.rank and not config.critic.enabled
        self._rollouts.expect_batches(config.trainer.total_steps)
        self._books = self._rollouts.close_books(self._stream.state_dict)
        self._state = replace(self._state_at(0), warm_started=config.warm_start.num_steps == 0)
        self._consistent = self._state.warm_started
        rollout.tasks.while_waiting = self._restore_engine

    def _state_at(self, step: int) -> TrainerState:
        return TrainerState(
            step,
            self._books.snapshot,
            warm_started=True,
            kl_coefficient=self._training.experience.kl.coefficient,
            has_optimizer=self._config.trainer.checkpoint_optimizer,
        )

    def restore(self, checkpoint: Path) -> None:
        """Continue from ``checkpoint``. The rollouts' engine gets its weights, which are compared with the ledger's."""
        state = read_state(checkpoint, self._stream)
        self._learner.load(checkpoint)
        with self._rank_failures_named():
            published = self._send(state.step)
        check_weights(self._run, state.step, self._checksum(published.trained))
        if not state.has_optimizer:
            self._display.say(
                f"{checkpoint} has no optimiser state (trainer.checkpoint_optimizer=false): AdamW starts with new "
                "averages, so the run continues, but not exactly as if it had not stopped"
            )
        if self._config.algorithm.kl_target > 0:
            # Without a controller, the coefficient is the config's, which may have changed.
            self._training.experience.kl.coefficient = state.kl_coefficient
        self._rollouts.restore(state.rollouts, state.step)
        self._state = state
        self._saved_step = state.step
        self._consistent = True

    def status(self) -> dict[str, Any]:
        """The progress of the run and of its rollouts. Called from another thread."""
        return {
            "step": self._state.step,
            "total_steps": self._last_step,
            "learner": asdict(self._learner.status()),
            "stage": self._stage_between_steps(),
            "ledger": asdict(self._rollouts.ledger.counts()),
            **self._rollouts.status(),
            "reward_failures": self._parts.reward_failures(),
            "notices": self._notices,
            **self._engine_status(),
        }

    def _engine_status(self) -> dict[str, Any]:
        now = self._parts.engine.status()
        engine = {name: getattr(now, name) for name in ENGINE_FIELDS}
        servers = [asdict(each) for each in now.servers]
        return {"engine": engine, "engine_restarts": now.num_restarts, "servers": servers}

    def _stage_between_steps(self) -> dict[str, Any] | None:
        """The progress of the warm start, or of an evaluation before or after training."""
        now = self._display.stage_now
        return asdict(now) if now is not None and now.name != TRAINING else None

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._state.step

    def fit(self) -> bool:
        """Train to ``trainer.total_steps`` and return whether that was reached. Ctrl-C stops it with a checkpoint.

        With ``eval.only``, evaluate and train nothing.
        """
        with (
            sharing_interpreter(),
            StatusFile(self._run.status_file, self.status) as status,
            self._interrupts.installed(),
            self._engine_watch,
        ):
            run, folder = self._config.run, self._run.path / "trackers"
            self._trackers.start(asdict(self._config), self._run.path.name, project=run.project, folder=folder)
            try:
                self._recorder.tokens(self._parts.tokenizer)
                self._prepare()
                if not self._config.eval.only:
                    self._train()
                    self._save(is_last=True)
                self._recorder.flush()
            except KeyboardInterrupt:
                self._check_learner()
                is_kept = self._stop()
                if self._state.step < self._last_step or not is_kept or self._evaluation_missing():
                    status.state = "interrupted"
                    return False
            except Exception as error:
                if self._run.metrics_file.exists():  # otherwise nothing was done that could be saved
                    self._save_after(error)
                raise
            finally:
                self._checkpoints.finish(self._display.say)
                self._recorder.close()
            return True

    def _prepare(self) -> None:
        if self._run.metrics_file.exists():
            # Records that an earlier process wrote after this step are discarded: the steps are computed again.
            kept = self._state.step if self._consistent else NOTHING
            self._checkpoints.set_aside_after(kept)
            self._recorder.resumed(kept)
            self._find_best()
        if not self._state.warm_started:
            self._warm_start()
        if self._evaluation_missing():
            self._evaluate()

    def _evaluation_missing(self) -> bool:
        """Whether the evaluation that belongs to the present step was not made, or was broken off."""
        step, settings = self._state.step, self._config.eval
        if self._parts.eval_data is None or self._recorder.has_evaluation(step):
            return False
        if settings.only or (settings.after and step >= self._last_step):
            return True
        return settings.before if step == 0 else self._periods.evaluates(step)

    def _train(self) -> None:
        with self._recorder.training(self._state.step, self._last_step):
            self._periods.saved()
            if self._saves_in_background():
                self._learner.prepare_snapshot()
            while self._goes_on():
                batch = self._take()
                with self._interrupts.deferred("this update"):
                    experience = self._make_experience(batch)
                    update = self._update(experience)
                    sent = self._publish()
                    self._record(experience, {**update, **sent})
                self._tell("on_step_end", self._state.step, self._recorder.latest)
                if self._periods.evaluates(self._state.step):
                    self._evaluate()
                if self._periods.saves(self._state.step):
                    self._save()
        if self._config.eval.after and self._evaluation_missing():
            self._evaluate()

    def _saves_in_background(self) -> bool:
        """Whether a checkpoint is due, or may be due, before the one at the end."""
        settings, step = self._config.trainer, self._state.step
        is_due = self._periods.may_save(step, self._last_step)
        may_be_best = bool(settings.best_metric) and step < self._last_step and self._parts.eval_data is not None
        return settings.checkpoint_in_background and (is_due or may_be_best)

    def _goes_on(self) -> bool:
        """Whether there is another step. A callback that is told about a checkpoint may end training."""
        self._checkpoints.check()
        self._tell_saved()
        return self._state.step < self._last_step

    def _take(self) -> RolloutBatch:
        """Groups for one step, none of them too old. Later groups continue to be generated if allowed."""
        self._recorder.begin_step()
        self._profile(self._state.step + 1, is_start=True)
        with self._turns.generating(), self._stage("wait", batch=self._state.step + 1):
            return self._rollouts.prepare_batch(self._stream)

    @contextmanager
    def _stage(self, name: str, **args: object) -> Iterator[None]:
        """A part of a step. If the device runs out of memory in it, the error names settings that need less."""
        try:
            with self._recorder.stage(name, **args):
                yield
        except Exception as error:
            from headwater.trainer.memory_advice import Known, is_out_of_memory, memory_full  # only for a failed run

            if not is_out_of_memory(error) or isinstance(error, DeviceMemoryFull):  # an inner stage has named itself
                raise
            learner = self._learner.status()
            shapes = {} if learner.failure else self._learner.shapes()
            known = Known.of(self._config, lambda: self._parts.engine.status().settings, learner)
            raise memory_full(error, name, self._config, shapes, self._turns.plan, known) from error

    @contextmanager
    def _switch(self, name: str) -> Iterator[None]:
        """A stage in which memory moves. After a part of it, the weights could not be saved."""
        with self._interrupts.deferred("moving the learner's memory"), self._stage(name):
            yield

    def _make_experience(self, batch: RolloutBatch) -> Experience:
        self._turns.train()  # on a shared GPU, the engine's memory is released, as far as the plan says so
        with self._stage("experience"):
            return self._training.experience.make(batch, self._state.step, self._parts.join_scores)

    def _update(self, experience: Experience) -> dict[str, float]:
        self._consistent = False
        with self._stage("train"):
            return {**experience.metrics, **self._learner.update(experience.data)}

    def _publish(self) -> dict[str, float]:
        """Send the new weights to the engine. This completes the step."""
        step = self._state.step + 1
        if self._config.run.deterministic:
            with self._stage("wait", batch=step):
                self._rollouts.finish_all()
        self._turns.publishing()
        with self._stage("publish", version=step), self._rank_failures_named():
            self._recorder.flush()  # the weights that are replaced now have been compared
            learned, metrics = self._send_new(step)
        with self._recorder.stage("record"):
            self._rollouts.trained(step, learned)
            self._books = self._rollouts.close_books(self._stream.state_dict)
            self._recorder.ledger(step, learned, self._books)
        self._state = self._state_at(step)
        self._consistent = True
        collect_young_garbage()  # before new episodes begin: a collection would look through all of them
        self._rollouts.set_version(step)
        if self._adapters is not None:
            # Servers that have joined did not take the adapters alone, and the learner may not wait for rollouts.
            self._restore_engine()
        return metrics

    def _send_new(self, step: int) -> tuple[Callable[[], str], dict[str, float]]:
        """Send the trained weights as version ``step``, and return a function that waits for their checksum.

        An engine in this process generates with them while the checksums are computed. They are compared when the
        ledger is written, which is before the next version is sent and before a checkpoint.
        """
        longest_s = self._config.rollout.timeout_s
        if not self._compares_later:
            published = self._send(step, longest_response_s=longest_s)
            text = self._checksum(published.trained)
            return lambda: text, published.metrics()
        sent = send(self._learner, self._parts.engine, step, longest_response_s=longest_s)
        return cache(lambda: sent.compare().trained), sent.metrics()

    def _send(self, version: int, *, longest_response_s: float = 0.0, is_repeat: bool = False) -> Published:
        """Publish the present weights as a version, and verify them."""
        engine = self._parts.engine
        # Servers may join and leave during a run. Each new one takes its first weights after the others.
        servers = engine.status().servers
        is_rolling = self._config.rollout.update_order == "rolling"
        num_turns = len(servers) if is_rolling else 1 + sum(each.needs_weights for each in servers)
        return publish(
            self._learner,
            engine,
            version,
            longest_response_s=longest_response_s,
            num_turns=num_turns,
            is_repeat=is_repeat,
            adapters=self._adapters,
        )

    def _checksum(self, policy: str) -> str:
        """The checksums of everything that is trained; ``policy`` is the one of the policy's weights, merged."""
        adapters = f"{ADAPTERS}{self._learner.checksum('policy')}" if self._config.lora.rank else ""
        critic = f" critic {self._learner.checksum('critic')}" if self._config.critic.enabled else ""
        return f"{policy}{adapters}{critic}"

    def _restore_engine(self) -> None:
        """While rollouts are awaited: publish the present version again to an engine whose process was replaced."""
        now = self._parts.engine.status()
        if now.needs_weights:
            if self._state.warm_started and not self._consistent:
                if now.metrics.get("router_num_open_servers"):
                    return  # others serve, and it gets the weights that are sent next
                raise RolloutFailed(
                    f"the engine was replaced while it generated with version {self._state.step}, whose weights the "
                    "learner no longer has; resume from the last checkpoint"
                )
            # An interrupt must not leave the transfer: the engine's thread would continue to read the export.
            with (
                self._interrupts.deferred("sending the weights"),
                self._recorder.stage("publish", version=self._state.step),
                self._rank_failures_named(),
            ):
                try:
                    self._send(self._state.step, is_repeat=True)
                except LeftOut as error:
                    self._check_learner()
                    logger.warning("%s", error)

    def _record(self, experience: Experience, update: dict[str, float]) -> None:
        drawn = self._stream.metrics(group.prompt for group in experience.batch.groups)
        self._recorder.step(self._state.step, experience.batch, {**update, **drawn}, self._books, experience.saved)
        self._profile(self._state.step, is_start=False)

    def _profile(self, step: int, *, is_start: bool) -> None:
        """Have the steps of ``trainer.profile`` recorded, from the first rollout to the metrics."""
        chosen = self._config.trainer.profile
        if step in chosen.steps:
            folder = self._run.path.absolute() / "profile"
            order = ProfileOrder(folder, f"step_{step:06d}", chosen.ranks, chosen.memory)
            self._learner.profile(order if is_start else None)

    def _evaluate(self) -> None:
        if self._parts.eval_data is None:
            return
        settings = self._config.eval
        num_prompts = len(rows_of(self._parts.eval_data, settings.num_prompts))
        with self._stage("evaluate"):
            with self._recorder.evaluating(self._state.step, num_prompts) as progress:
                result = evaluate(
                    self._run_evaluation,
                    self._parts.eval_data,
                    settings.num_prompts,
                    self._config.run.seed,
                    batch_size=settings.batch_size,
                    save=self._save_evaluation,
                    progress=progress,
                )
            self._recorder.evaluation(self._state.step, result)
        self._tell("on_evaluate", self._state.step, self._recorder.latest)
        self._best.check(self._state.step, result.metrics())  # step 0 is never the best
        if self._state.step > 0 and self._best.is_improved(self._state.step, result.metrics()):
            self._checkpoints.keep_best(self._state.step)
            self._save()

    def _run_evaluation(self, draws: Sequence[PromptDraw], on_group: Callable[[], None]) -> RolloutBatch:
        with self._turns.generating():
            return self._parts.eval_rollouts.rollout_batch(draws, on_group)

    def _save_evaluation(self, number: int, rollouts: Sequence[tuple[Prompt, Trajectory]]) -> None:
        columns = self._training.experience.saved_of([each for _, each in rollouts])
        self._recorder.save_evaluation(self._state.step, number, rollouts, columns)

    def _find_best(self) -> None:
        """The best checkpoint of an earlier part of the run."""
        if not self._config.trainer.best_metric:
            return
        saved = self._checkpoints.saved_anywhere()
        for step, metrics in self._recorder.evaluations():
            if 0 < step <= self._state.step and step in saved and self._best.is_improved(step, metrics):
                self._checkpoints.keep_best(step)

    def _warm_start(self) -> None:
        config = self._config

        def sampled_reward() -> float:
            self._send(0)
            probe = min(config.eval.num_prompts or _NUM_PROBED, len(self._training.train_data))
            with self._turns.generating():
                run = self._parts.probe_rollouts.rollout_batch
                probed = evaluate(run, self._training.train_data, probe, config.run.seed)
            self._turns.train()
            return probed.reward_mean

        self._turns.train()  # the memory plan counts the engine's weights as absent while anything is trained
        with self._stage("warm_start"):
            result = warm_start(
                config.warm_start,
                self._learner,
                self._parts.tokenizer,
                self._training.train_data,
                seed=config.run.seed,
                template_args=config.data.chat_template_args,
                sampled_reward=sampled_reward,
                display=self._display,
            )
        self._send(0)
        self._learner.keep_reference(self._run.reference)
        if self._run.reference.exists():
            seal(self._run.reference)
        self._recorder.warm_started(result)
        self._state = replace(self._state, warm_started=True)
        self._consistent = True

    def _stop(self) -> bool:
        """Save a checkpoint if possible, and return whether there is one of the present step.

        The message comes first: saving takes seconds, in which a user might press Ctrl-C again.
        """
        kept = f"saving step {self._state.step}" if self._consistent else "the present step is discarded"
        self._display.say(f"Stopping: {kept}.")
        # A second Ctrl-C waits for the checkpoint, a third one discards it.
        with suppress(KeyboardInterrupt):
            self._save_if_consistent()
        return self._checkpoints.has(self._state.step)

    def _save_after(self, error: Exception) -> None:
        """Save what is consistent. ``error`` is what the user must see, so a failure to save is only a message."""
        if isinstance(error, DiskFull | CopyFailed):
            return  # there is no space for a checkpoint either, or it is saved and only its copy is missing
        try:
            self._save_if_consistent()
        except (HeadwaterError, OSError) as second:
            self._display.say(f"Step {self._state.step} could not be saved: {second}")

    def _save_if_consistent(self) -> None:
        """After an interrupted update the weights belong to no version, and a run could not resume from them."""
        if self._consistent and not self._learner.status().failure:
            self._save(is_last=True, is_rescue=True)

    @contextmanager
    def _rank_failures_named(self) -> Iterator[None]:
        """For sending weights: if a rank ends meanwhile, the engine or a server says that the transfer has failed."""
        try:
            yield
        except HeadwaterError as error:
            if not isinstance(error, RankFailed):
                self._check_learner()
            raise

    def _check_learner(self) -> None:
        """An interrupt may mean that a rank of the learner has ended; then there is nothing to save with."""
        if failure := self._learner.status().failure:
            raise RankFailed(f"{failure}; resume from the last checkpoint")

    def _save(self, *, is_last: bool = False, is_rescue: bool = False) -> None:
        """Save the present step, once. In the background, the files are written while training continues.

        ``is_last`` waits for all files, also those of an earlier call. ``is_rescue`` saves although rollouts or metrics
        could not be written.
        """
        step = self._state.step
        if step == self._saved_step and not is_last:
            return
        in_background = self._config.trainer.checkpoint_in_background and not is_last
        with self._interrupts.deferred("this checkpoint"), self._stage("checkpoint"):
            # A run that resumes from the checkpoint needs its records, at the least the line of the ledger.
            self._recorder.check_ledger(step) if is_rescue else self._recorder.flush()
            self._checkpoints.settle()
            self._tell_saved()  # about the one before, which may be removed now
            saved = self._checkpoints.save(self._state, self._learner, in_background=in_background, is_last=is_last)
        self._periods.saved()
        if step != self._saved_step:
            self._saved_step, self._unsaid = step, {step: saved}
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell callbacks about a checkpoint when all of its files are written."""
        for step, path in self._unsaid.items():
            if self._checkpoints.has(step):
                self._unsaid = {}
                self._tell("on_checkpoint", step, path)

    def _tell(self, event: str, step: int, value: Mapping[str, float] | Path) -> None:
        """Call this method of every callback. One that raises ``StopTraining`` ends training after this step."""
        for callback in self._callbacks:
            try:
                getattr(callback, event)(step, value)
            except StopTraining as stop:
                self._display.say(f"Stopping after step {self._state.step}: {str(stop) or type(callback).__name__}")
                self._last_step = self._state.step


class Periods:
    """When evaluations and checkpoints are due during training: after a number of steps, epochs or minutes.

    An epoch ends with the step that takes the last of its prompts. Prompts that replace filtered groups do not count,
    as for ``trainer.total_epochs``.
    """

    def __init__(self, config: Config, num_prompts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._eval = config.eval
        self._trainer = config.trainer
        self._num_prompts = max(1, num_prompts)
        self._clock = clock
        self._saved_at = clock()

    def evaluates(self, step: int) -> bool:
        return self._is_between(step - 1, step, self._eval.every_steps, self._eval.every_epochs)

    def saves(self, step: int) -> bool:
        minutes = self._trainer.checkpoint_every_minutes
        is_late = minutes > 0 and self._clock() - self._saved_at >= 60 * minutes
        return is_late or self._has_checkpoint(step - 1, step)

    def may_save(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint is due, or may be due, after one of the steps from ``step`` to ``last_step``."""
        return self._has_checkpoint(step, last_step) or (
            self._trainer.checkpoint_every_minutes > 0 and step < last_step
        )

    def saved(self) -> None:
        """Count minutes from now on."""
        self._saved_at = self._clock()

    def _has_checkpoint(self, step: int, last_step: int) -> bool:
        trainer = self._trainer
        return self._is_between(step, last_step, trainer.checkpoint_every_steps, trainer.checkpoint_every_epochs)

    def _is_between(self, step: int, last_step: int, every_steps: int, every_epochs: int) -> bool:
        """Whether a multiple of one of the two periods is reached after ``step``, at the latest with ``last_step``."""
        after_steps = every_steps > 0 and step // every_steps < last_step // every_steps
        epochs, last_epochs = self._epochs(step), self._epochs(last_step)
        return after_steps or (every_epochs > 0 and epochs // every_epochs < last_epochs // every_epochs)

    def _epochs(self, step: int) -> int:
        return step * self._trainer.num_prompts_per_step // self._num_prompts
