"""Writes everything a run records: metrics, ledger, rollout files, trace and the progress line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.core.errors import RunError
from headwater.core.records import Prompt, TokenArrays, Trajectory
from headwater.observe.progress import Display, Reporter
from headwater.observe.run_directory import MetricsRecord, RunDirectory
from headwater.observe.spans import Spans, StageClock
from headwater.observe.trace import Trace
from headwater.rollout.group import RolloutBatch, num_replies, num_turns
from headwater.rollout.snapshot import Books
from headwater.trainer.background_writer import BackgroundWriter
from headwater.trainer.evaluate import Evaluation
from headwater.trainer.experience import LEARNER_LOGPROBS
from headwater.trainer.metrics import FAILED_CALLS, RunFacts, StageMemory, shown_metrics, step_metrics
from headwater.trainer.token_table import write_table, write_tokens
from headwater.trainer.warm_start import WarmStartResult

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.observe.trackers import Trackers


_GROUP_TOKENS = 1 << 20
"""About how many tokens a row group of a rollout file has."""


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
        with self._display.stage("train", total_steps, start=start) as self._reporter:
            yield
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
        write_rollouts(path, step, rollouts, token_columns)

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
        write_rollouts(path, step, rollouts, token_columns)

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


def samples_of(rollouts: Sequence[tuple[Prompt, Trajectory]], count: int) -> list[dict[str, Any]]:
    """The first responses to the first ``count`` prompts, as a table for people."""
    firsts = {prompt.uid: (prompt, each) for prompt, each in reversed(rollouts)}
    chosen = [firsts[uid] for uid in dict.fromkeys(prompt.uid for prompt, _ in rollouts)][:count]
    return [
        {
            "uid": prompt.uid,
            "prompt": prompt.text,
            "response": response_text(each),
            "ground_truth": _to_json(prompt.ground_truth),
            "reward": each.reward,
        }
        for prompt, each in chosen
    ]


def response_text(trajectory: Trajectory) -> str:
    """The model's reply. If there were several, all of them and the messages between them, each with its role."""
    replies = [at for at, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    if len(replies) > 1:
        count = num_replies(trajectory)
        if 1 < count <= len(replies):
            said = trajectory.messages[replies[-count] :]  # earlier replies belong to the prompt
            return "\n\n".join(f"[{message.get('role')}]\n{_said(message)}" for message in said)
    return str(trajectory.info.get("response_text", ""))


def _ended_by(trajectory: Trajectory) -> str | None:
    noted = trajectory.info.get("ended_by")
    return noted if isinstance(noted, str) else None


def _said(message: Mapping[str, Any]) -> str:
    """The content of a message, and its tool calls as JSON."""
    calls = [_to_json(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join([*([str(message.get("content"))] if message.get("content") or not calls else []), *calls])


def _to_json(value: object) -> str:
    """JSON that people can read. Half of a surrogate pair, which a file cannot hold, stays escaped."""
    return json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def write_rollouts(
    path: Path,
    step: int,
    rollouts: Sequence[tuple[Prompt, Trajectory]],
    token_columns: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """One Parquet row per trajectory: texts for people, and tokens, log-probs, masks and versions for programs.

    ``response`` is everything after the prompt as text; ``messages`` is the whole conversation, as JSON. ``num_turns``
    counts the model's messages, and ``ended_by`` is what the workflow noted. What the scorer returned beside the reward
    is in columns ``reward_<name>``. ``token_columns``, ``[trajectories, response]``, become lists with one value per
    token of prompt and response, 0 in the prompt. ``logprob_gap`` is the largest difference between the learner's
    log-probs and those of the engine. Like the numbers of tokens and calls, it is there so that a reader can sort and
    filter without the lists.
    """
    rows = [
        {
            "step": step,
            "uid": trajectory.uid,
            "sample": trajectory.sample,
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            "response": response_text(trajectory),
            "messages": _to_json(trajectory.messages),
            "ground_truth": _to_json(prompt.ground_truth),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason,
            "num_turns": num_turns(trajectory),
            "prompt_length": trajectory.prompt_length,
            "response_length": len(trajectory.tokens) - trajectory.prompt_length,
            "num_tool_calls": _count(trajectory.info.get("num_tool_calls")),
            "num_failed_calls": _count(trajectory.info.get("tool_failures")),
            "info": _to_json(dict(trajectory.info)),
        }
        for prompt, trajectory in rollouts
    ]
    table = pa.Table.from_pylist(rows)
    ended_by = pa.array([_ended_by(trajectory) for _, trajectory in rollouts], pa.string())
    table = table.append_column("ended_by", ended_by)
    infos = [trajectory.reward_info for _, trajectory in rollouts]
    for name in dict.fromkeys(name for info in infos for name in info):
        table = table.append_column(f"reward_{name}", _column([info.get(name) for info in infos]))
    arrays = [trajectory.arrays for _, trajectory in rollouts]
    table = table.append_column("turn_rewards", _lists([np.array(each.turn_rewards, float) for _, each in rollouts]))
    # Converting lists one value at a time would take seconds for long responses.
    for name in ("tokens", "loss_mask", "logprobs", "versions"):
        table = table.append_column(name, _lists([getattr(each, name) for each in arrays]))
    for name, values in token_columns.items():
        of_each = zip((each for _, each in rollouts), values.float().numpy(), strict=True)
        lists = [_of_all_tokens(each, row) for each, row in of_each]
        table = table.append_column(name, _lists(lists))
        if name == LEARNER_LOGPROBS:
            gaps = [_largest_gap(each, its) for each, its in zip(arrays, lists, strict=True)]
            table = table.append_column("logprob_gap", pa.array(gaps, pa.float64()))
    num_tokens = sum(len(each.tokens) for each in arrays)
    # A reader of one rollout reads its whole row group.
    rows_per_group = max(1, _GROUP_TOKENS * len(rollouts) // max(1, num_tokens))
    write_table(table, path, "the rollouts", rows_per_group)


def _count(noted: object) -> int:
    """A number that a workflow noted, or the sum of numbers by name; 0 if it noted none."""
    if isinstance(noted, Mapping):
        return sum(_count(each) for each in noted.values())
    return noted if isinstance(noted, int) else 0


def _largest_gap(arrays: TokenArrays, learner: NDArray[Any]) -> float | None:
    trained = arrays.loss_mask != 0
    return float(np.abs(learner - arrays.logprobs)[trained].max()) if trained.any() else None


def _column(values: Sequence[Any]) -> pa.Array:
    """Numbers as numbers, texts as text, and anything else, or a mixture of these, as JSON."""
    given = [value for value in values if value is not None]
    if all(isinstance(value, (bool, int, float, np.number)) for value in given):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    is_text = all(isinstance(value, str) for value in given)
    texts = [None if value is None else value if is_text else _to_json(value) for value in values]
    return pa.array([None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in texts])


def _of_all_tokens(trajectory: Trajectory, response: NDArray[Any]) -> NDArray[Any]:
    """The values of a padded response, after zeros for the prompt."""
    length = len(trajectory.tokens) - trajectory.prompt_length
    return np.concatenate([np.zeros(trajectory.prompt_length, response.dtype), response[:length]])


def _lists(values: Sequence[NDArray[Any]]) -> pa.Array:
    """A column of lists, one per array."""
    starts = pa.array(np.cumsum([0, *(len(each) for each in values)]), pa.int32())
    joined = np.concatenate(values) if values else np.zeros(0, np.int64)
    return pa.ListArray.from_arrays(starts, joined.astype(np.int64) if joined.dtype == np.bool_ else joined)
