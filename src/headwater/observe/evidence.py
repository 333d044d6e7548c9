"""Everything that a run directory says about its run, read once."""

from __future__ import annotations

import shutil
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.core.errors import HeadwaterError, RunError
from headwater.core.records import DropKind
from headwater.observe.process import process_start
from headwater.observe.run_directory import RunDirectory, last_records
from headwater.observe.status_file import Drops, RunStatus, read_counts, read_status

_METRICS_LINES = 100
_LEDGER_LINES = 20
_FEW_STEPS = 10


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
    metrics: tuple[dict[str, Any], ...]
    """The newest records, oldest first."""
    ledger: LedgerTail | None
    config: Config | None
    """None if this version cannot read the settings."""
    checkpoint_steps: tuple[int, ...]
    checkpoint_bytes: int
    """Size of the newest checkpoint."""
    free_bytes: int

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
        return max((record["time"] for record in self.metrics if "time" in record), default=None)

    @property
    def counts(self) -> Mapping[str, int] | None:
        """The newest counts of the ledger."""
        if self.status is not None and self.status.counts is not None:
            return self.status.counts
        return self.ledger.counts if self.ledger else None

    def step_s(self) -> float | None:
        """The median duration of the last steps."""
        return _median([record["time/step_s"] for record in self.train_metrics[-_FEW_STEPS:]])

    def earlier_step_s(self) -> float | None:
        """The median duration of the steps before those."""
        return _median([record["time/step_s"] for record in self.train_metrics[:-_FEW_STEPS]])

    def share(self, name: str) -> float | None:
        """The share of the last steps' time that was spent on ``name``; None if it was not measured."""
        spent = [record[f"time/{name}_s"] for record in self.train_metrics[-_FEW_STEPS:] if f"time/{name}_s" in record]
        step_s = [record["time/step_s"] for record in self.train_metrics[-_FEW_STEPS:]]
        return sum(spent) / sum(step_s) if spent and sum(step_s) > 0 else None


def gather(run: RunDirectory) -> Evidence:
    """Read everything. A file that cannot be read is reported in ``damage``; the others are still used."""
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
        config = load_config(run.config_file, was_accepted=True).config
    except HeadwaterError as error:
        damage.append(f"{run.config_file} cannot be read by this version: {str(error).splitlines()[0]}")
    steps = run.checkpoint_steps()
    newest = run.checkpoint(steps[-1]) if steps else None
    return Evidence(
        run=run,
        now=time.time(),
        status=status,
        process_is_there=_process_is_there(status) if status else None,
        damage=tuple(damage),
        metrics=tuple(run.last_metrics(_METRICS_LINES)),
        ledger=ledger,
        config=config,
        checkpoint_steps=tuple(steps),
        checkpoint_bytes=sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) if newest else 0,
        free_bytes=shutil.disk_usage(run.path).free,
    )


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
            if path.exists() and path.stat().st_size > 0 and not last_records(path, 1):
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
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error} in its last lines") from error


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
