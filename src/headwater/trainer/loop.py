"""The one loop: take rollouts, make experience, update, publish, record."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from headwater.config.schema import Config
from headwater.core.data_proto import DataProto
from headwater.core.errors import HeadwaterError
from headwater.observe.progress import Display, Reporter
from headwater.observe.rollout_file import write_rollouts
from headwater.observe.run_directory import RunDirectory
from headwater.rollout.group import RolloutBatch
from headwater.rollout.prompt_stream import PromptStream
from headwater.trainer.checkpoint import Checkpoints, TrainerState, read_state
from headwater.trainer.evaluate import Evaluation, evaluate
from headwater.trainer.experience import rollout_gap
from headwater.trainer.interrupts import Interrupts
from headwater.trainer.setup import RolloutParts, TrainingParts
from headwater.trainer.step_metrics import shown_metrics, step_metrics
from headwater.trainer.warm_start import warm_start
from headwater.weights.memory import publish


@dataclass(frozen=True)
class Outcome:
    step: int
    interrupted: bool
    checkpoint: Path | None


class Trainer:
    """Trains one run from its config, or from its latest checkpoint.

    Between two steps everything is consistent: weights, optimiser, policy version and data cursor all belong to
    ``self._state``. An interrupt or a failed rollout therefore leaves a checkpoint that resumes exactly.
    """

    def __init__(
        self,
        config: Config,
        rollout: RolloutParts,
        training: TrainingParts,
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._config = config
        self._parts = rollout
        self._training = training
        self._run = run
        self._display = display
        self._stream = PromptStream(training.train_data, config.run.seed, config.data.shuffle)
        self._checkpoints = Checkpoints(run.checkpoints, config.trainer.keep_checkpoints)
        self._interrupts = Interrupts(lambda: display.say("Stopping after this update. Ctrl-C again stops at once."))
        self._state = TrainerState(0, self._stream.state_dict())
        self._consistent = True

    def restore(self, checkpoint: Path) -> None:
        """Go on from ``checkpoint``, whose weights the parts were built with."""
        state = read_state(checkpoint)
        self._training.actor.engine.load(checkpoint)
        self._stream.load_state_dict(state.sampler)
        self._parts.engine.set_version(state.step)
        self._state = state

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._state.step

    def fit(self) -> Outcome:
        """Train to ``trainer.total_steps``. Ctrl-C ends early with a checkpoint and ``interrupted=True``."""
        with self._interrupts.installed():
            try:
                self._prepare()
                self._train()
            except KeyboardInterrupt:
                return Outcome(self._state.step, True, self._save_if_consistent())
            except HeadwaterError:
                self._save_if_consistent()
                raise
            return Outcome(self._state.step, False, self._save_if_consistent())

    def _prepare(self) -> None:
        if self._state.step > 0:
            return
        if self._config.warm_start.num_steps > 0:
            self._warm_start()
        if self._config.eval.before:
            self._evaluate()

    def _train(self) -> None:
        total = self._config.trainer.total_steps
        with self._display.stage("train", total, start=self._state.step) as reporter:
            while self._state.step < total:
                started = time.perf_counter()
                self._parts.spans.drain()
                batch = self._take()
                with self._interrupts.deferred():
                    experience = self._training.experience.make(batch)
                    update = self._update(experience)
                    self._record(batch, update, started, reporter)
        if self._config.eval.after and not _due(total, self._config.eval.every_steps):
            self._evaluate()

    def _take(self) -> RolloutBatch:
        return self._parts.train_rollouts.rollout_batch(self._config.trainer.num_prompts_per_step, self._stream.take)

    def _update(self, experience: DataProto) -> dict[str, float]:
        """One step of the learner, published as the next policy version."""
        self._consistent = False
        with self._parts.spans.span("train"):
            stats = self._training.actor.update(experience)
        with self._parts.spans.span("publish"):
            publish(self._training.actor.engine, self._parts.engine, self._state.step + 1)
        self._state = TrainerState(self._state.step + 1, self._stream.state_dict())
        self._consistent = True
        if self._config.algorithm.old_logprobs == "recompute":
            stats["rollout_logprob_gap"] = rollout_gap(experience)
        return stats

    def _record(self, batch: RolloutBatch, update: dict[str, float], started: float, reporter: Reporter) -> None:
        step, every = self._state.step, self._config.trainer
        metrics = step_metrics(batch, update, self._parts.spans.drain(), time.perf_counter() - started)
        self._run.append_metrics({"kind": "train", "step": step, "time": time.time(), **metrics})
        reporter.update(step, shown_metrics(metrics))
        if _due(step, every.save_rollouts_every_steps):
            rollouts = [(group.prompt, each) for group in batch.groups for each in group.trajectories]
            write_rollouts(self._run.free_file("rollouts", f"step_{step:06d}", ".parquet"), step, rollouts)
        if _due(step, self._config.eval.every_steps):
            self._evaluate()
        if _due(step, every.checkpoint_every_steps):
            self._save()

    def _evaluate(self) -> Evaluation | None:
        if self._parts.eval_data is None:
            return None
        settings = self._config.eval
        result = evaluate(self._parts.eval_rollouts, self._parts.eval_data, settings.num_prompts, self._config.run.seed)
        step = self._state.step
        self._run.append_metrics({"kind": "eval", "step": step, "time": time.time(), **result.metrics()})
        write_rollouts(self._run.free_file("eval", f"step_{step:06d}", ".parquet"), step, result.rollouts)
        dropped = f", {result.num_dropped} dropped" if result.num_dropped else ""
        self._display.say(
            f"held-out reward at step {step}: {result.reward_mean:.3f} ({result.num_prompts} prompts{dropped})"
        )
        return result

    def _warm_start(self) -> None:
        config = self._config

        def sampled_reward() -> float:
            publish(self._training.actor.engine, self._parts.engine, 0)
            probe = min(config.eval.num_prompts, len(self._training.train_data))
            return evaluate(self._parts.probe_rollouts, self._training.train_data, probe, config.run.seed).reward_mean

        result = warm_start(
            config.warm_start,
            config.training,
            self._training.actor.engine.model,
            self._parts.tokenizer,
            self._training.train_data,
            seed=config.run.seed,
            temperature=config.rollout.temperature,
            sampled_reward=sampled_reward,
            display=self._display,
        )
        publish(self._training.actor.engine, self._parts.engine, 0)
        self._run.append_metrics({"kind": "warm_start", "step": 0, "time": time.time(), **asdict(result)})

    def _save_if_consistent(self) -> Path | None:
        """The weights are mid-way between two versions when an update was broken off; saving them would not resume."""
        return self._save() if self._consistent else self._checkpoints.latest()

    def _save(self) -> Path:
        with self._parts.spans.span("checkpoint"):
            return self._checkpoints.save(self._state, self._training.actor.engine, self._parts.tokenizer)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
