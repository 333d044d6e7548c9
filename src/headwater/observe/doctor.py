"""Diagnoses a run from its directory alone, while it runs or after it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isinf
from typing import Any

from headwater.core.capabilities import ServerStatus
from headwater.core.learner import RankStatus
from headwater.core.waits import OpenWait
from headwater.observe.evidence import Evidence, Life, gather, life_of
from headwater.observe.finding import Finding
from headwater.observe.findings import findings, missing_from
from headwater.observe.run_directory import RunDirectory
from headwater.observe.status_file import LogLine, RunningGroup, RunStatus, StageProgress
from headwater.observe.wait_findings import current_waits

_REWARD = "reward/mean"


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
    """Dispatches that the ledger has lost; 0 if it balances."""


@dataclass(frozen=True)
class Diagnosis:
    run: str
    life: Life
    step: int
    total_steps: int | None
    version: int | None
    num_ranks: int
    """Processes that train together."""
    ranks: tuple[RankStatus, ...]
    """Each of them, if they are not the process of the run alone; for a run that has ended, at its last heartbeat."""
    learner_failure: str
    """Why the learner cannot be used any more; empty while it works."""
    servers: tuple[ServerStatus, ...]
    """The servers that generate, if there are several; for a run that has ended, at its last heartbeat."""
    last_metrics: LastMetrics | None
    step_s: float | None
    """The median duration of the last steps."""
    earlier_step_s: float | None
    """The median duration of the steps before those."""
    stage: StageProgress | None
    """Progress outside the training steps, such as the supervised warm start."""
    waits: tuple[OpenWait, ...]
    oldest_groups: tuple[RunningGroup, ...]
    """The groups that have run longest; for a killed run, at its last heartbeat."""
    episodes: Mapping[str, int]
    """How many episodes are in each stage."""
    capacity: int | None
    ledger: LedgerReport | None
    drops: Mapping[str, int]
    """Groups dropped in the whole run, by kind."""
    num_left_out: int
    """Training prompts that are not used because they are too long."""
    findings: tuple[Finding, ...]
    error: str
    log: tuple[LogLine, ...]
    checkpoint_steps: tuple[int, ...]
    damaged_steps: tuple[int, ...]
    """Steps whose checkpoint has a missing or changed file."""
    is_verified: bool
    """Whether the contents of the checkpoints were compared, and not only the sizes of their files."""
    resume: str
    """The command that resumes a run that ended early; empty otherwise."""

    @property
    def is_healthy(self) -> bool:
        return not any(each.severity == "problem" for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        waits = [asdict(each) | ({"hard_limit_s": None} if isinf(each.hard_limit_s) else {}) for each in self.waits]
        return asdict(self) | {"is_healthy": self.is_healthy, "waits": waits}


def examine(run: RunDirectory, *, verify: bool = False, most_bytes: int | None = None) -> Diagnosis:
    """``verify`` compares the contents of all checkpoints, which reads them completely, whatever their size. Otherwise
    this is done if they have at most ``most_bytes`` in total (None: 8 GiB)."""
    evidence = gather(run, verify=verify, most_bytes=most_bytes)
    life = life_of(evidence)
    status = evidence.status
    return Diagnosis(
        run=str(run.path),
        life=life,
        step=evidence.step,
        total_steps=evidence.total_steps,
        version=status.version if status else None,
        num_ranks=status.num_ranks if status else 1,
        ranks=_ranks(status) if status else (),
        learner_failure=status.learner_failure if status else "",
        servers=status.servers if status else (),
        last_metrics=_last_metrics(evidence),
        step_s=evidence.step_s(),
        earlier_step_s=evidence.earlier_step_s(),
        stage=status.stage if status else None,
        waits=tuple(current_waits(evidence, life)),
        oldest_groups=status.oldest_groups if status and life.state not in ("finished", "interrupted") else (),
        episodes=status.episodes if status and life.state not in ("finished", "interrupted") else {},
        capacity=status.capacity if status and not life.is_over else None,
        ledger=LedgerReport(counts, missing_from(counts)) if (counts := evidence.counts) else None,
        drops={kind.value: each.count for kind, each in status.drops.items()} if status else {},
        num_left_out=round(evidence.train_metrics[-1].get("prompts/left_out", 0)) if evidence.train_metrics else 0,
        findings=tuple(findings(evidence, life)),
        error=status.error if status else "",
        log=status.log if status else (),
        checkpoint_steps=evidence.checkpoint_steps,
        damaged_steps=tuple(sorted(evidence.checkpoint_damage)),
        is_verified=evidence.is_verified,
        resume=_resume(evidence, life),
    )


def _ranks(status: RunStatus) -> tuple[RankStatus, ...]:
    is_alone = [(each.host, each.pid) for each in status.ranks] == [(status.host, status.pid)]
    return () if is_alone else tuple(_until_end(each, status) for each in status.ranks)


def _until_end(rank: RankStatus, status: RunStatus) -> RankStatus:
    """With the time in which the run has ended after the rank."""
    if rank.alive_at is None or status.state == "running":
        return rank
    return replace(rank, state=f"{rank.state}; the run ended at most {status.time - rank.alive_at:.1f} s later")


def _resume(evidence: Evidence, life: Life) -> str:
    if life.state not in ("killed", "failed", "interrupted", "unknown") or evidence.is_complete:
        return ""
    steps, whole = evidence.checkpoint_steps, evidence.newest_whole
    if (steps and whole is None) or evidence.reference_damage:
        return ""  # a resume would be refused
    from_step = f" --step {whole}" if steps and whole != steps[-1] else ""
    return f"headwater train --resume {evidence.run.path}{from_step}"


def _last_metrics(evidence: Evidence) -> LastMetrics | None:
    if not evidence.metrics:
        return None
    last = evidence.metrics[-1]
    time, reward = (value if isinstance(value, (int, float)) else None for value in map(last.get, ("time", _REWARD)))
    return LastMetrics(last["kind"], last["step"], None if time is None else evidence.now - time, reward)
