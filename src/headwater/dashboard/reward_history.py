"""A few rewards over a whole run, for a small curve in the listing. A long file is not read for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from headwater.dashboard.plain_values import finite
from headwater.observe.run_directory import last_records

_NUM_HISTORY = 60
_LINE_BYTES = 64 << 10


def reward_history(path: Path) -> list[float]:
    """A few rewards over the whole run. Of a long file, only as many lines are read."""
    try:
        size = path.stat().st_size
        if size <= 4 * _LINE_BYTES:
            records = [each for each in last_records(path, None).records if each["kind"] == "train"]
            step = max(1, math.ceil(len(records) / _NUM_HISTORY))
            found = [finite(each.get("reward/mean")) for each in records[::step]]
        else:
            with path.open("rb") as file:
                places = [size * place // _NUM_HISTORY for place in range(_NUM_HISTORY)]
                found = [_reward_after(file, place) for place in places]
    except OSError:
        return []
    return [value for value in found if value is not None]


def _reward_after(file: Any, place: int) -> float | None:
    """The reward in the first training record that begins after ``place``."""
    file.seek(place)
    if place:
        file.readline(_LINE_BYTES)
    for _ in range(3):  # evaluations have lines, too
        try:
            record = json.loads(file.readline(_LINE_BYTES))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") == "train":
            return finite(record.get("reward/mean"))
    return None
