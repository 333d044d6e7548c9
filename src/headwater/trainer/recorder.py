"""Writes everything a run records: metrics, ledger, rollout files, trace and the progress line."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headwater.core.errors import RunError
from headwater.core.records import Prompt, Trajectory
from headwater.core.waits import wait_until
from headwater.observe.media_store import MediaStore
from headwater.observe.progress import Display, Reporter
from headwater.observe.run_directory import MetricsRecord, RunDirectory
from headwater.observe.spans import Spans, StageClock
from headwater.observe.trace import Trace
from headwater.rollout.group import RolloutBatch
from headwater.rollout.snapshot import Books
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.metrics import FAILED_CALLS, RunFacts, StageMemory, shown_metrics, step_metrics
from headwater.trainer.tables import samples_of, write_rollouts, write_tokens
from headwater.trainer.warm_start import WarmStartResult

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.observe.trackers import Trackers


_MOST_WAITING = 8
_LIMIT_S = 1800.0
TRAINING = "train"
"""The name under which the progress of the training steps is shown."""
_SHOW_EVERY_S = 5.0
"""How often a long evaluation between training steps is shown."""
"""A disk that takes longer does not answer any more."""


class Recorder:
    """The only writer of a run's metrics and records. All metrics pass through ``_log``, as ``MetricsRecord``.

        with recorder.training(start, total_steps):
            recorder.begin_step()
            ...                                       # take a batch, train, publish
            recorder.ledger(step, checksum, books)
            recorder.step(step, batch, stats, books)

    ``trackers`` receive the same metrics as ``metrics.jsonl``, and samples of evaluations. The files of a step are
    written while the next step begins, in order. ``flush`` waits for them; a write that failed is raised there, or by
    the next record.
    """

    def __init__(
        self,
        run: RunDirectory,
        display: Display,
        spans: Spans,
        trace: Trace | None = None,
        *,
        save_rollouts_every_steps: int = 0,
        num_left_out: int = 0,
        facts: RunFacts,
        trackers: Trackers | None = None,
        num_tracked_samples: int = 0,
        reward_counts: Callable[[], Mapping[str, float]] = dict,
        engine_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """``num_left_out`` is the number of training prompts that are too long. ``reward_counts`` gives metrics about
        failed scoring calls since it was last called, and ``engine_metrics`` those of the engine."""
        self.latest: Mapping[str, float] = {}
        """The metrics that were recorded last."""
        self._run = run
        self._display = display
        self._spans = spans
        self._trace = trace
        self._trace_file = run.free_trace_file()
        self._media = MediaStore(run.media)
        self._save_rollouts_every_steps = save_rollouts_every_steps
        self._num_left_out = num_left_out
        self._facts = facts
        self._trackers = trackers
        self._num_tracked_samples = num_tracked_samples
        self._reward_counts = reward_counts
        self._engine_metrics = engine_metrics
        self._num_failed_calls = 0
        """Scoring calls that failed since the run started or was resumed."""
        self._reporter: Reporter | None = None
        self._writer = BackgroundWriter()
        self._memory = StageMemory()
        self._clock = StageClock(self._memory.leave)

    def tokens(self, tokenizer: Any) -> None:
        """Save the bytes of the vocabulary, once per run."""
        if not self._run.tokens_file.exists():
            write_tokens(self._run.tokens_file, tokenizer)

    def resumed(self, step: int) -> None:
        """Everything that was recorded after ``step`` is no longer valid."""
        record = self._log(MetricsRecord("resume", step, time.time(), {}))
        self._run.append_ledger(record.to_json())

    def warm_started(self, result: WarmStartResult) -> None:
        self._log(MetricsRecord("warm_start", 0, time.time(), asdict(result)))

    @contextmanager
    def training(self, start: int, total_steps: int) -> Iterator[None]:
        """Show the progress of the training steps inside this block, and measure their time."""
        # What happened before, such as an evaluation, belongs to no step.
        for measure in (self._clock.take, self._memory.take, self._engine_metrics):
            measure()
        try:
            with self._display.stage(TRAINING, total_steps, start=start) as self._reporter:
                yield
        finally:
            self._reporter = None
        self.flush()

    @contextmanager
    def stage(self, name: str, **args: object) -> Iterator[None]:
        """A part of a step. Stages add up to the time of the step; what follows its record belongs to the next."""
        with self._clock.stage(name), self._spans.span(name, **args):
            yield

    def begin_step(self) -> None:
        """Rollouts that ran before, for example for evaluation, do not count as generation of this step.

        Raises the error of a record that could not be written.
        """
        self._writer.check()
        self._spans.drain()

    def flush(self) -> None:
        """Wait until everything that was recorded is written."""
        self._writer.flush()

    def check_ledger(self, step: int) -> None:
        """Wait for the records, and raise if the ledger has no line about ``step``, without which no run can resume
        from that step. Other files that could not be written do not matter here."""
        self._writer.settle()
        if step and not any(line["kind"] == "step" and line["step"] == step for line in self._run.read_ledger()):
            self._writer.check()
            raise RunError(f"{self._run.ledger_file} has no line about step {step}")

    def ledger(self, step: int, weights: Callable[[], str], books: Books) -> None:
        """The outcome of every dispatch that ended in ``step``, and the checksum of the new weights, which may have to
        be waited for."""
        began = {"kind": "step", "step": step, "time": time.time()}
        outcome = {"counts": asdict(books.counts), **books.ended}
        self._writer.put(lambda: self._run.append_ledger({**began, "weights": weights(), **outcome}))

    def step(
        self,
        step: int,
        batch: RolloutBatch,
        update: Mapping[str, float],
        books: Books,
        token_columns: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """The metrics of a training step, its rollouts if they are due, and the progress line."""
        with self.stage("record"):
            if self._trace is not None:
                self._trace.write_if_due(self._trace_file)
            if self._save_rollouts_every_steps > 0 and step % self._save_rollouts_every_steps == 0:
                self._writer.put(partial(self._write_rollouts, step, batch, token_columns), alone=True)
            metrics = step_metrics(batch, update, self._spans.drain(), self._clock.take(), books, self._facts)
            metrics |= {**self._memory.take(), **self._engine_metrics(), "prompts/left_out": self._num_left_out}
            metrics |= (counts := self._reward_counts())
            self._num_failed_calls += round(counts.get(FAILED_CALLS, 0))
            self._log(MetricsRecord("train", step, time.time(), metrics), in_background=True)
            if self._reporter is not None:
                self._reporter.update(step, shown_metrics(metrics, books.drops, self._num_failed_calls))

    def _write_rollouts(self, step: int, batch: RolloutBatch, token_columns: Mapping[str, Tensor]) -> None:
        rollouts = [(group.prompt, each) for group in batch.groups for each in group.trajectories]
        path = self._run.free_file("rollouts", f"step_{step:06d}", ".parquet")
        write_rollouts(path, step, rollouts, token_columns, self._media)

    @contextmanager
    def evaluating(self, step: int, num_prompts: int) -> Iterator[Callable[[int], None]]:
        """Show how many prompts of an evaluation are done: in a stage, or in the line of the training steps."""
        if (training := self._reporter) is None:
            with self._display.stage("evaluate", num_prompts) as reporter:
                yield lambda num_done: reporter.update(num_done, {})
            return
        shown_at = time.monotonic()

        def show(num_done: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at > _SHOW_EVERY_S:
                shown_at = time.monotonic()
                training.update(step, {"evaluated": f"{num_done} of {num_prompts} prompts"})

        yield show

    def evaluation(self, step: int, result: Evaluation) -> None:
        self._log(MetricsRecord("eval", step, time.time(), result.metrics()))
        if self._trackers is not None and self._num_tracked_samples:
            self._trackers.table(step, "eval/samples", samples_of(result.rollouts, self._num_tracked_samples))
        dropped = f", {result.num_dropped} dropped" if result.num_dropped else ""
        self._display.say(
            f"held-out reward at step {step}: {result.reward_mean:.3f} ({result.num_prompts} prompts{dropped})"
        )

    def save_evaluation(
        self,
        step: int,
        number: int,
        rollouts: Sequence[tuple[Prompt, Trajectory]],
        token_columns: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Write the responses of one batch of an evaluation. Batches after the first have a number in their names."""
        part = f"_part_{number + 1:03d}" if number else ""
        path = self._run.free_file("eval", f"step_{step:06d}{part}", ".parquet")
        write_rollouts(path, step, rollouts, token_columns, self._media)

    def evaluations(self) -> list[tuple[int, Mapping[str, float]]]:
        """The steps and metrics of the evaluations of this run that are valid."""
        self.flush()
        return [(each["step"], each) for each in self._run.read_metrics() if each["kind"] == "eval"]

    def has_evaluation(self, step: int) -> bool:
        return any(done == step for done, _ in self.evaluations())

    def close(self) -> None:
        """Write the rest of the records and of the trace, and let the trackers send what is left."""
        if (error := self._writer.close()) is not None:
            self._display.say(f"Warning: records of the last step could not be written: {error}")
        if self._trace is not None:
            self._trace.write(self._trace_file)
        for problem in self._trackers.finish() if self._trackers is not None else ():
            self._display.say(f"Warning: {problem}")

    def _log(self, record: MetricsRecord, *, in_background: bool = False) -> MetricsRecord:
        self.latest = record.values
        self._writer.put(lambda: self._run.append_metrics(record.to_json()))
        if not in_background:
            self.flush()
        if self._trackers is not None and record.values:
            prefix = "" if record.kind == "train" else f"{record.kind}/"
            self._trackers.log(record.step, {f"{prefix}{name}": value for name, value in record.values.items()})
        return record


class BackgroundWriter:
    """Runs functions that write, one at a time and in order, in a thread.

        writer.put(lambda: run.append_metrics(record))
        writer.flush()                                    # everything so far is written, or the error is raised

    After an error nothing else is written, because records would be missing between others. Every later call raises
    the error, so that no step follows one that was not recorded. A file that is ``alone`` is no such record: if it
    cannot be written, ``check`` and ``flush`` raise the error, and the records after it are still written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], Any], bool]] = deque()
        self._is_writing = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._is_broken = False
        """Nothing else is written."""
        self._thread: threading.Thread | None = None

    def put(self, write: Callable[[], Any], *, alone: bool = False) -> None:
        """Have ``write()`` called. Waits while many others wait, so that a slow disk slows the run down."""
        self._wait(lambda: len(self._waiting) < _MOST_WAITING, "for room in the queue of records to write")
        with self._changed:
            if self._is_broken and self._error is not None:
                raise self._error
            self._waiting.append((write, alone))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headwater-records", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def flush(self) -> None:
        """Wait until everything is written."""
        self.settle()
        self.check()

    def settle(self) -> None:
        """Wait until everything is written that can be, and raise nothing."""
        self._wait(lambda: not self._waiting and not self._is_writing, "for records that are being written")

    def close(self) -> BaseException | None:
        """Write what waits and end the thread. Returns the error of a write, which ``flush`` would raise."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
        return self._error

    def _wait(self, predicate: Callable[[], bool], what: str) -> None:
        with self._changed:
            wait_until(
                self._changed,
                lambda: self._is_broken or predicate(),
                lambda: f"the run waits {what}",
                kind="records",
                hard_limit_s=_LIMIT_S,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    if self._is_closed:
                        return
                    self._changed.wait()
                self._is_writing = True
                write, is_alone = self._waiting.popleft()
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised by the next call
                with self._changed:
                    self._error = self._error or error
                    if is_alone:
                        continue
                    self._is_broken = True
                    self._waiting.clear()
                    self._changed.notify_all()
                return
