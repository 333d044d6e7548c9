"""The state of a run: its row in the listing, its summary and the doctor's findings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from headwater.dashboard.metric_texts import texts
from headwater.dashboard.plain_values import finite
from headwater.dashboard.rollout_files import FOLDERS
from headwater.dashboard.runs import Run
from headwater.dashboard.series import mean_lag
from headwater.observe.doctor import Diagnosis, examine
from headwater.observe.run_directory import last_records

_FRESH_S, _FRESH_IF_OVER_S = 2.0, 30.0
"""A diagnosis depends on the time, so it is made again after this long, even if no file has changed."""
_HEADLINES = (
    "reward/mean", "response_length/mean", "actor/entropy", "rollout_gap/logprob_abs_mean", "kl/reference",
    "throughput/tokens_per_s", "time/step_s", "memory/host_peak_gib", "memory/gpu_peak_gib",
)  # fmt: skip
_LOWER_IS_BETTER = ("rollout_gap/", "time/", "memory/", "kl/")
_NUM_HISTORY = 60
_LINE_BYTES = 64 << 10


class Overview:
    """Answers about runs. What is expensive is kept until a file changes or the run is deleted."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Run, tuple[tuple[object, ...], float, Diagnosis]] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Run, tuple[Diagnosis, dict[str, Any]]] = WeakKeyDictionary()

    def diagnosis(self, run: Run) -> Diagnosis:
        """The doctor's. The contents of checkpoints are not read."""
        signature, now = run.signature(), time.monotonic()
        kept = self._kept.get(run)
        if kept is not None and kept[0] == signature and now - kept[1] < _fresh_s(kept[2]):
            return kept[2]
        try:
            found = examine(run.directory, most_bytes=0)
        except OSError:
            run.check()  # it was deleted meanwhile
            raise
        self._kept[run] = signature, now, found
        return found

    def row(self, run: Run) -> dict[str, Any]:
        """The run's line in the listing."""
        diagnosis = self.diagnosis(run)
        kept = self._rows.get(run)
        if kept is not None and kept[0] is diagnosis:
            return kept[1]
        row = self._row(run, diagnosis)
        self._rows[run] = diagnosis, row
        return row

    def _row(self, run: Run, diagnosis: Diagnosis) -> dict[str, Any]:
        status, last = run.status(), run.directory.last_metrics(20)
        train = _newest(last, "train")
        evaluated = _newest(last, "eval") or _newest(run.directory.last_metrics(200), "eval")
        config = run.config()
        times = [each.get("time") for each in last] + [status.time if status else None]
        numbers = [value for value in map(finite, times) if value is not None]
        return {
            "name": run.name,
            "state": diagnosis.life.state,
            "state_text": diagnosis.life.text,
            "step": diagnosis.step,
            "total_steps": diagnosis.total_steps,
            "reward": finite(train.get("reward/mean")),
            "eval_reward": finite(evaluated.get("reward/mean")),
            "tokens_per_s": finite(train.get("throughput/tokens_per_s")),
            "staleness": finite(mean_lag(train)),
            "step_s": finite(diagnosis.step_s),
            "message": _message(diagnosis),
            "started": status.started if status else _changed(run.path / "config.yaml"),
            "updated": max(numbers, default=_changed(run.path / "config.yaml")),
            "model": config.model.path if config else "",
            "data": _joined(config.data.train) if config else "",
            "has_rollouts": any(files.exists() for files in run.rollouts.values()),
            "reward_history": _reward_history(run.directory.metrics_file),
        }

    def summary(self, run: Run) -> dict[str, Any]:
        """Everything about a run that has one value."""
        diagnosis, status, directory = self.diagnosis(run), run.status(), run.directory
        with run.records.lock:
            run.records.refresh()
            tables = run.records.tables
            headlines = [each for key in _HEADLINES if (each := _headline(tables["train"], key)) is not None]
            num_train, num_eval = len(tables["train"]), len(tables["eval"])
            skipped = run.records.num_skipped
        problems = [f"{skipped} lines of metrics.jsonl are no records and were skipped."] if skipped else []
        return {
            **self.row(run),
            "path": str(run.path),
            "run_id": _text(directory.id_file),
            "version": diagnosis.version,
            "notices": list(status.notices) if status else [],
            "log": [asdict(line) for line in diagnosis.log],
            "error": diagnosis.error,
            "stage": asdict(diagnosis.stage) if diagnosis.stage else None,
            "checkpoints": list(diagnosis.checkpoint_steps),
            "has_trace": bool(run.trace_files()),
            "num_train": num_train,
            "num_eval": num_eval,
            "files": {
                "metrics": _size(directory.metrics_file),
                "ledger": _size(directory.ledger_file),
                "status": _size(directory.status_file),
                **{FOLDERS[source]: files.count() for source, files in run.rollouts.items()},
            },
            "episodes": dict(diagnosis.episodes),
            "oldest_groups": [
                {"uid": each.uid, "seconds": each.seconds, "doing": each.doing} for each in diagnosis.oldest_groups
            ],
            "summary": headlines,
            "resume": diagnosis.resume,
            "problems": problems,
        }

    def doctor(self, run: Run) -> dict[str, Any]:
        return self.diagnosis(run).to_json()


def _reward_history(path: Path) -> list[float]:
    """A few rewards over the whole run, for a small curve. Of a long file, only as many lines are read."""
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


def _headline(table: Any, key: str) -> dict[str, Any] | None:
    values = table.column(key)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    best = values.min() if key.startswith(_LOWER_IS_BETTER) else values.max()
    text = texts().of(key, "train").text
    return {"key": key, "text": text, "first": float(values[0]), "last": float(values[-1]), "best": float(best)}


def _newest(records: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The last record of a kind; empty if there is none."""
    return next((each for each in reversed(records) if each["kind"] == kind), {})


def _fresh_s(diagnosis: Diagnosis) -> float:
    return _FRESH_IF_OVER_S if diagnosis.life.is_over else _FRESH_S


def _message(diagnosis: Diagnosis) -> str:
    if diagnosis.error:
        return diagnosis.error.strip().splitlines()[0]
    if diagnosis.stage is not None:
        return f"{diagnosis.stage.name}: {diagnosis.stage.done} of {diagnosis.stage.total}"
    problem = next((each.what for each in diagnosis.findings if each.severity == "problem"), "")
    return problem or (diagnosis.log[-1].message if diagnosis.log else "")


def _joined(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[:200].decode("utf-8", "replace").strip()
    except OSError:
        return ""
