"""Where the dispatched groups of a run are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.core.records import DropKind
from headwater.dashboard.plain_values import finite
from headwater.dashboard.runs import Run
from headwater.observe.status_file import COUNTS

DROP_TEXTS: Mapping[str, str] = {
    DropKind.FAILED: "The workflow raised an error.",
    DropKind.INVALID: "The workflow returned something that cannot be trained on.",
    DropKind.ENGINE_FAILED: "The engine could not answer a request.",
    DropKind.AGENT_FAILED: "An agent raised, ended with an error, was killed, or never called the model.",
    DropKind.AGENT_TIMED_OUT: "An agent did not end within its time limit.",
    DropKind.REWARD_FAILED: "The reward raised an error or returned something that is not a number.",
    DropKind.REWARD_TIMED_OUT: "A reward took longer than reward.timeout_s.",
    DropKind.TIMED_OUT: "The episodes took longer than rollout.episode_timeout_s.",
    DropKind.UNREADABLE_ROW: "The row cannot be made a prompt, for example because its image is gone or damaged.",
    DropKind.REJECTED: "The workflow returned None.",
    DropKind.FILTERED: "All samples have the same reward, so there is nothing to learn (algorithm.filter_groups).",
    DropKind.REFUSED: "rollout.should_accept returned false.",
    DropKind.STALE: "Its tokens are older than rollout.max_staleness allows.",
}
_UNNAMED = "reason not recorded"


def ledger(run: Run, is_over: bool) -> dict[str, Any]:
    """What is reported as dispatched always equals the sum of the parts. While a run is live, it notes the counts and
    the reasons one after the other, so these may differ for a moment. Once it is over, a difference is a problem."""
    problems: list[str] = []
    status = run.status(problems)
    counts: dict[str, int] | None
    drops: dict[str, tuple[int, str]]
    at: float | None
    if status is not None and status.counts is not None:
        counts, source, at = dict(status.counts), "status.json", status.time
        drops = {kind.value: (each.count, each.message) for kind, each in status.drops.items()}
    else:
        counts, drops, at = _recorded_ledger(run)
        source = "ledger.jsonl" if counts else "none"
    counts = counts or dict.fromkeys(COUNTS, 0)
    parts = _divided(counts["dropped"], drops)
    counted = sum(max(0, count) for count, _ in drops.values())
    if is_over and counted != counts["dropped"]:
        problems.append(
            f"{source} has {counts['dropped']} dropped groups, but reasons for {counted}, although the run is over. "
            "The reasons shown may be incomplete."
        )
    missing = counts["dispatched"] - sum(counts[name] for name in COUNTS if name != "dispatched")
    return {
        "time": at,
        "source": source,
        **counts,
        "missing": missing,
        "drops": [
            {"kind": kind, "count": count, "text": DROP_TEXTS.get(kind, ""), "message": message}
            for kind, (count, message) in parts.items()
        ],
        "balanced": missing == 0,
        "problems": problems,
    }


def _recorded_ledger(run: Run) -> tuple[dict[str, int] | None, dict[str, tuple[int, str]], float | None]:
    """The counts of the last step, and drops of all steps, from ``ledger.jsonl``."""
    records = [each for each in run.directory.last_ledger(3) if each["kind"] == "step"]
    if not records:
        return None, {}, None
    try:
        counts = {name: int(records[-1]["counts"][name]) for name in COUNTS}
    except (KeyError, TypeError, ValueError):
        return None, {}, None
    drops: dict[str, tuple[int, str]] = {}
    if counts["dropped"]:
        for record in run.directory.read_ledger():
            for each in record.get("dropped") or ():
                kind = str(each.get("kind", _UNNAMED)) if isinstance(each, Mapping) else _UNNAMED
                message = str(each.get("message", "")) if isinstance(each, Mapping) else ""
                drops[kind] = drops.get(kind, (0, ""))[0] + 1, message
    return counts, drops, finite(records[-1].get("time"))


def _divided(dropped: int, drops: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Drops by kind whose sum is ``dropped``. A live run notes the two one after the other, so they may differ."""
    left = dropped
    parts: dict[str, tuple[int, str]] = {}
    for kind, (count, message) in sorted(drops.items(), key=lambda each: -each[1][0]):
        if taken := min(left, max(0, count)):
            parts[kind] = taken, message
            left -= taken
    if left:
        parts[_UNNAMED] = left, ""
    return parts
