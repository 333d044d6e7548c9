"""The metrics of a training step, from its rollouts, its times, the engine and memory. docs/metrics.md lists them."""

from __future__ import annotations

import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from headwater.config.schema import Config
from headwater.core.capabilities import EngineStatus
from headwater.core.errors import HeadwaterError
from headwater.core.records import NOT_SAMPLED, DropKind, Trajectory
from headwater.models.virtual_memory import mapped_bytes
from headwater.rollout.group import GroupTimes, RolloutBatch, episode_metrics, reward_metrics
from headwater.rollout.snapshot import Books

DROP_METRICS = {
    DropKind.FILTERED: "groups/filtered",
    DropKind.REFUSED: "groups/refused",
    DropKind.STALE: "staleness/dropped_groups",
} | {kind: f"groups/dropped_{kind.value}" for kind in DropKind if kind.is_failure}
"""The metric that counts the groups of a step which were dropped for a kind of reason."""

FAILED_CALLS = "reward/failed_calls"
"""The metric that counts scoring calls of a step which failed, for any cause."""

_GIB = 2**30


@dataclass(frozen=True)
class RunFacts:
    """What the metrics of a step need to know about the run."""

    max_prompt_tokens: int
    """``data.max_prompt_tokens``."""
    num_devices: int = 1
    """Devices that the run uses: those of the learner's ranks, and of servers beside them."""

    @classmethod
    def of(cls, config: Config, num_ranks: int) -> RunFacts:
        rollout = config.rollout
        launched = rollout.launch.count * rollout.launch.tensor_parallel if rollout.is_separate else 0
        return cls(config.data.max_prompt_tokens, num_ranks + (len(rollout.servers) or launched))


def step_metrics(
    batch: RolloutBatch,
    update: Mapping[str, float],
    seconds: Mapping[str, float],
    stages: Mapping[str, float],
    books: Books,
    facts: RunFacts,
) -> dict[str, float]:
    """The metrics of one training step. ``groups/dropped`` counts failures of all kinds.

    ``seconds`` are those of concurrent work; ``stages`` follow one another and add up to the time of the step.
    """
    started = asdict(books.rollouts) if books.rollouts is not None else {}
    trajectories = batch.trajectories
    of_groups = [group.episode_rewards() for group in batch.groups]
    rewards = [reward for group in of_groups for reward in group]
    drops = Counter(each.kind for each in batch.dropped)
    informative = sum(len(set(group)) > 1 for group in of_groups)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **length_metrics(trajectories, facts.max_prompt_tokens),
        **media_metrics(trajectories),
        # A group whose samples all have the same reward has no advantage, so nothing is learned from it.
        "groups/informative_fraction": informative / len(batch.groups),
        "groups/dropped": sum(count for kind, count in drops.items() if kind.is_failure),
        **{name: drops[kind] for kind, name in DROP_METRICS.items()},
        **episode_metrics(trajectories),
        **reward_metrics([(group.prompt, each) for group in batch.groups for each in group.trajectories]),
        "groups/lost_samples": sum(group.num_lost for group in batch.groups),
        "staleness/masked_tokens": batch.num_masked_tokens,
        "rollouts/buffered": books.counts.buffered,
        "rollouts/in_flight": books.counts.in_flight,
        **{f"rollouts/{name}": count for name, count in started.items()},
        **time_metrics(batch.times),
        **update,
        **{f"time/{name}_s": value for name, value in {**seconds, **stages}.items()},
        **rate_metrics(trajectories, seconds, stages, facts.num_devices),
    }


def length_metrics(trajectories: Sequence[Trajectory], max_prompt_tokens: int) -> dict[str, float]:
    """The lengths of prompts and responses, and the shares of those that reached their limit."""
    prompts = np.array([each.prompt_length for each in trajectories])
    lengths = np.array([len(each.tokens) for each in trajectories]) - prompts
    ends = Counter(each.stop_reason for each in trajectories)
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/std": float(lengths.std()),
        "response_length/min": int(lengths.min()),
        "response_length/max": int(lengths.max()),
        "response_length/clip_ratio": ends["length"] / len(trajectories),
        "response_length/aborted_ratio": ends["abort"] / len(trajectories),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/min": int(prompts.min()),
        "prompt_length/max": int(prompts.max()),
        "prompt_length/clip_ratio": float((prompts >= max_prompt_tokens).mean()),
        "stopped_fraction": ends["stop"] / len(trajectories),
    }


def media_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The images and videos of a step, each counted once, and the tokens that stand for them. Empty without any."""
    if not any(each.media for each in trajectories):
        return {}
    kinds = Counter({item.content.digest: item.content.kind for each in trajectories for item in each.media}.values())
    of_prompts, of_responses = [], []
    for each in trajectories:
        in_prompt = sum(item.num_tokens for item in each.media if item.blocks[0].start < each.prompt_length)
        of_prompts.append(in_prompt)
        of_responses.append(sum(item.num_tokens for item in each.media) - in_prompt)
    return {
        **{f"media/{kind}s": count for kind, count in sorted(kinds.items())},
        **{
            f"media/{name}_tokens_{statistic}": compute(counts)
            for name, counts in (("prompt", of_prompts), ("response", of_responses))
            if any(counts)
            for statistic, compute in (("mean", statistics.fmean), ("max", max))
        },
    }


def rate_metrics(
    trajectories: Sequence[Trajectory], seconds: Mapping[str, float], stages: Mapping[str, float], num_devices: int
) -> dict[str, float]:
    """Tokens per second, and milliseconds per token of each part of the step."""
    step_s = sum(stages.values())
    total = sum(len(each.tokens) for each in trajectories)
    generated = int(sum(np.count_nonzero(each.arrays.versions != NOT_SAMPLED) for each in trajectories))
    per_token = {"step": (step_s, total), "generate": (seconds.get("generate"), generated)}
    per_token |= {name: (stages.get(name), total) for name in ("experience", "train", "publish")}
    return {
        "time/step_s": step_s,
        **{
            f"time_per_token/{name}_ms": 1000 * value / count
            for name, (value, count) in per_token.items()
            if value is not None and count
        },
        "tokens/total": total,
        "tokens/trained": int(sum(np.count_nonzero(each.arrays.loss_mask) for each in trajectories)),
        "throughput/generated_tokens_per_s": generated / step_s,
        "throughput/tokens_per_s": total / step_s,
        "throughput/tokens_per_s_per_device": total / step_s / num_devices,
    }


def time_metrics(times: Sequence[GroupTimes]) -> dict[str, float]:
    """``time/rollout/*`` of groups and requests, ``time/episode/*`` of episodes: mean, shortest and longest."""
    values: dict[str, list[float]] = {
        "rollout/group_s": [each.total_s for each in times],
        "rollout/queue_s": [value for each in times for value in each.queue_s],
        "rollout/generate_s": [value for each in times for value in each.generate_s],
    }
    for episode in (episode for each in times for episode in each.episodes):
        for name, value in episode.items():
            values.setdefault(f"episode/{name}_s", []).append(value)
    return {
        f"time/{name}/{statistic}": compute(of)
        for name, of in values.items()
        if of
        for statistic, compute in (("mean", statistics.fmean), ("min", min), ("max", max))
    }


def shown_metrics(metrics: Mapping[str, float], drops: Mapping[str, int], num_failed_calls: int = 0) -> dict[str, str]:
    """The few metrics of the progress line. ``drops`` and failed scoring calls are those of the whole run."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in drops.items() if count)
    split = "/".join(f"{metrics.get(f'time/{name}_s', 0.0):.2f}" for name in ("generate", "reward", "train"))
    return {
        "reward": f"{metrics['reward/mean']:.3f}",
        "length": f"{metrics['response_length/mean']:.1f}",
        "tok/s": f"{metrics['throughput/generated_tokens_per_s']:.0f}",
        "gen/rew/train": f"{split} s",
        **({"dropped": f"{sum(drops.values())} groups ({kinds})"} if kinds else {}),
        **({"failed": f"{num_failed_calls} scoring calls"} if num_failed_calls else {}),
    }


class StageMemory:
    """The most memory that this process used in each stage of a step: of its GPU, and of the machine.

    ``leave`` is called whenever a stage ends or another one begins inside it.
    """

    def __init__(self) -> None:
        self._host: dict[str, int] = {}
        self._gpu: dict[str, int] = {}
        take_peak_bytes()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()

    def leave(self, stage: str) -> None:
        self._host[stage] = max(self._host.get(stage, 0), take_peak_bytes())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._gpu[stage] = max(self._gpu.get(stage, 0), torch.cuda.max_memory_allocated() + mapped_bytes())
            torch.cuda.reset_peak_memory_stats()

    def take(self) -> dict[str, float]:
        """In GiB, since the last call."""
        host, gpu, self._host, self._gpu = self._host, self._gpu, {}, {}
        metrics = {
            "memory/host_gib": resident_bytes() / _GIB,
            "memory/host_peak_gib": max(host.values(), default=0) / _GIB,
            **{f"memory/{stage}/host_gib": value / _GIB for stage, value in host.items()},
        }
        if (used := machine_bytes()) is not None:
            metrics["memory/machine_used_gib"] = used / _GIB
        if gpu:
            metrics |= {
                "memory/gpu_gib": (torch.cuda.memory_allocated() + mapped_bytes()) / _GIB,
                "memory/gpu_peak_gib": max(gpu.values()) / _GIB,
                "memory/gpu_reserved_gib": (torch.cuda.memory_reserved() + mapped_bytes()) / _GIB,
                **{f"memory/{stage}/gpu_peak_gib": value / _GIB for stage, value in gpu.items()},
            }
        return metrics


def resident_bytes() -> int:
    """Main memory of this process; 0 on systems that do not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def take_peak_bytes() -> int:
    """The most main memory of this process since the last call; what it has now on systems that do not tell."""
    try:
        status = Path("/proc/self/status").read_bytes()
        Path("/proc/self/clear_refs").write_bytes(b"5")  # forget the peak, also that of ``getrusage``
        return 1024 * int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError):
        return resident_bytes()


def machine_bytes() -> int | None:
    """Main memory of the machine that is in use; None on systems that do not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1024 * (kib["MemTotal"] - kib["MemAvailable"])


_WATCH_END_LIMIT_S = 10.0
"""How long the end of a run waits for the last look at the engine."""

_COUNTERS = {
    "generated_tokens": "num_tokens_generated",
    "prefilled_tokens": "num_tokens_prefilled",
    "cached_tokens": "num_tokens_cached",
    "preempted": "num_preempted",
    "aborted": "num_aborted",
    "failed": "num_failed",
    "media_computed": "num_media_computed",
    "media_cached": "num_media_cached",
    "media_tower_s": "media_tower_s",
    "media_wait_s": "media_wait_s",
}
"""Metrics that count since the step before, and the names of the engine's counters."""


class EngineWatch:
    """Looks at the engine several times a second while a run trains, and says what it saw in each step.

    with EngineWatch(engine.status) as watch:
        ...
        metrics = watch.take()
    """

    def __init__(self, status: Callable[[], EngineStatus], *, is_local: bool = True, every_s: float = 0.25) -> None:
        """The status of an engine that ``is_local`` needs no call to another process, so ``take`` may ask for it."""
        self._status = status
        self._is_local = is_local
        self._every_s = every_s
        self._lock = threading.Lock()
        self._seen: list[tuple[float, float, float]] = []
        """Requests that run and wait, and the share of the KV cache in use, or NaN."""
        self._latest: Mapping[str, float] = {}
        self._before: Mapping[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EngineWatch:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="engine watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_WATCH_END_LIMIT_S)

    def take(self) -> dict[str, float]:
        """What was seen since the last call. Empty for an engine that says nothing about itself."""
        if self._is_local:
            self._look()
        with self._lock:
            seen, self._seen = self._seen, self._seen[-1:]
            latest, before, self._before = self._latest, self._before, self._latest
        if not seen:
            return {}
        metrics: dict[str, float] = {}
        for name, values in zip(("running", "waiting", "kv_used"), np.array(seen).T, strict=True):
            if not np.isnan(values).any():
                metrics |= {f"engine/{name}_mean": float(values.mean()), f"engine/{name}_max": float(values.max())}
        counts = {name: _since(latest, before, key) for name, key in _COUNTERS.items() if key in latest}
        metrics |= {f"engine/{name}": count for name, count in counts.items()}
        if {"cached_tokens", "prefilled_tokens"} <= counts.keys():
            prompts = counts["cached_tokens"] + counts["prefilled_tokens"]
            if prompts:
                metrics["engine/cache_hit_fraction"] = counts["cached_tokens"] / prompts
        return metrics

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with suppress(HeadwaterError):  # the engine is closed or restarts; then there is nothing to see
                self._look()

    def _look(self) -> None:
        now = self._status()
        if not now.is_reachable:
            return
        total = now.metrics.get("kv_pages_total", 0)
        used = now.metrics["kv_pages_used"] / total if total else now.metrics.get("kv_used", float("nan"))
        with self._lock:
            self._seen.append((now.num_running, now.num_waiting, used))
            self._latest = {**self._latest, **now.metrics}  # a server may leave out its counters once


def _since(latest: Mapping[str, float], before: Mapping[str, float], key: str) -> float:
    """By how much a counter grew. The counters of an engine that was replaced begin again."""
    grown = latest[key] - before.get(key, 0)
    return grown if grown >= 0 else latest[key]
