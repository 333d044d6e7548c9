"""What generates the rollouts of a run: now, and over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headwater.dashboard.plain_values import finite
from headwater.dashboard.runs import Run
from headwater.dashboard.series import sampled
from headwater.observe.doctor import Diagnosis

CHARTS: tuple[dict[str, Any], ...] = (
    {
        "title": "Requests",
        "unit": "running and waiting",
        "keys": ["engine/running_mean", "engine/running_max", "engine/waiting_mean", "engine/waiting_max"],
        "format": "number",
    },
    {
        "title": "KV cache in use",
        "unit": "share",
        "keys": ["engine/kv_used_mean", "engine/kv_used_max"],
        "format": "percent",
    },
    {
        "title": "Prefix cache",
        "unit": "share of prompt tokens found",
        "keys": ["engine/cache_hit_fraction"],
        "format": "percent",
    },
    {
        "title": "Tokens per step",
        "unit": "",
        "keys": ["engine/generated_tokens", "engine/prefilled_tokens", "engine/cached_tokens"],
        "format": "short",
    },
    {
        "title": "Disturbances per step",
        "unit": "requests",
        "keys": ["engine/preempted", "engine/aborted", "engine/failed"],
        "format": "number",
    },
)
"""The curves that the page draws. It is told them, so that what is drawn is what is sent."""
_NUM_POINTS = 500


def engine(run: Run, diagnosis: Diagnosis) -> dict[str, Any]:
    """What generates: now, and over the last steps."""
    problems: list[str] = []
    status = run.status(problems)
    told = status.engine if status else {}
    with run.records.lock:
        run.records.refresh()
        train = run.records.tables["train"]
        known = set(train.names())
        past = sampled(train, [key for chart in CHARTS for key in chart["keys"] if key in known], _NUM_POINTS)
    return {
        "source": "status.json",
        "time": status.time if status else None,
        "is_live": not diagnosis.life.is_over and status is not None,
        "version": status.version if status else None,
        "engine": {**engine_numbers(told), "num_restarts": status.engine_restarts} if status and told else None,
        "servers": [asdict(each) for each in status.servers] if status else [],
        "charts": list(CHARTS),
        "history": {"steps": past["steps"], "series": past["series"]},
        "capacity": diagnosis.capacity,
        "waits": diagnosis.to_json()["waits"],
        "problems": problems,
    }


def engine_numbers(told: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine in the same words, whichever engine told it."""
    metrics = told.get("metrics")
    numbers = (
        {name: value for name, value in metrics.items() if finite(value) is not None}
        if isinstance(metrics, Mapping)
        else {}
    )
    pages, cached = finite(numbers.get("kv_pages_total")), finite(numbers.get("num_tokens_cached"))
    prefilled = finite(numbers.get("num_tokens_prefilled"))
    prompts = (cached or 0) + (prefilled or 0)
    return {
        "num_running": told.get("num_running"),
        "num_waiting": told.get("num_waiting"),
        "kv_used": numbers["kv_pages_used"] / pages if pages and "kv_pages_used" in numbers else numbers.get("kv_used"),
        "cache_hits": cached / prompts if cached is not None and prompts else None,
        "tokens_per_s": numbers.get("tokens_per_s"),
        "is_paused": bool(told.get("is_paused")),
        "is_asleep": bool(told.get("is_asleep")),
        "metrics": numbers,
    }
