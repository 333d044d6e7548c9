"""Findings about waits and long steps: which are unusual, and what to do about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from headwater.core.waits import OpenWait
from headwater.observe.evidence import Evidence, Life, show_duration
from headwater.observe.finding import Finding
from headwater.observe.status_file import RunningGroup

_OUTSIDE = ("calling_tools", "reading_media", "scoring", "working")
"""Stages of episodes that need neither the engine nor the learner."""

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


def of_waits(evidence: Evidence, life: Life) -> Iterator[Finding]:
    if evidence.status is None or life.state in ("finished", "interrupted"):
        return
    for wait in current_waits(evidence, life):
        severity = _severity(wait, evidence.step_s())
        if severity is not None:
            verb = "waited" if life.is_over else "has waited"
            what = f"{wait.kind}: {wait.thread_name} {verb} {show_duration(wait.seconds)}"
            yield Finding("long_wait", severity, what, _remedy_for(wait, evidence))


def of_long_step(evidence: Evidence, life: Life) -> Iterator[Finding]:
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
    busy = {stage for group in oldest for stage in _OUTSIDE if group.stages.get(stage)}
    if busy == {"calling_tools"}:
        return (
            "the oldest groups wait for a tool, not for the engine: make it faster or raise tools.max_concurrent; "
            "lower tools.timeout_s so that a call that hangs fails"
        )
    if busy == {"reading_media"}:
        return (
            "the oldest groups wait for images or videos to be read, not for the engine: make the files smaller, or "
            "put them on a faster disk"
        )
    what = "a reward" if busy == {"scoring"} else "a reward or a tool"
    return (
        f"the oldest groups wait for {what}, not for the engine: make it faster or raise its concurrency; lower "
        "reward.timeout_s so that a call that hangs fails; see reward.manager"
    )


def _waits_outside(group: RunningGroup) -> bool:
    stages = group.stages
    is_waiting = any(stages.get(stage, 0) > 0 for stage in _OUTSIDE)
    return is_waiting and stages.get("generating", 0) == 0
