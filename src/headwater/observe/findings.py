"""Findings about a run: problems and hints, each with a kind, the evidence and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headwater.core.disk import mount_of, show_bytes
from headwater.core.records import DropKind
from headwater.observe.evidence import Evidence, Life, show_duration
from headwater.observe.finding import Finding
from headwater.observe.status_file import Drops
from headwater.observe.wait_findings import of_long_step, of_waits

_GIB = 2**30
_LOW_DISK_BYTES = 2 * _GIB
_FEW_DROPS = 0.02
_MANY_DROPS = 0.3


def findings(evidence: Evidence, life: Life) -> list[Finding]:
    """Problems first."""
    waits, disk = list(of_waits(evidence, life)), list(_of_disk(evidence, life))
    found = [
        *_of_damage(evidence),
        *_of_checkpoints(evidence),
        *disk,
        *_of_life(evidence, life),
        *_of_ledger(evidence),
        *(waits or of_long_step(evidence, life)),
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
    older = f"the newest intact checkpoint is that of step {whole}" if whole is not None else "no checkpoint is intact"
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
    DropKind.UNREADABLE_ROW: "the message names the row and the column: fix the file, or remove the row",
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
                "The other servers continue meanwhile. If it will not come back: "
                f"headwater servers {evidence.run.path} remove {server.name}",
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
