"""Everything that a run directory says about its run, read once, and whether the run is alive."""

from __future__ import annotations

import shutil
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headwater.config.checks import named_sources
from headwater.config.load import LoadedConfig, load_config
from headwater.config.paths import is_whole
from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError, RunError
from headwater.core.processes import process_start
from headwater.core.records import DropKind
from headwater.core.registry import PYTHON
from headwater.observe.manifest import Damage, num_bytes
from headwater.observe.manifest import damage as damage_of
from headwater.observe.run_directory import RunDirectory, last_records
from headwater.observe.status_file import Drops, RunStatus, read_counts, read_status

_METRICS_LINES = 100
_LEDGER_LINES = 20
_FEW_STEPS = 10
_QUICK_BYTES = 8 * 2**30
"""Checkpoints of at most this size in total are verified every time; hashing them takes seconds."""
_SILENT_S = 30.0
"""A live process writes its status every two seconds. On a machine under load, a write may be late."""
_OLD_S = 600.0
LifeState = Literal["running", "unresponsive", "killed", "finished", "interrupted", "failed", "unknown"]


@dataclass(frozen=True)
class LedgerTail:
    """The last lines of the ledger."""

    step: int
    time: float
    counts: Mapping[str, int]
    num_trained: int
    """Groups that were trained on in the last few steps."""
    drops: Mapping[DropKind, Drops]
    """Groups that were dropped in the last few steps."""


@dataclass(frozen=True)
class Evidence:
    run: RunDirectory
    now: float
    status: RunStatus | None
    process_is_there: bool | None
    """Whether the run's process exists; None if this machine cannot tell."""
    damage: tuple[str, ...]
    """One message for each file that cannot be read."""
    skipped: tuple[str, ...]
    """One message for each thing that was ignored: lines that are no records, and foreign folders."""
    metrics: tuple[dict[str, Any], ...]
    """The newest records, oldest first."""
    ledger: LedgerTail | None
    config: Config | None
    """None if this version cannot read the settings."""
    checkpoint_steps: tuple[int, ...]
    checkpoint_bytes: int
    """Size of the newest checkpoint."""
    checkpoint_damage: Mapping[int, tuple[Damage, ...]]
    """By step: the files of checkpoints that are missing or changed."""
    reference_damage: tuple[Damage, ...]
    is_verified: bool
    """Whether the contents of the checkpoints were compared, and not only the sizes of their files."""
    free_bytes: int

    @property
    def newest_whole(self) -> int | None:
        """The newest step whose checkpoint is not damaged."""
        return max((step for step in self.checkpoint_steps if step not in self.checkpoint_damage), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done and saved, and the last one is evaluated, so that there is nothing to resume."""
        total, newest = self.total_steps, self.newest_whole
        if total is None or newest is None or newest < total:
            return False
        if self.config is None or not _ends_with_evaluation(self.config):
            return True
        return any(record["kind"] == "eval" and record["step"] >= total for record in self.metrics)

    @property
    def train_metrics(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record["kind"] == "train"]

    @property
    def step(self) -> int:
        """The number of completed steps."""
        reported = self.status.step if self.status else None
        return reported if reported is not None else max((record["step"] for record in self.train_metrics), default=0)

    @property
    def total_steps(self) -> int | None:
        if self.status is not None and self.status.total_steps is not None:
            return self.status.total_steps
        return self.config.trainer.total_steps if self.config else None

    @property
    def last_metrics_time(self) -> float | None:
        return max(_numbers(self.metrics, "time"), default=None)

    @property
    def counts(self) -> Mapping[str, int] | None:
        """The newest counts of the ledger."""
        if self.status is not None and self.status.counts is not None:
            return self.status.counts
        return self.ledger.counts if self.ledger else None

    def step_s(self) -> float | None:
        """The median duration of the last steps."""
        return _median(_numbers(self.train_metrics[-_FEW_STEPS:], "time/step_s"))

    def earlier_step_s(self) -> float | None:
        """The median duration of the steps before those."""
        return _median(_numbers(self.train_metrics[:-_FEW_STEPS], "time/step_s"))

    def share(self, name: str) -> float | None:
        """The share of the last steps' time that was spent on ``name``; None if it was not measured."""
        spent = _numbers(self.train_metrics[-_FEW_STEPS:], f"time/{name}_s")
        step_s = _numbers(self.train_metrics[-_FEW_STEPS:], "time/step_s")
        return sum(spent) / sum(step_s) if spent and sum(step_s) > 0 else None


def gather(run: RunDirectory, *, verify: bool = False, most_bytes: int | None = None) -> Evidence:
    """Read everything. A file that cannot be read is reported in ``damage``; the others are still used.

    The contents of checkpoints are compared with their manifests if they have at most ``most_bytes`` in total (None: 8
    GiB) or ``verify`` is true, and otherwise only the sizes of their files.
    """
    damage: list[str] = []
    status = ledger = None
    try:
        status = read_status(run.status_file)
    except RunError as error:
        damage.append(str(error))
    try:
        ledger = _read_ledger(run)
    except RunError as error:
        damage.append(str(error))
    config = None
    try:
        file = run.config_file.stat()
        config = recorded_config(run.config_file, file.st_mtime_ns, file.st_size).config
    except (HeadwaterError, OSError, ValueError) as error:
        damage.append(f"{run.config_file} cannot be read by this version: {str(error).splitlines()[0]}")
    steps = run.checkpoint_steps()
    sizes = {step: num_bytes(run.checkpoint(step)) for step in steps}
    is_verified = verify or sum(sizes.values()) <= (_QUICK_BYTES if most_bytes is None else most_bytes)
    return Evidence(
        run=run,
        now=time.time(),
        status=status,
        process_is_there=_process_is_there(status) if status else None,
        damage=tuple(damage),
        skipped=tuple(_skipped(run)),
        metrics=tuple(run.last_metrics(_METRICS_LINES)),
        ledger=ledger,
        config=config,
        checkpoint_steps=tuple(steps),
        checkpoint_bytes=sizes[steps[-1]] if steps else 0,
        checkpoint_damage=_checkpoint_damage(run, steps, contents=is_verified),
        # Without a checkpoint, the reference may be incomplete: it is written when the warm start ends.
        reference_damage=_damage_now(run.reference, contents=is_verified) if steps else (),
        is_verified=is_verified,
        free_bytes=shutil.disk_usage(run.path).free,
    )


@lru_cache(maxsize=64)
def recorded_config(path: Path, changed_ns: int, num_bytes: int) -> LoadedConfig:
    """The settings in ``path``. They are read again when the file has changed."""
    return load_config(path, was_accepted=True)


def _checkpoint_damage(run: RunDirectory, steps: Sequence[int], *, contents: bool) -> dict[int, tuple[Damage, ...]]:
    found = {step: _damage_now(run.checkpoint(step), contents=contents) for step in steps}
    return {step: each for step, each in found.items() if each}


def _damage_now(folder: Path, *, contents: bool) -> tuple[Damage, ...]:
    """The damage of a folder that still exists: a live run removes its old checkpoints, perhaps at this moment."""
    found = damage_of(folder, contents=contents) if folder.exists() else ()
    return found if folder.exists() else ()


def _skipped(run: RunDirectory) -> Iterator[str]:
    for path, count in ((run.metrics_file, _METRICS_LINES), (run.ledger_file, _LEDGER_LINES)):
        read = last_records(path, count)
        if read.skipped and read.records:
            yield f"{path}: {len(read.skipped)} of its last lines are no records of a run and were skipped"
    for foreign in run.foreign_checkpoints():
        yield f"{foreign} is not a checkpoint and was skipped"


def _process_is_there(status: RunStatus) -> bool | None:
    if status.host != socket.gethostname() or status.process_start is None:
        return None
    return process_start(status.pid) == status.process_start


def _read_ledger(run: RunDirectory) -> LedgerTail | None:
    path = run.ledger_file
    try:
        records = [each for each in run.last_ledger(_LEDGER_LINES) if each["kind"] == "step"]
        if not records:
            # A resume may have made all of these lines invalid. Then nothing is known, and nothing is wrong.
            if path.exists() and path.stat().st_size > 0 and not last_records(path, 1).records:
                raise RunError(f"{path} cannot be read: none of its last lines is complete")
            return None
        drops: dict[DropKind, Drops] = {}
        for each in (each for record in records for each in record.get("dropped", ())):
            kind = DropKind(each["kind"])
            count = drops[kind].count if kind in drops else 0
            drops[kind] = Drops(count + 1, str(each["message"]))
        num_trained = sum(len(record.get("trained", ())) for record in records)
        last = records[-1]
        return LedgerTail(int(last["step"]), float(last["time"]), read_counts(last["counts"]), num_trained, drops)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error} in its last lines") from error


def _numbers(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The values of ``name`` in the records that have a number there."""
    values = (record.get(name) for record in records)
    return [value for value in values if isinstance(value, (int, float))]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Life:
    state: LifeState
    text: str
    """For people: the observation behind ``state``."""

    @property
    def is_over(self) -> bool:
        return self.state in ("killed", "finished", "interrupted", "failed")


def _ends_with_evaluation(config: Config) -> bool:
    """Whether the run evaluates its last step. It does if it has held-out prompts: its own data or a task's."""
    sources = named_sources(config, config.data.train)
    has_task = any(not is_whole(source) and not source.startswith(PYTHON) for source in sources)
    return config.eval.after and (bool(config.data.eval) or has_task)


def life_of(evidence: Evidence) -> Life:
    status = evidence.status
    if status is None:
        return _by_metrics(evidence)
    age_s = max(0.0, evidence.now - status.time)
    heartbeat = f"heartbeat {show_duration(age_s)} ago"
    process = f"process {status.pid} on {status.host}"
    if status.state == "finished":
        return Life("finished", f"completed {show_duration(age_s)} ago")
    if status.state == "interrupted":
        return Life("interrupted", f"stopped by Ctrl-C or a signal {show_duration(age_s)} ago")
    if status.state == "failed":
        first_line = status.error.partition("\n")[0]
        return Life("failed", f"{show_duration(age_s)} ago: {first_line}")
    if evidence.process_is_there is False and evidence.is_complete:
        return Life("finished", f"all steps are done and saved; {process} then ended without reporting it")
    if evidence.process_is_there is False:
        return Life("killed", f"{process} no longer exists and did not report an end; last {heartbeat}")
    if age_s > _SILENT_S:
        if evidence.process_is_there is None:
            return Life("unresponsive", f"{process} cannot be checked from this machine; last {heartbeat}")
        return Life("unresponsive", f"{process} exists, but its last {heartbeat}")
    return Life("running", f"{process}, {heartbeat}")


def _by_metrics(evidence: Evidence) -> Life:
    """For a run without a readable status file: what the metrics show."""
    if evidence.total_steps is not None and evidence.step >= evidence.total_steps:
        return Life("finished", "all steps are done")
    last = evidence.last_metrics_time
    if last is None:
        return Life("unknown", "no status and no metrics: the run has not begun, or ended before its first step")
    age_s = evidence.now - last
    if age_s > max(_OLD_S, 10 * (evidence.step_s() or 0.0)):
        return Life(
            "unknown", f"no readable status, and no metrics for {show_duration(age_s)}: it probably ended early"
        )
    return Life("running", f"probably: no readable status, but metrics were written {show_duration(age_s)} ago")


def show_duration(seconds: float) -> str:
    """For example ``0.4 s``, ``41 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
