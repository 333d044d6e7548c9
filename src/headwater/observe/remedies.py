"""What usually helps, by the kind of a wait, by what the rollouts do, and by the reason of a drop."""

from __future__ import annotations

from headwater.core.waits import OpenWait
from headwater.observe.evidence import Evidence

_BY_KIND = {
    "batch": "generation is slower than the learner: lower rollout.max_new_tokens, raise engine.max_sequences or "
    "rollout.max_concurrent_groups, or let generation run further ahead with rollout.max_staleness",
    "rollouts": "held-out or probing prompts are being answered: lower eval.num_prompts, or wait",
    "weights": "the engine takes new weights between two of its rounds; with engine.update_mode=drain it first ends "
    "what runs, with interrupt it does not; if the engine itself hangs, end the process and resume",
    "engine_start": "the engine loads its model: if that never ends, memory is the usual cause "
    "(engine.memory_fraction, engine.kv_cache_gib); its own output says more",
    "engine_call": "the engine's process does not answer: it is being restarted, or a long round keeps it busy; with "
    "engine.update_mode=drain it first ends what runs",
    "rollout_thread": "an episode blocks the thread of all episodes: a workflow, tool or reward that computes for long "
    "belongs in asyncio.to_thread",
}

_BY_REASON = (
    (
        "algorithm.filter_groups",
        "their prompts are too easy or too hard by now: change the task's level, or turn the filter off",
    ),
    ("episode_timeout_s", "raise rollout.episode_timeout_s, or make rewards, tools and responses shorter"),
    (
        "rollout.max_staleness",
        "use rollout.on_stale=mask, raise rollout.max_staleness, or lower rollout.max_new_tokens",
    ),
    ("reward.timeout_s", "make the reward faster, or raise reward.timeout_s"),
    ("reward", "call the reward function on such a row by hand: it raises or returns no number"),
    ("rejected by the workflow", "the workflow returns None for these: see its conditions"),
    ("engine", "the engine fails on these requests; the last errors below may say why"),
    ("workflow", "run the workflow on such a row by hand: it raises"),
)


def remedy_for(wait: OpenWait, evidence: Evidence) -> str:
    """By what the rollouts do, else by the wait's kind; empty where nothing is known to help."""
    usual = _BY_KIND.get(wait.kind, "")
    if wait.kind == "batch":
        return _why_nothing_runs(evidence) or _why_groups_are_slow(evidence) or usual
    if wait.kind == "rollouts":
        return _why_groups_are_slow(evidence) or usual
    return usual


def _why_nothing_runs(evidence: Evidence) -> str:
    status, counts = evidence.status, evidence.counts
    if status is None or counts is None or counts["in_flight"] > 0:
        return ""
    if status.capacity is not None and status.capacity <= 0:
        return (
            "no group runs and none may start: what is buffered counts as too far ahead; raise "
            "rollout.max_staleness or rollout.max_concurrent_groups, and please report it, with status.json"
        )
    return "no group runs though there is room: there may be no more prompts (data.train), or starting was paused"


def _why_groups_are_slow(evidence: Evidence) -> str:
    oldest = evidence.status.oldest_groups if evidence.status else ()
    if oldest and all(_waits_outside(each.doing) for each in oldest):
        return (
            "the oldest groups wait for a reward or a tool, not for the engine: make it faster or let more of it run "
            "at a time; lower reward.timeout_s so that one that hangs fails; see reward.manager"
        )
    return ""


def _waits_outside(doing: str) -> bool:
    return ("reward" in doing or "tool" in doing) and "generat" not in doing


def remedy_for_drop(reason: str) -> str:
    return next((remedy for part, remedy in _BY_REASON if part in reason), "")
