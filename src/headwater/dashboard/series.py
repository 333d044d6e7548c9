"""Curves of a run: chosen metrics at a limited number of points, staleness, and the time of each stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.dashboard.metric_texts import texts
from headwater.dashboard.plain_values import finite, floats
from headwater.dashboard.record_log import KINDS, Floats, RecordLog, Table

MOST_POINTS = 4000
FEW_POINTS = 500
STAGES = {
    "wait": "waiting for rollouts",
    "experience": "log-probs and advantages",
    "train": "updates",
    "publish": "sending weights to the engine",
    "record": "writing records",
    "evaluate": "evaluation",
    "checkpoint": "saving a checkpoint",
    "offload": "moving memory between stages",
    "other": "the rest",
}
"""The stages of a step in their order. They add up to ``time/step_s``."""
_LAG = re.compile(r"staleness/lag_(\d{1,6})")


class Buckets:
    """Divides rows into at most ``points`` runs of neighbours. One row per bucket if there are few."""

    def __init__(self, num_rows: int, points: int) -> None:
        self.is_sampled = num_rows > points
        count = min(num_rows, points)
        self.starts = np.linspace(0, num_rows, count, endpoint=False).astype(np.int64) if count else np.zeros(0, int)
        self.ends = np.append(self.starts[1:], num_rows)[: len(self.starts)]

    def mean(self, values: Floats) -> Floats:
        """Means of the finite values; NaN for a bucket without any."""
        if not self.is_sampled:
            return values
        finite = np.isfinite(values)
        sums = np.add.reduceat(np.where(finite, values, 0.0), self.starts)
        counts = np.add.reduceat(finite.astype(np.int64), self.starts)
        means: Floats = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        return means

    def low(self, values: Floats) -> Floats:
        found = np.minimum.reduceat(np.where(np.isfinite(values), values, np.inf), self.starts)
        return np.where(np.isfinite(found), found, np.nan)

    def high(self, values: Floats) -> Floats:
        found = np.maximum.reduceat(np.where(np.isfinite(values), values, -np.inf), self.starts)
        return np.where(np.isfinite(found), found, np.nan)

    def last(self, values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = values[self.ends - 1]
        return found


def sampled(
    table: Table, keys: Sequence[str], points: int, first: int | None = None, last: int | None = None
) -> dict[str, Any]:
    """The values of ``keys`` between two steps, at ``points`` or fewer places that all of them share."""
    steps = table.steps()
    begin = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    end = max(begin, end)
    buckets = Buckets(end - begin, points)
    known = set(table.names())
    series: dict[str, Any] = {}
    for key in keys:
        if key not in known:
            continue
        values = table.column(key)[begin:end]
        series[key] = {
            "mean": floats(buckets.mean(values)),
            "min": floats(buckets.low(values)) if buckets.is_sampled else None,
            "max": floats(buckets.high(values)) if buckets.is_sampled else None,
            "num_not_finite": int(np.isinf(values).sum()),
        }
    times = table.column("time")[begin:end]
    return {
        "is_sampled": buckets.is_sampled,
        "num": end - begin,
        "steps": buckets.last(steps[begin:end]).tolist(),
        "times": floats(buckets.last(times)) if len(times) else [],
        "series": series,
        "unknown": [key for key in keys if key not in known],
    }


def listed(log: RecordLog) -> dict[str, Any]:
    """Every key of a run, in groups, with what it means."""
    known = texts()
    groups: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        table = log.tables[kind]
        counts = table.counts()
        for key in table.names():
            told = known.of(key, kind)
            entry = {"key": key, "kind": kind, "text": told.text, "last": table.last(key), "num": counts.get(key, 0)}
            groups.setdefault(told.group, []).append(entry)
    order = {name: place for place, name in enumerate(known.groups)}
    ordered = sorted(groups, key=lambda name: order.get(name, len(order)))
    steps = log.tables["train"].steps()
    return {
        "groups": [{"name": name, "keys": groups[name]} for name in ordered],
        "num_train": len(steps),
        "num_eval": len(log.tables["eval"]),
        "last_step": int(steps[-1]) if len(steps) else 0,
    }


def staleness(table: Table) -> dict[str, Any]:
    """Shares of trained tokens by how many versions old they are."""
    matches = sorted((int(match[1]), key) for key in table.names() if (match := _LAG.fullmatch(key)))
    steps, buckets = table.steps(), Buckets(len(table), FEW_POINTS)
    columns = [np.nan_to_num(table.column(key)) for _, key in matches]
    lags = np.array([lag for lag, _ in matches], dtype=np.float64)
    of_all = np.array(columns).reshape(len(columns), len(steps))
    mean = lags @ of_all if len(columns) else np.full(len(steps), np.nan)
    return {
        "steps": buckets.last(steps).tolist(),
        "lags": [lag for lag, _ in matches],
        "shares": [floats(buckets.mean(each)) for each in columns],
        "last": [float(each[-1]) for each in columns if len(each)],
        "mean": floats(buckets.mean(mean)),
        "dropped_groups": floats(buckets.mean(table.column("staleness/dropped_groups"))),
        "masked_tokens": floats(buckets.mean(table.column("staleness/masked_tokens"))),
    }


def mean_lag(record: dict[str, Any]) -> float | None:
    """How many versions old the trained tokens of one record are, on average."""
    shares = {int(match[1]): finite(value) for key, value in record.items() if (match := _LAG.fullmatch(key))}
    numbers = [lag * share for lag, share in shares.items() if share is not None]
    return sum(numbers) if numbers else None


def stages(table: Table) -> dict[str, Any]:
    """Seconds per step and stage. What no known stage accounts for belongs to ``other``."""
    steps, buckets = table.steps(), Buckets(len(table), FEW_POINTS)
    step_s = table.column("time/step_s")
    measured = {name: np.nan_to_num(table.column(f"time/{name}_s")) for name in STAGES if name != "other"}
    rest = np.maximum(0.0, np.nan_to_num(step_s) - sum(measured.values(), np.zeros(len(steps))))
    measured["other"] = rest
    shown = {name: each for name, each in measured.items() if each.any()}
    generate, reward = table.column("time/generate_s"), table.column("time/reward_s")
    return {
        "steps": buckets.last(steps).tolist(),
        "stages": [
            {"name": name, "text": STAGES[name], "seconds": floats(buckets.mean(each))} for name, each in shown.items()
        ],
        "step_s": floats(buckets.mean(step_s)),
        "generate_s": floats(buckets.mean(generate)) if np.isfinite(generate).any() else None,
        "reward_s": floats(buckets.mean(reward)) if np.isfinite(reward).any() else None,
        "totals": {name: float(each.sum()) for name, each in shown.items()},
    }
