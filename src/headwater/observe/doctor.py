"""What is the matter with a run: read from its directory alone, while it lives or after it has died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isinf
from typing import Any

from headwater.core.waits import OpenWait
from headwater.observe.evidence import Evidence, gather
from headwater.observe.findings import Finding, current_waits, findings, missing_from
from headwater.observe.life import Life, life_of
from headwater.observe.recent_log import LogLine
from headwater.observe.run_directory import RunDirectory
from headwater.observe.run_status import RunningGroup
from headwater.observe.stage_progress import StageProgress


@dataclass(frozen=True)
class LastMetrics:
    kind: str
    step: int
    seconds_ago: float | None
    reward_mean: float | None


@dataclass(frozen=True)
class LedgerReport:
    counts: Mapping[str, int]
    missing: int
    """Dispatches without an end; 0 where the ledger balances."""


@dataclass(frozen=True)
class Diagnosis:
    run: str
    life: Life
    step: int
    total_steps: int | None
    version: int | None
    last_metrics: LastMetrics | None
    step_s: float | None
    """How long one of the last steps took."""
    earlier_step_s: float | None
    """How long one took before those."""
    stage: StageProgress | None
    """What goes on outside the steps, such as the supervised start."""
    waits: tuple[OpenWait, ...]
    oldest_groups: tuple[RunningGroup, ...]
    """Of a run that was killed: those that ran last."""
    capacity: int | None
    ledger: LedgerReport | None
    findings: tuple[Finding, ...]
    error: str
    log: tuple[LogLine, ...]
    checkpoint_steps: tuple[int, ...]
    resume: str
    """The command that goes on with a run that is over and not finished; empty otherwise."""

    @property
    def is_healthy(self) -> bool:
        return not any(each.severity == "problem" for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        waits = [asdict(each) | ({"hard_limit_s": None} if isinf(each.hard_limit_s) else {}) for each in self.waits]
        return asdict(self) | {"is_healthy": self.is_healthy, "waits": waits}


def examine(run: RunDirectory) -> Diagnosis:
    evidence = gather(run)
    life = life_of(evidence)
    status = evidence.status
    return Diagnosis(
        run=str(run.path),
        life=life,
        step=evidence.step,
        total_steps=evidence.total_steps,
        version=status.version if status else None,
        last_metrics=_last_metrics(evidence),
        step_s=evidence.step_s(),
        earlier_step_s=evidence.earlier_step_s(),
        stage=status.stage if status else None,
        waits=tuple(current_waits(evidence, life)),
        oldest_groups=status.oldest_groups if status and life.state not in ("finished", "interrupted") else (),
        capacity=status.capacity if status and not life.is_over else None,
        ledger=LedgerReport(counts, missing_from(counts)) if (counts := evidence.counts) else None,
        findings=tuple(findings(evidence, life)),
        error=status.error if status else "",
        log=status.log if status else (),
        checkpoint_steps=evidence.checkpoint_steps,
        resume=f"headwater train --resume {run.path}" if _can_go_on(life) else "",
    )


def _can_go_on(life: Life) -> bool:
    return life.state in ("killed", "failed", "interrupted", "unknown")


def _last_metrics(evidence: Evidence) -> LastMetrics | None:
    if not evidence.metrics:
        return None
    last = evidence.metrics[-1]
    seconds_ago = evidence.now - last["time"] if "time" in last else None
    return LastMetrics(last["kind"], last["step"], seconds_ago, last.get("reward/mean"))
