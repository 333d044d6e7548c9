"""Findings about a run: problems and hints, each with a kind, the evidence and a remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headwater.core.disk import mount_of, show_bytes
from headwater.core.drops import DropKind
from headwater.core.waits import OpenWait
from headwater.observe.evidence import Evidence, Life, show_duration
from headwater.observe.status_file import Drops, RunningGroup

_GIB = 2**30
_LOW_DISK_BYTES = 2 * _GIB
_FEW_DROPS = 0.02
_MANY_DROPS = 0.3

FindingKind = Literal[
    "damaged_file",
    "damaged_checkpoint",
    "skipped",
    "killed",
    "failed",
    "unresponsive",
    "unknown_state",
    "ledger_unbalanced",
    "long_wait",
    "long_step",
    "drops",
    "reward_failures",
    "engine_restarts",
    "server_lost",
    "slower_steps",
    "learner_waits",
    "generation_ahead",
    "low_disk",
    "no_effect",
]


@dataclass(frozen=True)
class Finding:
    kind: FindingKind
    severity: Literal["problem", "hint"]
    """A problem is an error; a hint is a possible improvement."""
    what: str
    """The evidence, in words."""
    remedy: str = ""


def findings(evidence: Evidence, life: Life) -> list[Finding]:
    """Problems first."""
    waits, disk = list(_of_waits(evidence, life)), list(_of_disk(evidence, life))
    found = [
        *_of_damage(evidence),
        *_of_checkpoints(evidence),
        *disk,
        *_of_life(evidence, life),
        *_of_ledger(evidence),
        *(waits or _of_long_step(evidence, life)),
        *_of_drops(evidence),
        *_of_rewards(evidence),
        *_of_engine(evidence),
        *_of_balance(evidence, life),
        *_of_notices(evidence),
        *(Finding("skipped", "hint", text) for text in evidence.skipped),
    ]
    return sorted(found, key=lambda each: each.severity != "problem")


def _of_damage(evidence: Evidence) -> Iterator[Finding]:
    for text in evidence.damage:
        remedy = "a full disk or a manual edit is the usual cause; the run's other files are still used"
        yield Finding("damaged_file", "problem", text, remedy)


def _of_checkpoints(evidence: Evidence) -> Iterator[Finding]:
    whole = evidence.newest_whole
    older = f"the newest whole checkpoint is that of step {whole}" if whole is not None else "no checkpoint is whole"
    for step, damage in sorted(evidence.checkpoint_damage.items(), reverse=True):
        more = f" (and {len(damage) - 1} more files)" if len(damage) > 1 else ""
        remedy = f"restore its files, or remove it; {older}"
        yield Finding("damaged_checkpoint", "problem", f"the checkpoint of step {step}: {damage[0]}{more}", remedy)
    if evidence.reference_damage:
        remedy = "restore its files; the run cannot be resumed without it"
        yield Finding("damaged_checkpoint", "problem", f"the reference model: {evidence.reference_damage[0]}", remedy)


def _of_life(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if life.state == "killed":
        memory = "`dmesg | grep -i oom` or the scheduler's log shows what killed it; lack of memory is the usual cause"
        disk = "the disk is full, and a run that cannot write ends; free disk space, then resume"
        what = "the run was killed: its process ended without reporting an end"
        yield Finding("killed", "problem", what, disk if _lacks_disk(evidence) else memory)
    elif life.state == "failed":
        is_disk = evidence.status is not None and evidence.status.failure == "disk_full"
        remedy = "free disk space, then resume" if is_disk else "fix the cause, then resume"
        yield Finding("failed", "problem", f"the run failed: {life.text}", remedy)
    elif life.state == "unresponsive":
        yield Finding(
            "unresponsive",
            "problem",
            f"no heartbeat: {life.text}",
            "the process is suspended, swapping, or waiting for a device or file system; `py-spy dump` shows where",
        )
    elif life.state == "unknown":
        yield Finding("unknown_state", "problem", life.text, "if the process no longer runs, resume")


def _of_ledger(evidence: Evidence) -> Iterator[Finding]:
    """Check both the current counts and the last line on disk."""
    status = evidence.status
    for where, counts in (
        ("ledger.jsonl", evidence.ledger.counts if evidence.ledger else None),
        ("status.json", status.counts if status else None),
    ):
        if counts is not None and (missing := missing_from(counts)):
            yield Finding(
                "ledger_unbalanced",
                "problem",
                f"the ledger does not balance in {where}: {abs(missing)} dispatched prompts "
                + ("are neither trained, dropped, buffered nor in flight" if missing > 0 else "are counted twice"),
                "this is a bug: please report it, with ledger.jsonl; do not rely on the data order of this run",
            )


def missing_from(counts: Mapping[str, int]) -> int:
    """Dispatches that the ledger has lost; negative if some are counted twice."""
    return counts["dispatched"] - sum(counts[name] for name in ("trained", "dropped", "buffered", "in_flight"))


# Waits

WAIT_REMEDIES = {
    "batch": "generation is slower than the learner: lower rollout.max_new_tokens, raise engine.max_sequences or "
    "rollout.max_concurrent_groups, or let generation run further ahead with rollout.max_staleness",
    "rollouts": "an evaluation or a probe of the warm start is running: lower eval.num_prompts, or wait",
    "weights": "the engine loads new weights between two of its rounds; with engine.update_mode=drain it first "
    "finishes all running requests, with interrupt it does not; if the engine hangs, stop the process and resume",
    "server_reached": "a server of rollout.servers does not answer: look at its log and at the network, or start it "
    "again at the same address",
    "router": "no server takes the request: all are unreachable, full or without the newest weights; look at the list "
    "of servers above",
    "newer_weights": "an episode never goes back to older weights, and the servers that have newer ones are lost or "
    "full: look at the versions in the list of servers above",
    "ray": "the Ray cluster has no room yet: `ray status` shows what is free; start the missing nodes, or lower the "
    "numbers of cluster.learner and cluster.rollout",
    "engine_start": "the engine is loading its model: if that never ends, lack of memory is the usual cause "
    "(engine.memory_fraction, engine.kv_cache_gib); the engine's output says more",
    "engine_call": "the engine's process does not answer: it is being restarted, or a long round keeps it busy; with "
    "engine.update_mode=drain it first finishes all running requests",
    "ranks": "the ranks execute one call together, and an update of a large batch may take long; if it never ends, the "
    "output of the other ranks says more; learner.rank_timeout_s limits a call",
    "checkpoint": "a checkpoint is copied or written, and the disk is slow or busy; trainer.checkpoint_every_steps "
    "makes checkpoints rarer",
    "records": "the records of earlier steps are being written, and the disk is slow or busy; "
    "trainer.save_rollouts_every_steps makes rollout files rarer",
    "reward": "scores that the step needs are not there yet: a slow reward function or judge keeps it waiting; "
    "reward.timeout_s limits one call, and reward.workers runs more of them at the same time",
    "generation": "the engine generates for a call from Python; fewer prompts or tokens at a time take less",
    "run_lock": "another machine held this run; if its process has ended, the run continues after a minute",
    "first_requests": "the first requests of a batch enter the engine together, and an episode has not sent its own "
    "yet: a workflow that computes before its first request should do so quickly, or in asyncio.to_thread",
    "data_future": "a DataProtoFuture waits for the worker that computes its rows: the worker's output says more, and "
    "timeout_s of DataProtoFuture.get allows more time",
    "agent_start": "the file of rollout.workflow_args.agent is being imported: import its packages by hand to see what "
    "takes so long",
    "agent_finish": "with rollout.workflow_args.wait_for_finish, an episode ends when its agent posts to "
    "{base_url}/finish, and the agent has not done so yet; rollout.workflow_args.timeout_s limits the wait",
    "rollout_thread": "an episode blocks the thread that runs all episodes: run slow code of a workflow, tool or "
    "reward in asyncio.to_thread",
    "tools": "tools are checked before the run starts, and a service or MCP server that they need does "
    "not answer; its own output says more",
    "sandbox": "programs of the model wait for their turn: raise sandbox.max_concurrent if cores are free, or lower "
    "sandbox.timeout_s and sandbox.cpu_s",
}
"""By the ``kind`` of a wait (core/waits.py)."""


def _of_waits(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if evidence.status is None or life.state in ("finished", "interrupted"):
        return
    for wait in current_waits(evidence, life):
        severity = _severity(wait, evidence.step_s())
        if severity is not None:
            verb = "waited" if life.is_over else "has waited"
            what = f"{wait.kind}: {wait.thread_name} {verb} {show_duration(wait.seconds)}"
            yield Finding("long_wait", severity, what, _remedy_for(wait, evidence))


def _of_long_step(evidence: Evidence, life: Life) -> Iterator[Finding]:
    """A step that takes far longer than usual, although no single wait is long: every group that arrives ends one."""
    last, usual_s, waits = evidence.last_metrics_time, evidence.step_s(), current_waits(evidence, life)
    is_evaluating = any(each.kind == "rollouts" for each in waits)
    if life.state != "running" or last is None or usual_s is None or is_evaluating:
        return
    silent_s = evidence.now - last
    if silent_s > max(30.0, 10 * usual_s):
        yield Finding(
            "long_step",
            "problem" if silent_s > max(300.0, 20 * usual_s) else "hint",
            f"no step has ended for {show_duration(silent_s)}; the last ones took {show_duration(usual_s)} each",
            next((remedy for each in waits if (remedy := _remedy_for(each, evidence))), "")
            or "no thread is waiting, so the process is computing: `py-spy dump` shows what",
        )


def current_waits(evidence: Evidence, life: Life) -> list[OpenWait]:
    """The waits of the last status. If heartbeats are missing, the waits are assumed to have continued since then."""
    if evidence.status is None:
        return []
    since_s = evidence.now - evidence.status.time if life.state == "unresponsive" else 0.0
    return [
        OpenWait(each.kind, each.description, each.seconds + since_s, each.hard_limit_s, each.thread_name)
        for each in evidence.status.waits
    ]


def _severity(wait: OpenWait, usual_step_s: float | None) -> Literal["problem", "hint"] | None:
    if math.isinf(wait.hard_limit_s):
        return None  # it has no limit
    is_unusual = usual_step_s is not None and wait.seconds > max(120.0, 10 * usual_step_s)
    # Evaluations are rare and long, so they are not compared with the duration of a step.
    if wait.seconds >= 0.5 * wait.hard_limit_s or (is_unusual and wait.kind != "rollouts"):
        return "problem"
    return "hint" if wait.seconds > 60 else None


def _remedy_for(wait: OpenWait, evidence: Evidence) -> str:
    """By the state of the rollouts, otherwise by the kind of the wait; empty if no remedy is known."""
    usual = WAIT_REMEDIES.get(wait.kind, "")
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
            "no group is running and none may start, because the buffered groups are too far ahead; raise "
            "rollout.max_staleness or rollout.max_concurrent_groups, and please report it, with status.json"
        )
    return "no group is running although there is capacity: data.train has no more prompts, or rollouts are paused"


def _why_groups_are_slow(evidence: Evidence) -> str:
    oldest = evidence.status.oldest_groups if evidence.status else ()
    if not oldest or not all(_waits_outside(each) for each in oldest):
        return ""
    busy = {stage for group in oldest for stage in ("calling_tools", "scoring", "working") if group.stages.get(stage)}
    if busy == {"calling_tools"}:
        return (
            "the oldest groups wait for a tool, not for the engine: make it faster or raise tools.max_concurrent; "
            "lower tools.timeout_s so that a call that hangs fails"
        )
    what = "a reward" if busy == {"scoring"} else "a reward or a tool"
    return (
        f"the oldest groups wait for {what}, not for the engine: make it faster or raise its concurrency; lower "
        "reward.timeout_s so that a call that hangs fails; see reward.manager"
    )


def _waits_outside(group: RunningGroup) -> bool:
    stages = group.stages
    is_waiting = stages.get("calling_tools", 0) + stages.get("scoring", 0) + stages.get("working", 0) > 0
    return is_waiting and stages.get("generating", 0) == 0


# Drops

DROP_REMEDIES = {
    DropKind.FAILED: "the message names the cause; run the workflow on that row by itself",
    DropKind.INVALID: "the workflow returns something that cannot be trained on; the message says what to correct",
    DropKind.ENGINE_FAILED: "the engine fails on these requests; see the last log lines",
    DropKind.AGENT_FAILED: "the message has the agent's own error; run the agent on that row against headwater serve",
    DropKind.AGENT_TIMED_OUT: "raise rollout.workflow_args.timeout_s, or make the agent give up earlier",
    DropKind.REWARD_FAILED: "call the reward function on that row by itself: it raises or returns no number",
    DropKind.REWARD_TIMED_OUT: "make the reward faster, or raise reward.timeout_s",
    DropKind.TIMED_OUT: "raise rollout.episode_timeout_s, or make rewards, tools and responses shorter",
    DropKind.REJECTED: "the workflow returns None for these: check its conditions",
    DropKind.REFUSED: "rollout.should_accept returns false for them: check its condition, or change the prompts",
    DropKind.FILTERED: "the prompts have become too easy or too hard: change their difficulty, or turn the filter off",
    DropKind.STALE: "use rollout.on_stale=mask, raise rollout.max_staleness, or lower rollout.max_new_tokens",
}


def _of_drops(evidence: Evidence) -> Iterator[Finding]:
    drops, num_trained, span = _recent_drops(evidence)
    num_dropped = sum(each.count for each in drops.values())
    for kind, each in sorted(drops.items(), key=lambda item: -item[1].count)[:3]:
        share = each.count / max(1, num_trained + num_dropped)
        if share > _FEW_DROPS:
            yield Finding(
                "drops",
                "problem" if kind.is_failure and share >= _MANY_DROPS else "hint",
                f"{each.count} groups ({share:.0%}) were dropped {span} ({kind.value}), for example: {each.message}",
                DROP_REMEDIES[kind],
            )


def _recent_drops(evidence: Evidence) -> tuple[Mapping[DropKind, Drops], int, str]:
    """Drops of the last steps if the ledger has them, otherwise of the whole run."""
    if evidence.ledger is not None and evidence.ledger.num_trained:
        return evidence.ledger.drops, evidence.ledger.num_trained, "in the last steps"
    if evidence.status is not None and evidence.counts is not None:
        return evidence.status.drops, evidence.counts["trained"], "so far"
    return {}, 0, ""


REWARD_REMEDIES = {
    "raised": "call the reward function on that row by itself; the message names the line",
    "timed_out": "make the reward faster, or raise reward.timeout_s",
    "worker_died": "the function ends its process: a crash in native code, os._exit, or too little memory",
    "bad_value": "return a finite number, or a dict with one under 'score'",
    "judge_unavailable": "check the judge's server and its limits; lower reward.max_concurrent, or raise max_attempts",
    "judge_nonsense": "make the judge's prompt ask for the format that score_pattern or score_key reads",
}
"""By the cause of a failed scoring call; the message says all there is to know about other causes."""


def _of_rewards(evidence: Evidence) -> Iterator[Finding]:
    failures = evidence.status.reward_failures if evidence.status else {}
    for cause, each in sorted(failures.items(), key=lambda item: -item[1].count)[:3]:
        calls = "1 scoring call" if each.count == 1 else f"{each.count} scoring calls"
        what = f"{calls} failed so far ({cause}), for example: {each.message}"
        yield Finding("reward_failures", "hint", what, REWARD_REMEDIES.get(cause, ""))


# Engine, balance and disk


def _of_engine(evidence: Evidence) -> Iterator[Finding]:
    for server in evidence.status.servers if evidence.status and evidence.status.state == "running" else ():
        if not server.is_alive:
            yield Finding(
                "server_lost",
                "problem",
                f"server {server.name} generates nothing: {server.state}",
                "start it again at the same address; it then gets the newest weights and its share of the requests. "
                "The other servers continue meanwhile",
            )
    restarts = evidence.status.engine_restarts if evidence.status else 0
    if restarts:
        times = "once" if restarts == 1 else f"{restarts} times"
        yield Finding(
            "engine_restarts",
            "problem" if restarts >= 3 else "hint",
            f"the engine was restarted {times}",
            f"the warnings in {evidence.run.status_file} say how each process ended. SIGKILL: a person, a scheduler or "
            "the out-of-memory killer (`dmesg | grep -i oom`) ended it; for lack of memory, lower "
            "engine.memory_fraction, engine.kv_cache_gib or engine.max_sequences. Another signal or an exit status: an "
            "error in the engine",
        )


def _of_balance(evidence: Evidence, life: Life) -> Iterator[Finding]:
    """Whether the learner or generation is the bottleneck, from the last steps."""
    usual_s, earlier_s = evidence.step_s(), evidence.earlier_step_s()
    if usual_s is not None and earlier_s is not None and usual_s > 1.5 * earlier_s:
        yield Finding(
            "slower_steps",
            "hint",
            f"steps have become slower: {show_duration(earlier_s)} before, {show_duration(usual_s)} now",
            "growing responses are the usual cause (response_length/mean in metrics.jsonl)",
        )
    if life.state != "running" or evidence.config is None:
        return
    waiting, settings = evidence.share("wait"), evidence.config.rollout
    if waiting is not None and waiting > 0.5:
        yield Finding(
            "learner_waits",
            "hint",
            f"the learner waits for rollouts {waiting:.0%} of the time",
            "raise rollout.max_staleness, so that generation continues during training, or engine.max_sequences"
            if settings.max_staleness < 2
            else "speed up generation: engine.max_sequences, rollout.max_concurrent_groups, shorter responses",
        )
    batch = evidence.config.trainer.num_prompts_per_step
    num_buffered = evidence.counts["buffered"] if evidence.counts else 0
    is_full = evidence.counts is not None and num_buffered >= settings.max_staleness * batch
    if settings.max_staleness > 0 and is_full and waiting is not None and waiting < 0.05:
        yield Finding(
            "generation_ahead",
            "hint",
            f"generation is ahead: {num_buffered} groups wait for the learner",
            "the learner is the bottleneck; a lower rollout.max_staleness would be as fast, with fresher samples",
        )


def _of_notices(evidence: Evidence) -> Iterator[Finding]:
    for text in evidence.status.notices if evidence.status else ():
        yield Finding("no_effect", "hint", text, "")


def _lacks_disk(evidence: Evidence) -> bool:
    """Whether there is no space for another checkpoint."""
    return evidence.free_bytes < max(_GIB // 4, evidence.checkpoint_bytes)


def _of_disk(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if life.state == "finished":
        return
    needed = max(_LOW_DISK_BYTES, 2 * evidence.checkpoint_bytes)
    if evidence.free_bytes < needed:
        yield Finding(
            "low_disk",
            "problem" if _lacks_disk(evidence) else "hint",
            f"{show_bytes(evidence.free_bytes)} are left on the disk of {evidence.run.path}, mounted at "
            f"{mount_of(evidence.run.path)}; a checkpoint takes {show_bytes(evidence.checkpoint_bytes)}",
            "free disk space, or write less: trainer.keep_checkpoints, trainer.checkpoint_dtype, "
            "trainer.checkpoint_optimizer, trainer.save_rollouts_every_steps",
        )
