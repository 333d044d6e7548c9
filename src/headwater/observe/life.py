"""Whether a run lives, and how it ended if it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.observe.duration import show_duration
from headwater.observe.evidence import Evidence

_SILENT_S = 30.0
"""A live process writes its status every two seconds; a machine under load may be late by some."""

_OLD_S = 600.0

LifeState = Literal["running", "unresponsive", "killed", "finished", "interrupted", "failed", "unknown"]


@dataclass(frozen=True)
class Life:
    state: LifeState
    text: str
    """For people: how that is known."""

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
        return Life("finished", f"ended {show_duration(age_s)} ago, all done")
    if status.state == "interrupted":
        return Life("interrupted", f"stopped by Ctrl-C or a signal {show_duration(age_s)} ago")
    if status.state.startswith("failed"):
        return Life("failed", f"{show_duration(age_s)} ago: {status.state.removeprefix('failed').removeprefix(': ')}")
    if evidence.process_is_there is False:
        return Life("killed", f"{process} is gone without a word; last {heartbeat}")
    if age_s > _SILENT_S:
        if evidence.process_is_there is None:
            return Life("unresponsive", f"{process} cannot be seen from here, and its last {heartbeat}")
        return Life("unresponsive", f"{process} exists, but its last {heartbeat}")
    return Life("running", f"{process}, {heartbeat}")


def _by_metrics(evidence: Evidence) -> Life:
    """Of a run without a status, for it is older than that or the file is damaged: what can be told all the same."""
    if evidence.total_steps is not None and evidence.step >= evidence.total_steps:
        return Life("finished", "all steps are done")
    last = evidence.last_metrics_time
    if last is None:
        return Life("unknown", "no status and no metrics: it has not begun, or ended before its first step")
    age_s = evidence.now - last
    if age_s > max(_OLD_S, 10 * (evidence.step_s() or 0.0)):
        return Life("unknown", f"no status to read, and no metrics for {show_duration(age_s)}: probably ended early")
    return Life("running", f"as it seems: no status to read, but metrics were written {show_duration(age_s)} ago")
