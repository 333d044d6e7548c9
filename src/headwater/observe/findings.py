"""What is wrong with a run, or could be better: each finding with a remedy."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headwater.core.waits import OpenWait
from headwater.observe.duration import show_duration
from headwater.observe.evidence import Evidence
from headwater.observe.life import Life
from headwater.observe.remedies import remedy_for, remedy_for_drop

_GIB = 2**30
_LOW_DISK_BYTES = 2 * _GIB
_FEW_DROPS = 0.02
_MANY_DROPS = 0.3
_FILTERED = "algorithm.filter_groups"


@dataclass(frozen=True)
class Finding:
    severity: Literal["problem", "hint"]
    """A problem is something wrong; a hint is something that could be better."""
    what: str
    remedy: str = ""


def findings(evidence: Evidence, life: Life) -> list[Finding]:
    """Problems first."""
    waits = list(_of_waits(evidence, life))
    found = [
        *_of_damage(evidence),
        *_of_life(life),
        *_of_ledger(evidence),
        *(waits or _of_silence(evidence, life)),
        *_of_drops(evidence),
        *_of_engine(evidence),
        *_of_balance(evidence, life),
        *_of_disk(evidence, life),
    ]
    return sorted(found, key=lambda each: each.severity != "problem")


def _of_damage(evidence: Evidence) -> Iterator[Finding]:
    for text in evidence.damage:
        yield Finding(
            "problem", text, "a full disk or an edit by hand may have done it; the run's other files still count"
        )


def _of_life(life: Life) -> Iterator[Finding]:
    if life.state == "killed":
        yield Finding(
            "problem",
            "the run did not end by itself: it was killed",
            "`dmesg | grep -i oom` or the scheduler's log says by whom; memory is the usual cause",
        )
    elif life.state == "failed":
        yield Finding("problem", f"the run failed: {life.text}", "mend the cause, then resume")
    elif life.state == "unresponsive":
        yield Finding(
            "problem",
            f"no sign of life: {life.text}",
            "a process that is suspended, swaps, or waits for a hung device or file system; `py-spy dump` shows where",
        )
    elif life.state == "unknown":
        yield Finding("problem", life.text, "if nothing runs any more, resume")


def _of_ledger(evidence: Evidence) -> Iterator[Finding]:
    """Both books count: what the run says now, and the last line on disk."""
    status = evidence.status
    for where, counts in (
        ("ledger.jsonl", evidence.ledger.counts if evidence.ledger else None),
        ("status.json", status.counts if status else None),
    ):
        if counts is not None and (missing := missing_from(counts)):
            yield Finding(
                "problem",
                f"the ledger does not balance in {where}: {abs(missing)} dispatched prompts "
                + ("are neither trained, dropped, buffered nor in flight" if missing > 0 else "are counted twice"),
                "this is a bug: please report it, with ledger.jsonl; do not trust this run's data order",
            )


def missing_from(counts: Mapping[str, int]) -> int:
    """Dispatches that the ledger has lost; negative where some are counted twice."""
    return counts["dispatched"] - sum(counts[name] for name in ("trained", "dropped", "buffered", "in_flight"))


def _of_waits(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if evidence.status is None or life.state in ("finished", "interrupted"):
        return
    for wait in current_waits(evidence, life):
        severity = _severity(wait, evidence.step_s())
        if severity is not None:
            did = "waited" if life.is_over else "has waited"
            what = f"{wait.kind}: {wait.thread_name} {did} {show_duration(wait.seconds)}"
            yield Finding(severity, what, remedy_for(wait, evidence))


def _of_silence(evidence: Evidence, life: Life) -> Iterator[Finding]:
    """A step that takes far longer than usual. No single wait need be long: each group that arrives ends one."""
    last, usual_s, waits = evidence.last_metrics_time, evidence.step_s(), current_waits(evidence, life)
    is_evaluating = any(each.kind == "rollouts" for each in waits)
    if life.state != "running" or last is None or usual_s is None or is_evaluating:
        return
    silent_s = evidence.now - last
    if silent_s > max(30.0, 10 * usual_s):
        yield Finding(
            "problem" if silent_s > max(300.0, 20 * usual_s) else "hint",
            f"no step has ended for {show_duration(silent_s)}; the last ones took {show_duration(usual_s)} each",
            next((remedy for each in waits if (remedy := remedy_for(each, evidence))), "")
            or "nobody waits, so something computes: `py-spy dump` shows what",
        )


def current_waits(evidence: Evidence, life: Life) -> list[OpenWait]:
    """The waits of the last status. Where no heartbeat came since, though there should have, they have gone on."""
    if evidence.status is None:
        return []
    since_s = evidence.now - evidence.status.time if life.state == "unresponsive" else 0.0
    return [
        OpenWait(each.kind, each.description, each.seconds + since_s, each.hard_limit_s, each.thread_name)
        for each in evidence.status.waits
    ]


def _severity(wait: OpenWait, usual_step_s: float | None) -> Literal["problem", "hint"] | None:
    if math.isinf(wait.hard_limit_s):
        return None  # it may last as long as it likes
    is_unusual = usual_step_s is not None and wait.seconds > max(120.0, 10 * usual_step_s)
    # Evaluations are rare and long; the length of a step says nothing about them.
    if wait.seconds >= 0.5 * wait.hard_limit_s or (is_unusual and wait.kind != "rollouts"):
        return "problem"
    return "hint" if wait.seconds > 60 else None


def _of_drops(evidence: Evidence) -> Iterator[Finding]:
    reasons, num_trained, span = _recent_drops(evidence)
    for reason, count in alike(reasons).most_common(3):
        share = count / max(1, num_trained + sum(reasons.values()))
        if share > _FEW_DROPS:
            is_failure = not any(wanted in reason for wanted in (_FILTERED, "rollout.max_staleness"))
            severity: Literal["problem", "hint"] = "problem" if is_failure and share >= _MANY_DROPS else "hint"
            yield Finding(
                severity, f"{count} groups ({share:.0%}) were dropped {span}: {reason}", remedy_for_drop(reason)
            )


def _recent_drops(evidence: Evidence) -> tuple[Mapping[str, int], int, str]:
    """Of the last steps where the ledger tells them; else of the whole run."""
    if evidence.ledger is not None and evidence.ledger.num_trained:
        return evidence.ledger.reasons, evidence.ledger.num_trained, "in the last steps"
    if evidence.status is not None and evidence.status.drop_reasons and evidence.counts is not None:
        return evidence.status.drop_reasons, evidence.counts["trained"], "so far"
    return {}, 0, ""


def alike(reasons: Mapping[str, int]) -> Counter[str]:
    """Reasons that differ only in their row or numbers, counted together under the most frequent of them."""
    name_of: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        pattern = re.sub(r"\d+", "#", re.sub(r"\brow \S+", "row", reason))
        counted[name_of.setdefault(pattern, reason)] += count
    return counted


def _of_engine(evidence: Evidence) -> Iterator[Finding]:
    restarts = evidence.status.engine_restarts if evidence.status else 0
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        yield Finding(
            "problem" if restarts >= 3 else "hint",
            f"the engine was restarted {times}",
            f"the warnings in {evidence.run.status_file} say how each process ended. By SIGKILL: a person or a "
            "scheduler killed it, or the system for want of memory (`dmesg | grep -i oom`); then lower "
            "engine.memory_fraction, engine.kv_cache_gib or engine.max_sequences. By another signal or "
            "an exit status: an error of its own",
        )


def _of_balance(evidence: Evidence, life: Life) -> Iterator[Finding]:
    """Who waits for whom, where the last steps show it."""
    usual_s, earlier_s = evidence.step_s(), evidence.earlier_step_s()
    if usual_s is not None and earlier_s is not None and usual_s > 1.5 * earlier_s:
        yield Finding(
            "hint",
            f"steps have become slower: {show_duration(earlier_s)} before, now {show_duration(usual_s)}",
            "responses that grow are the usual cause (response_length/mean in metrics.jsonl)",
        )
    if life.state != "running" or evidence.config is None:
        return
    waiting, settings = evidence.share("wait"), evidence.config.rollout
    if waiting is not None and waiting > 0.5:
        yield Finding(
            "hint",
            f"the learner waits for rollouts {waiting:.0%} of the time",
            "raise rollout.max_staleness, so that generation goes on while it trains, or engine.max_sequences"
            if settings.max_staleness < 2
            else "give generation more: engine.max_sequences, rollout.max_concurrent_groups, shorter responses",
        )
    batch = evidence.config.trainer.num_prompts_per_step
    is_full = evidence.counts is not None and evidence.counts["buffered"] >= settings.max_staleness * batch
    if settings.max_staleness > 0 and is_full and waiting is not None and waiting < 0.05:
        yield Finding(
            "hint",
            f"generation is ahead: {evidence.counts['buffered'] if evidence.counts else 0} groups wait for the learner",
            "the learner sets the pace, and a lower rollout.max_staleness would be as fast, on fresher samples",
        )


def _of_disk(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if life.state == "finished":
        return
    needed = max(_LOW_DISK_BYTES, 2 * evidence.checkpoint_bytes)
    if evidence.free_bytes < needed:
        yield Finding(
            "problem" if evidence.free_bytes < max(_GIB // 4, evidence.checkpoint_bytes) else "hint",
            f"{evidence.free_bytes / _GIB:.1f} GiB are left on the disk of {evidence.run.path}; a checkpoint takes "
            f"{evidence.checkpoint_bytes / _GIB:.1f} GiB",
            "make room, or lower trainer.keep_checkpoints and raise trainer.save_rollouts_every_steps",
        )
