"""Whether a run is alive, and how it ended if it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.observe.evidence import Evidence

_SILENT_S = 30.0
"""A live process writes its status every two seconds. On a machine under load, a write may be late."""

_OLD_S = 600.0

LifeState = Literal["running", "unresponsive", "killed", "finished", "interrupted", "failed", "unknown"]


@dataclass(frozen=True)
class Life:
    state: LifeState
    text: str
    """For people: the observation behind ``state``."""

    @property
    def is_over(self) -> bool:
        return self.state in ("killed", "finished", "interrupted", "failed")


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
