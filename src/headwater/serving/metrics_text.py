"""Numbers in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "headwater_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = frozenset(
    {
        "num_tokens_generated",
        "num_tokens_prefilled",
        "num_tokens_cached",
        "num_preempted",
        "num_interrupted",
        "num_weight_updates",
        "num_finished",
        "num_aborted",
        "num_failed",
    }
)
"""Numbers that only grow; all others go up and down."""


def metrics_text(values: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """One metric per number in ``values``; ``labels`` say what the numbers are about, in a metric of their own."""
    described = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    lines = [f"# TYPE {PREFIX}info gauge", f"{PREFIX}info{{{described}}} 1"]
    for name, value in values.items():
        if not isinstance(value, int | float):
            continue
        lines.append(f"# TYPE {PREFIX}{name} {'counter' if name in COUNTERS else 'gauge'}")
        # A bool is a number here: 0 or 1.
        lines.append(f"{PREFIX}{name} {int(value) if isinstance(value, bool) else value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
